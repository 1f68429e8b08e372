"""The balance of experts as a part of every strategy's loss (row TR2)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from astrai_core import AutoModel, ModelConfig
from astrai_train.data.collate import Span, TrainBatch, collate, collate_pairs
from astrai_train.strategy.base import BaseStrategy, step_loss
from astrai_train.strategy.dpo import DPOStrategy
from astrai_train.strategy.preference_losses import PreferenceLossFactory
from astrai_train.strategy.sft import SFTStrategy

CONFIG: dict[str, Any] = {
    "model_type": "qwen2_moe",
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 20,
    "router_aux_loss_coef": 0.5,
}


def make_model(**changes: Any) -> Any:
    config = ModelConfig.from_dict(CONFIG | changes)
    return AutoModel.from_config(config, device="cpu", generator=torch.Generator().manual_seed(1))


def sft(model: Any) -> SFTStrategy:
    return SFTStrategy(model, label_smoothing=0.0, loss_chunk_tokens=1000, neftune_alpha=None)


def ids(length: int, seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 50, length)


def span(length: int, seed: int) -> Span:
    return Span(ids(length, seed), np.random.default_rng(seed + 100).integers(0, 2, length))


def whole(strategy: BaseStrategy, *batches: TrainBatch) -> tuple[float, torch.Tensor, dict[str, float]]:
    """Loss, gradient and metrics of a step of these batches."""
    strategy.model.zero_grad(set_to_none=True)
    outputs = [strategy(batch) for batch in batches]
    for output in outputs:
        output.loss_sum.backward()
    total = step_loss([output.detach() for output in outputs])
    assert total.loss is not None
    gradient = torch.cat([value.grad.flatten() for value in strategy.model.parameters()])
    return total.loss, gradient / total.n_supervised, dict(total.metrics)


def assert_same(found: Any, expected: Any) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert (found[1] - expected[1]).norm() <= 2e-6 * float(expected[1].norm())
    assert found[2] == pytest.approx(expected[2], rel=1e-5, abs=1e-6)


def test_any_split_and_packing_gives_the_same() -> None:
    """Training rule 1: the same holds for the auxiliary loss."""
    documents = [span(n, n) for n in (9, 4, 13, 6)]
    one = collate([[document] for document in documents], pad_id=0)
    expected = whole(sft(make_model()), one)
    packed = collate([documents[:2], documents[2:]], pad_id=0, seq_len=24)
    assert_same(whole(sft(make_model()), packed), expected)
    alone = [collate([[document]], pad_id=0, seq_len=17) for document in documents]
    assert_same(whole(sft(make_model()), *alone, collate([[]], pad_id=0)), expected)


def test_pairs_in_any_company() -> None:
    pairs = [(ids(3, 0), ids(5, 1), ids(9, 2)), (ids(1, 3), ids(2, 4), ids(2, 5))]
    nothing = (ids(0, 0),) * 3

    def dpo() -> DPOStrategy:
        loss = PreferenceLossFactory.create("orpo", beta=0.1)
        return DPOStrategy(make_model(), loss=loss, reference=None, loss_chunk_tokens=100)

    expected = whole(dpo(), collate_pairs(pairs, pad_id=0))
    split = [collate_pairs([pair, nothing], pad_id=0) for pair in pairs]
    assert_same(whole(dpo(), *split), expected)
    assert expected[2]["aux_loss"] >= 0.9, "a mean over pairs of what is 1 for an even load"


def test_what_is_logged() -> None:
    """Task, raw and weighted; the loss is their sum; without a coefficient, or in evaluation, there is only the task.

    Beside them the routers' entropy and the load of the busiest expert (maths.md section 8), within their bounds.
    """
    batch = collate([[span(12, 0)], [span(7, 1)]], pad_id=0)
    loss, gradient, metrics = whole(sft(make_model()), batch)
    assert list(metrics) == ["task_loss", "aux_loss", "aux_loss_weighted", "router_entropy", "router_imbalance"]
    assert 0 < metrics["router_entropy"] <= math.log(4)
    assert 1 <= metrics["router_imbalance"] <= 4 / 2
    assert metrics["aux_loss_weighted"] == pytest.approx(0.5 * metrics["aux_loss"])
    assert loss == pytest.approx(metrics["task_loss"] + metrics["aux_loss_weighted"])
    plain, plain_gradient, nothing = whole(sft(make_model(router_aux_loss_coef=0.0)), batch)
    assert (plain, nothing) == (pytest.approx(metrics["task_loss"]), {})
    assert (gradient - plain_gradient).norm() > 1e-3 * plain_gradient.norm()
    evaluated = sft(make_model())
    evaluated.model.eval()
    output = evaluated(batch)
    assert output.loss_sum.item() / output.n_supervised == pytest.approx(plain)


def test_a_batch_without_a_label_gives_zero() -> None:
    """Training rule 1: its documents count nothing, and every weight gets a gradient."""
    output = sft(make_model())(collate([[Span(ids(6, 0), np.zeros(6))]], pad_id=0))
    assert (output.loss_sum.item(), output.n_supervised) == (0.0, 0)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputation_counts_nothing_twice(mode: Any) -> None:
    """maths.md section 8: counts are taken outside of what is computed again."""
    from astrai_train.recompute import recompute_activations

    batch = collate([[span(12, 0), span(5, 2)], [span(7, 1)]], pad_id=0, seq_len=17)
    expected = whole(sft(make_model()), batch)
    model = make_model()
    assert recompute_activations(model, mode)
    assert_same(whole(sft(model), batch), expected)
