"""Strategies: one shift, a sum over supervised tokens, chunked logits, and documents that never see each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from astrai_core import AutoModel, ModelConfig
from astrai_train.data.collate import Span, TrainBatch, collate
from astrai_train.strategy import cross_entropy
from astrai_train.strategy.base import LossOutput, StrategyFactory, document_lens, separation, step_loss
from astrai_train.strategy.seq import SeqStrategy

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
FAMILIES = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "window": {"model_type": "mistral", "sliding_window": 3},
    "qk norm": {"model_type": "qwen3", "head_dim": 8},
}


def make_model(**changes: Any) -> Any:
    config = ModelConfig.from_dict(CONFIG | changes)
    return AutoModel.from_config(config, device="cpu", generator=torch.Generator().manual_seed(1))


def seq(model: Any, chunk: int = 1000, smoothing: float = 0.0) -> SeqStrategy:
    return SeqStrategy(model, label_smoothing=smoothing, loss_chunk_tokens=chunk)


def span(length: int, seed: int, mask: Sequence[int] | None = None) -> Span:
    ids = np.random.default_rng(seed).integers(0, 50, length)
    return Span(ids, None if mask is None else np.array(mask))


def loss_and_gradient(strategy: SeqStrategy, *batches: TrainBatch) -> tuple[float, dict[str, torch.Tensor]]:
    """Of the sum over the batches."""
    strategy.model.zero_grad(set_to_none=True)
    total = 0.0
    for batch in batches:
        loss = strategy.compute_loss(batch)
        loss.backward()
        total += loss.item()
    return total, {name: value.grad.clone() for name, value in strategy.model.named_parameters()}


def assert_equal_gradients(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Within 1e-6 of the whole gradient's norm: fp32 sums in another order."""
    assert ours.keys() == theirs.keys()
    norm = torch.nn.utils.get_total_norm(list(theirs.values()))
    assert torch.nn.utils.get_total_norm([ours[name] - value for name, value in theirs.items()]) <= 1e-6 * norm


def test_one_shift_and_a_sum() -> None:
    """Training rule 2: token i + 1 is the target of place i if and only if it is supervised; pad id 0 is content."""
    model = make_model()
    batch = collate([[span(7, 0, [1, 1, 0, 1, 0, 0, 1])], [span(5, 1)]], pad_id=0, seq_len=9)
    logits = model(batch.input_ids).logits
    expected = sum(
        float(-torch.log_softmax(logits[row, place], -1)[batch.input_ids[row, place + 1]].detach())
        for row, places in ((0, [0, 2, 5]), (1, [0, 1, 2, 3]))
        for place in places
    )
    loss = seq(model).compute_loss(batch)
    assert (loss.dim(), loss.dtype, batch.n_supervised) == (0, torch.float32, 7)
    assert loss.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("chunk", [1, 3, 8, 14])
def test_chunks_change_nothing(chunk: int, smoothing: float) -> None:
    """Training rule 12: loss and gradient equal those of whole logits by torch's own cross entropy."""
    model = make_model(tie_word_embeddings=True)
    batch = collate([[span(9, 0)], [span(7, 1)]], pad_id=3, seq_len=9)
    logits = model(batch.input_ids).logits[:, :-1].flatten(0, 1)
    expected = F.cross_entropy(logits, batch.labels[:, 1:].flatten(), reduction="sum", label_smoothing=smoothing)
    expected.backward()
    gradient = {name: value.grad.clone() for name, value in model.named_parameters()}
    loss, ours = loss_and_gradient(seq(model, chunk, smoothing), batch)
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    assert_equal_gradients(ours, gradient)


