"""Supervised fine-tuning: the data's masks, and NEFTune's noise."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from astrai_core import AutoModel, ModelConfig
from astrai_train.data.collate import Span, TrainBatch, collate
from astrai_train.strategy.base import StrategyFactory
from astrai_train.strategy.neftune import neftune_noise, neftune_scale
from astrai_train.strategy.sft import SFTStrategy

HIDDEN = 24
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 50,
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


def sft(alpha: float | None = None, smoothing: float = 0.0) -> SFTStrategy:
    model = AutoModel.from_config(
        ModelConfig.from_dict(CONFIG), device="cpu", generator=torch.Generator().manual_seed(1)
    )
    options = {"label_smoothing": smoothing, "loss_chunk_tokens": 1000, "neftune_alpha": alpha}
    strategy = StrategyFactory.create("sft", model, **options)
    assert isinstance(strategy, SFTStrategy)
    return strategy


def span(length: int, seed: int = 0, mask: list[int] | None = None) -> Span:
    ids = np.random.default_rng(seed).integers(0, 50, length)
    return Span(ids, None if mask is None else np.array(mask))


PACKED = [[span(9, 0), span(4, 1)], [span(3, 2)]]
"""Rows of 16 and 16 tokens, with 3 and 13 of padding."""


def packed() -> TrainBatch:
    return collate(PACKED, pad_id=0, seq_len=16)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_only_what_the_mask_supervises(smoothing: float) -> None:
    """Training rule 2: token i is a target if and only if it is supervised; the end-of-turn token with it."""
    strategy = sft(smoothing=smoothing)
    mask = [1, 0, 0, 1, 1, 0, 1]  # the first has nothing before it
    output = strategy(collate([[span(7, mask=mask)]], pad_id=0))
    ids = torch.from_numpy(span(7).input_ids)
    targets = ids.where(torch.tensor(mask, dtype=torch.bool), -100)[1:]
    logits = strategy.model(ids[None]).logits[0, :-1]
    expected = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
    assert output.n_supervised == 3
    assert output.loss_sum.item() == pytest.approx(expected.item(), rel=1e-6)


# ---- NEFTune (arXiv 2310.05914) ----


def test_the_noise_of_a_token_goes_by_its_own_document() -> None:
    """alpha / sqrt(L d) with the real length L: neither padding nor the neighbours of a packed row count."""
    scale = neftune_scale(packed(), HIDDEN, alpha=5.0)
    lengths = [[9] * 9 + [4] * 4 + [0] * 3, [3] * 3 + [0] * 13]
    expected = [[5.0 / math.sqrt(n * HIDDEN) if n else 0.0 for n in row] for row in lengths]
    torch.testing.assert_close(scale, torch.tensor(expected))


def test_the_noise_is_uniform_within_its_scale() -> None:
    torch.manual_seed(0)
    batch, cpu = packed(), torch.device("cpu")
    scale = neftune_scale(batch, HIDDEN, 5.0)[..., None]
    noise = torch.stack([neftune_noise(batch, HIDDEN, 5.0, cpu) for _ in range(300)])
    assert (noise.abs() <= scale).all()
    assert not noise[:, scale.expand_as(noise[0]) == 0].any(), "padding stays as it is"
    shares = (noise / scale)[:, (scale > 0).expand_as(noise[0])].flatten()
    assert shares.mean().abs() < 0.01
    edges = torch.quantile(shares[:200_000], torch.tensor([0.1, 0.25, 0.5, 0.75, 0.9]))
    torch.testing.assert_close(edges, torch.tensor([-0.8, -0.5, 0.0, 0.5, 0.8]), atol=0.02, rtol=0)


def test_the_noise_equals_transformers_where_nothing_is_padded() -> None:
    """transformers sizes it by the padded length; on one whole row the two mean the same."""
    neftune = pytest.importorskip("transformers.integrations.neftune")
    batch = collate([[span(8)]], pad_id=0)
    vectors = torch.randn(1, 8, HIDDEN)
    torch.manual_seed(3)
    ours = vectors + neftune_noise(batch, HIDDEN, 5.0, torch.device("cpu"))
    torch.manual_seed(3)
    module = SimpleNamespace(training=True, neftune_noise_alpha=5.0)
    theirs = neftune.neftune_post_forward_hook(module, None, vectors.clone())
    assert (theirs - vectors).abs().max() > 0.1
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def test_noise_reaches_the_embeddings_in_training_alone() -> None:
    strategy, plain = sft(alpha=5.0), sft()
    expected = plain(packed()).loss_sum
    strategy.model.eval()
    before = torch.get_rng_state()
    assert torch.equal(strategy(packed()).loss_sum, expected)
    assert torch.equal(torch.get_rng_state(), before), "an evaluation draws nothing"
    strategy.model.train()
    torch.manual_seed(7)
    noisy = strategy(packed())
    torch.manual_seed(7)
    noise = neftune_noise(packed(), HIDDEN, 5.0, torch.device("cpu"))
    strategy.model.model.embed_tokens.register_forward_hook(lambda module, inputs, output: output + noise)
    strategy.model.eval()
    torch.testing.assert_close(strategy(packed()).loss_sum, noisy.loss_sum)
    assert abs(noisy.loss_sum.item() - expected.item()) > 0.01
    noisy.loss_sum.backward()
    assert all(parameter.grad is not None for parameter in strategy.model.parameters())
