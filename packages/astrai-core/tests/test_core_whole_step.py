"""A decode step as one kernel (G2): which models and steps it takes, and that it gets every weight where it belongs."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from astrai_core import AutoModel, ModelConfig, kernels
from astrai_core.attention.torch_native import TorchNativeBackend
from astrai_core.errors import BackendError
from astrai_core.model.whole_step import WholeStep, unsupported

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 64,
}


def build(options: dict[str, Any]) -> Any:
    config = ModelConfig.from_dict({"model_type": "llama"} | SHAPE | options)
    model = AutoModel.from_config(config, "float32", "cpu", torch.Generator().manual_seed(0)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases, too, or an exchange of two would not show
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model


@dataclass
class Bound:
    """What a model's steps read."""

    weights: tuple[Any, ...]
    options: dict[str, Any]


class Twin:
    """The kernels' module, its launch replaced by the twin in plain torch."""

    MOST_ROWS = 8

    def __init__(self) -> None:
        self.steps = 0
        self.bound = 0
        self._twin = pytest.importorskip("astrai_kernels.reference_step", reason="astrai-kernels is not installed")

    StepLayer = SimpleNamespace

    def DecodeStep(self, *weights: Any, **options: Any) -> Bound:
        self.bound += 1
        return Bound(weights, options)

    def decode_step(self, step: Bound, *inputs: Any) -> Any:
        self.steps += 1
        return self._twin.decode_step(*step.weights, *inputs, **step.options)


@pytest.fixture
def twin(monkeypatch: pytest.MonkeyPatch) -> Twin:
    found = Twin()
    monkeypatch.setattr(WholeStep, "unavailable", staticmethod(lambda model: None))
    monkeypatch.setattr(kernels, "module", lambda name: {"step": found}[name])
    return found


@torch.inference_mode()
def steps(model: Any, pool: Any, pattern: list[dict[int, int]], whole: WholeStep | None = None) -> list[torch.Tensor]:
    """Results of a pattern of steps, by `whole` where it takes one and there is one."""
    tokens = torch.randint(96, (4, 32), generator=torch.Generator().manual_seed(2))
    logits = []
    for step in pattern:
        before = list(pool.lens)
        cache = pool.step(step)
        rows = torch.cat([torch.full((n,), row) for row, n in step.items()])
        positions = torch.cat([torch.arange(before[row], before[row] + n) for row, n in step.items()])
        ids = tokens[rows, positions]
        if whole is not None and whole.takes(ids, cache):
            logits.append(whole.run(ids, positions, cache))
            continue
        logits.append(model.forward_paged(ids, positions, cache, TorchNativeBackend()))
    return logits


PATTERN = [{0: 7, 2: 3}, {0: 1, 2: 1}, {1: 1, 0: 1}, {3: 5, 0: 1}, {3: 1, 1: 1, 0: 1, 2: 1}]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attention_bias": True, "tie_word_embeddings": False},
        {"model_type": "qwen2"},
        {"model_type": "qwen3", "num_attention_heads": 2, "num_key_value_heads": 1},
    ],
    ids=["llama", "biases, untied", "qwen2", "qwen3, own head size"],
)
def test_the_kernel_gets_what_the_layers_have(options, twin, step_pool):
    """Steps through the twin equal steps op by op, with the steps that it does not take in between."""
    model = build(options)
    heads = model.config.num_key_value_heads
    expected = steps(model, step_pool([None] * 3, heads, 64, 4, 32, 4), PATTERN)
    whole = WholeStep(model)
    pool = step_pool([None] * 3, heads, 64, 4, 32, 4)
    found = steps(model, pool, PATTERN, whole)
    assert twin.steps == 3, "the decode steps, and no chunk"
    assert twin.bound == 1, "the addresses did not change"
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, atol=2e-4, rtol=1e-4)
    steps(model, step_pool([None] * 3, heads, 64, 4, 32, 4), PATTERN[:2], whole)
    assert twin.bound == 2, "another pool"


def test_a_pool_that_is_forgotten_is_let_go(twin, step_pool):
    """Rule 12: after a sleep nothing but the pool itself holds its memory; the next step binds it anew."""
    model = build({})
    whole = WholeStep(model)
    pool = step_pool([None] * 3, 2, 64, 4, 32, 4)
    steps(model, pool, PATTERN[:2], whole)
    held = weakref.ref(whole._step)
    assert held() is not None
    whole.forget()
    assert held() is None
    steps(model, pool, PATTERN[2:3], whole)
    assert twin.bound == 2


def test_which_steps_it_takes(twin, step_pool):
    """Guesses that are checked read keys of this very step; nine rows are too many; deterministic mode has its own order."""
    model = build({})
    whole = WholeStep(model)
    pool = step_pool([None] * 3, 2, 64, 9, 32, 4)
    with torch.inference_mode():
        cache = pool.step({0: 1, 1: 1})
        ids = torch.zeros(2, dtype=torch.int64)
        assert whole.takes(ids, cache)
        alone = WholeStep(model, 1)
        assert alone.takes(ids[:1], cache)
        assert not alone.takes(ids, cache)
        assert not whole.takes(torch.zeros(9, dtype=torch.int64), cache)
        cache.groups[0].reads_own_keys = True
        assert not whole.takes(ids, cache)
        cache.groups[0].reads_own_keys = False
        torch.use_deterministic_algorithms(True)
        try:
            assert not whole.takes(ids, cache)
        finally:
            torch.use_deterministic_algorithms(False)
        assert not whole.takes(ids, pool.step({0: 2}))
        half = step_pool([None] * 3, 2, 64, 2, 32, 4, dtype=torch.bfloat16).step({0: 1})
        assert not whole.takes(ids[:1], half), "a cache of another type"
    assert not whole.takes(ids, cache), "gradients are recorded"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_type": "mistral", "sliding_window": 9}, "attention window"),
        ({"mlp_bias": True}, "feed-forward layers have biases"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0, 1]}, "does not rotate whole heads"),
        (
            {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
            "experts",
        ),
    ],
    ids=["window", "bias", "no rotation", "experts"],
)
def test_models_it_does_not_know_are_refused_by_name(options, message):
    model = build(options).to(torch.bfloat16)
    assert message in (unsupported(model) or "")
    with pytest.raises(BackendError, match="the model cannot run a step in one kernel: it needs a CUDA device"):
        WholeStep(model)


def test_types_it_does_not_know():
    assert "not all float16 or bfloat16" in (unsupported(build({})) or "")
    assert unsupported(build({}).to(torch.bfloat16)) is None