def test_logits_are_never_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training rule 12: at most a chunk of rows has logits at once, once, and only rows that predict."""
    model = make_model()
    rows: list[int] = []

    def spy(logits: torch.Tensor, *rest: Any) -> Any:
        rows.append(logits.shape[0])
        return loss_and_slope(logits, *rest)

    loss_and_slope = cross_entropy.loss_and_gradient
    monkeypatch.setattr(cross_entropy, "loss_and_gradient", spy)
    seq(model, chunk=4)(collate([[span(12, 0, [0] * 6 + [1] * 6)]], pad_id=0)).loss_sum.backward()
    assert rows == [3, 3]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=10, deadline=None)
@given(lengths=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=3))
def test_a_packed_row_is_its_documents(family: str, lengths: list[list[int]]) -> None:
    """Training rule 4: loss and gradient equal those of the documents alone, padding and windows included."""
    model = make_model(**FAMILIES[family])
    rows = [[span(n, 10 * r + d) for d, n in enumerate(row)] for r, row in enumerate(lengths)]
    packed = collate(rows, pad_id=0, seq_len=38)
    alone = [collate([[document]], pad_id=0, seq_len=len(document.input_ids)) for row in rows for document in row]
    loss, gradient = loss_and_gradient(seq(model, 5), packed)
    expected, expected_gradient = loss_and_gradient(seq(model), *alone)
    assert packed.n_supervised == sum(batch.n_supervised for batch in alone)
    assert loss == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert_equal_gradients(gradient, expected_gradient)


def test_separation_is_not_for_nothing() -> None:
    """maths.md section 11: plain causal attention over a packed row gives another loss."""
    model = make_model()
    packed = collate([[span(6, 0), span(6, 1)]], pad_id=0)
    joined = TrainBatch(packed.input_ids, packed.labels, packed.position_ids, packed.doc_ids * 0, packed.n_supervised)
    joined.doc_ids[:, 12:] = -1
    assert seq(model).compute_loss(joined).item() != pytest.approx(seq(model).compute_loss(packed).item(), rel=1e-2)


def test_lengths_of_documents() -> None:
    packed = collate([[span(3, 0), span(2, 1)], [span(4, 2)]], pad_id=0, seq_len=6)
    assert document_lens(packed) == (3, 2, 4)
    assert separation(packed) == (3, 2, 1, 4, 2), "padding is a run of its own"
    assert separation(collate([[span(3, 0)], [span(6, 1)]], pad_id=0, seq_len=6)) is None


def test_a_batch_without_a_label_gives_zero() -> None:
    """Training rule 1: it contributes 0, and a gradient of zeros to every weight, so that no collective is skipped."""
    batch = collate([[span(4, 0, [0, 0, 0, 0])], []], pad_id=0, seq_len=4)
    loss, gradient = loss_and_gradient(seq(make_model()), batch)
    assert (loss, batch.n_supervised) == (0.0, 0)
    assert all(not value.any() for value in gradient.values())


def test_the_contract_of_a_strategy() -> None:
    """Row TR1: compute_loss gives a tensor, the call adds plain floats, and the step's loss is a float."""
    strategy = StrategyFactory.create("seq", make_model(), label_smoothing=0.0, loss_chunk_tokens=8)
    output = strategy(collate([[span(5, 0)]], pad_id=0))
    assert isinstance(output.loss_sum, torch.Tensor) and output.loss_sum.requires_grad
    assert not output.detach().loss_sum.requires_grad
    assert all(type(value) is float for value in output.metrics.values())
    assert type(step_loss([output.detach()]).loss) is float


def test_a_step_divides_once() -> None:
    """maths.md section 11: token losses [4] and [1, 1, 1] give 1.75, where a mean of means gives 2.5."""
    outputs = [LossOutput(torch.tensor(4.0), 1, {"hits": 1.0}), LossOutput(torch.tensor(3.0), 3, {"hits": 0.0})]
    assert step_loss(outputs) == step_loss(outputs[::-1])
    assert (step_loss(outputs).loss, step_loss(outputs).metrics) == (1.75, {"hits": 0.25})
    empty = step_loss([LossOutput(torch.tensor(0.0), 0)])
    assert (empty.loss, empty.n_supervised) == (None, 0)
