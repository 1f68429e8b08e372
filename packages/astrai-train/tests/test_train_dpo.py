"""Preference strategies: pairs whatever their company, three references, and what is measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from astrai_core import AutoModel, ModelConfig, save_pretrained
from astrai_core.config.lora import LoRAConfig
from astrai_core.errors import CheckpointError, ConfigError, DataError
from astrai_core.model.lora import adapters, apply_lora
from astrai_train.config import DPOConfig, TrainConfig
from astrai_train.data.collate import PairBatch, collate, collate_pairs
from astrai_train.strategy import build
from astrai_train.strategy.base import step_loss
from astrai_train.strategy.dpo import METRICS, DPOStrategy
from astrai_train.strategy.preference_losses import PreferenceLossFactory, create_preference_loss
from astrai_train.strategy.reference import AdapterOff, CachedLogprobs, FrozenCopy, Reference, row_keys

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
LOSSES = sorted(PreferenceLossFactory.names())
PAIRS = [
    tuple(np.random.default_rng(10 * i + j).integers(0, 50, n) for j, n in enumerate(lengths))
    for i, lengths in enumerate([(3, 5, 2), (1, 1, 9), (7, 4, 4), (2, 12, 3)])
]
NOTHING = tuple(np.zeros(0, np.int64) for _ in range(3))


def make_model(seed: int = 1, **changes: Any) -> Any:
    config = ModelConfig.from_dict(CONFIG | changes)
    return AutoModel.from_config(config, device="cpu", generator=torch.Generator().manual_seed(seed))


def batch_of(*pairs: Any) -> PairBatch:
    return collate_pairs(pairs, pad_id=0)


def config_of(loss: str, **changes: Any) -> DPOConfig:
    extra = {"label_smoothing": 0.1} if loss in ("cdpo", "robust") else {}
    return DPOConfig(loss=loss, **extra, **changes)


def dpo(loss: str = "sigmoid", model: Any = None, reference: Reference | None = None, chunk: int = 1000) -> DPOStrategy:
    """A strategy whose reference, where one is needed and not given, is a model with other weights."""
    made = create_preference_loss(config_of(loss))
    if made.needs_reference and reference is None:
        reference = FrozenCopy(make_model(2), 1000)
    return DPOStrategy(model or make_model(), loss=made, reference=reference, loss_chunk_tokens=chunk)


def loss_and_gradient(strategy: DPOStrategy, *batches: PairBatch) -> tuple[float, torch.Tensor, dict[str, float]]:
    """Of the sum over the batches; the gradient in one piece."""
    strategy.model.zero_grad(set_to_none=True)
    outputs = [strategy(batch) for batch in batches]
    for output in outputs:
        output.loss_sum.backward()
    total = step_loss([output.detach() for output in outputs])
    assert total.loss is not None and total.n_supervised == sum(output.n_supervised for output in outputs)
    gradient = torch.cat([value.grad.flatten() for value in strategy.model.parameters() if value.grad is not None])
    return total.loss, gradient / total.n_supervised, dict(total.metrics)


# ---- one loss convention ----


@pytest.mark.parametrize("loss", LOSSES)
def test_a_pair_counts_the_same_in_any_company(loss: str) -> None:
    """Training rule 1, for all eleven losses: micro-batches, padding, chunks and pairs that fill up change nothing."""
    expected, gradient, metrics = loss_and_gradient(dpo(loss), batch_of(*PAIRS))
    ways = {
        "one by one": [batch_of(pair) for pair in PAIRS],
        "two and two": [batch_of(*PAIRS[:2]), batch_of(*PAIRS[2:])],
        "filled up": [batch_of(PAIRS[0], NOTHING, PAIRS[1]), batch_of(*PAIRS[2:], NOTHING), batch_of(NOTHING)],
    }
    for batches in ways.values():
        found, other, more = loss_and_gradient(dpo(loss, chunk=3), *batches)
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-6)
        assert (other - gradient).norm() <= 1e-6 * max(1.0, float(gradient.norm()))
        assert more == pytest.approx(metrics, rel=1e-5, abs=1e-6)
    assert gradient.norm() > 1e-4


def test_a_batch_of_nothing_gives_zero() -> None:
    """Training rule 1: it contributes 0, and a gradient of zeros to every weight."""
    for loss in LOSSES:
        strategy = dpo(loss)
        output = strategy(batch_of(NOTHING))
        assert (output.loss_sum.item(), output.n_supervised) == (0.0, 0)
        output.loss_sum.backward()
        for parameter in strategy.model.parameters():
            assert parameter.grad is not None and not parameter.grad.any()


def test_numbers_equal_transformers(tmp_path: Path) -> None:
    """arXiv 2305.18290, equation 7, over transformers' logits, pair by pair without padding; prompts give nothing."""
    transformers = pytest.importorskip("transformers")
    policy, old = make_model(), make_model(2)
    theirs = []
    for name, model in (("policy", policy), ("old", old)):
        save_pretrained(model, tmp_path / name)
        theirs.append(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32).eval())

    @torch.no_grad()
    def score(model: Any, prompt: Any, answer: Any) -> float:
        ids = torch.from_numpy(np.concatenate([prompt, answer]))
        logprobs = model(ids[None]).logits[0].log_softmax(-1)
        return sum(float(logprobs[i - 1, ids[i]]) for i in range(len(prompt), len(ids)))

    total, margins = 0.0, []
    for prompt, chosen, rejected in PAIRS:
        ratios = [score(theirs[0], prompt, answer) - score(theirs[1], prompt, answer) for answer in (chosen, rejected)]
        margins.append(0.1 * (ratios[0] - ratios[1]))
        total += math.log1p(math.exp(-margins[-1]))
    output = dpo("sigmoid", policy, FrozenCopy(old, 1000))(batch_of(*PAIRS))
    assert output.loss_sum.item() == pytest.approx(total, rel=1e-5)
    assert output.metrics["reward_margin"] == pytest.approx(sum(margins), rel=1e-4)
    assert output.metrics["reward_accuracy"] == sum(margin > 0 for margin in margins)


def test_what_is_measured() -> None:
    """Row TR1: plain floats, summed over the pairs, beside a loss with its graph."""
    for loss in LOSSES:
        output = dpo(loss)(batch_of(*PAIRS))
        assert output.loss_sum.requires_grad and output.loss_sum.dtype == torch.float32
        assert list(output.metrics) == list(METRICS)
        assert all(type(value) is float for value in output.metrics.values())
        m = output.metrics
        assert m["reward_margin"] == pytest.approx(m["reward_chosen"] - m["reward_rejected"], abs=1e-5)
        assert m["reward_accuracy"] in (0.0, 1.0, 2.0, 3.0, 4.0)


# ---- references ----


def references(tmp_path: Path) -> dict[str, tuple[Any, Reference]]:
    """The same model by each kind of reference, with the model to train."""
    adapted = make_model(attention_dropout=0.5)
    apply_lora(adapted, LoRAConfig(rank=4, dropout=0.5), torch.Generator().manual_seed(0))
    cache = CachedLogprobs.load(tmp_path / "none", "digest", torch.device("cpu"))
    cache = build.complete_cache(cache, [batch_of(*PAIRS[:1]), batch_of(*PAIRS)], make_model(), 1000)
    return {
        "copy": (make_model(), FrozenCopy(make_model(), 1000)),
        "adapter_off": (adapted, AdapterOff(adapted, 1000)),
        "cached": (make_model(), cache),
    }


@pytest.mark.parametrize("kind", ["copy", "adapter_off", "cached"])
def test_training_starts_at_ln_2(tmp_path: Path, kind: str) -> None:
    """Training rule 10; maths.md section 6: the model is the reference, so every reward is 0."""
    model, reference = references(tmp_path)[kind]
    output = dpo("sigmoid", model.eval(), reference)(batch_of(*PAIRS))
    assert output.loss_sum.item() / 4 == pytest.approx(math.log(2), abs=1e-6)
    assert output.metrics["reward_chosen"] == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("kind", ["copy", "adapter_off", "cached"])
def test_the_reference_stands_still(tmp_path: Path, kind: str) -> None:
    """Training rule 8: evaluation mode, no gradient; the model's own modes, adapters and random stream stay."""
    model, reference = references(tmp_path)[kind]
    before = reference(batch_of(*PAIRS))
    assert not before.requires_grad and before.dtype == torch.float32
    model.train()
    model.model.layers[0].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    strategy = dpo("sigmoid", model, reference)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        strategy(batch_of(*PAIRS)).loss_sum.backward()
        optimizer.step()
    state = torch.get_rng_state()
    torch.testing.assert_close(reference(batch_of(*PAIRS)), before, atol=1e-6, rtol=1e-6)
    assert torch.equal(torch.get_rng_state(), state)
    assert {name: module.training for name, module in model.named_modules()} == modes
    model.eval()
    assert strategy(batch_of(*PAIRS)).metrics["reward_margin"] > 0.01, "the margin rises"
    if kind == "adapter_off":
        assert all(factors.lora_B.any() for _, factors in adapters(model))


def test_a_loss_and_its_reference_fit() -> None:
    loss = create_preference_loss(config_of("sigmoid"))
    with pytest.raises(ConfigError, match="SigmoidLoss needs a reference"):
        DPOStrategy(make_model(), loss=loss, reference=None, loss_chunk_tokens=8)
    loss = create_preference_loss(config_of("simpo"))
    with pytest.raises(ConfigError, match="SimPOLoss needs no reference"):
        DPOStrategy(make_model(), loss=loss, reference=FrozenCopy(make_model(), 8), loss_chunk_tokens=8)
    with pytest.raises(DataError, match="preprocess the data as 'preference'"):
        dpo()(collate([[]], pad_id=0))


# ---- cached log-probabilities ----


def test_keys_go_by_content() -> None:
    """A row's tokens and its supervised span, never its place, padding or neighbours."""
    keys = row_keys(batch_of(*PAIRS))
    assert len(set(keys.tolist())) == 8
    assert row_keys(batch_of(PAIRS[3], PAIRS[0])).tolist() == [*keys[6:].tolist(), *keys[:2].tolist()]
    prompt, chosen, rejected = PAIRS[0]
    moved = (np.concatenate([prompt, chosen[:1]]), chosen[1:], rejected)
    assert row_keys(batch_of(moved))[0] != keys[0], "the same tokens, another prompt"


def test_a_cache_through_a_file(tmp_path: Path) -> None:
    path, cpu = tmp_path / "cache.safetensors", torch.device("cpu")
    empty = CachedLogprobs.load(path, "digest", cpu)
    assert not empty.has(batch_of(PAIRS[0])) and empty.has(batch_of(NOTHING))
    with pytest.raises(DataError, match="no cached reference"):
        empty(batch_of(PAIRS[0]))
    model = make_model()
    cache = build.complete_cache(empty, [batch_of(*PAIRS[:2])], model, 1000)
    cache.save(path, "digest")
    known = CachedLogprobs.load(path, "digest", cpu)
    expected = FrozenCopy(model, 1000)(batch_of(PAIRS[1], NOTHING, PAIRS[0]))
    torch.testing.assert_close(known(batch_of(PAIRS[1], NOTHING, PAIRS[0])), expected, atol=1e-5, rtol=0)
    assert not CachedLogprobs.load(path, "another", cpu).has(batch_of(PAIRS[0]))
    path.write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="remove it, and it is computed again"):
        CachedLogprobs.load(path, "digest", cpu)


def test_a_cache_that_cannot_be_written(tmp_path: Path, small_disk: None) -> None:
    """safetensors hides the system's error; nothing half-written is left."""
    keys = np.arange(4000, dtype=np.uint64)
    cache = CachedLogprobs(keys, np.zeros(4000, np.float32), torch.device("cpu"))
    with pytest.raises(CheckpointError, match=r"cache.safetensors: cannot write: File too large; "):
        cache.save(tmp_path / "cache.safetensors", "digest")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def pair_recipe(run_recipe: Any, write_rows: Any) -> Callable[..., TrainConfig]:
    """Function from changes to a small DPO run on six pairs."""
    draw = np.random.default_rng(0)
    rows = [
        {name: draw.integers(0, 256, draw.integers(1, 9)) for name in ("prompt", "chosen", "rejected")}
        for _ in range(6)
    ]
    store = write_rows("pairs", "pairs", rows)

    def make(changes: dict[str, Any] | None = None) -> TrainConfig:
        base = {
            "data": {"train": [{"path": str(store)}], "seq_len": 16, "workers": 0},
            "strategy": {"name": "dpo", "reference": "cached"},
        }
        return TrainConfig.from_dict(run_recipe(base | (changes or {})))

    return make


def test_the_cache_of_a_run_is_computed_once(pair_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training rule 10: keyed to the model (its weights and numbers) and to the data; else it is computed anew."""
    loaded = []
    start = build.starting_model
    monkeypatch.setattr(build, "starting_model", lambda *a: loaded.append(1) or start(*a))
    cpu = torch.device("cpu")

    def opened(changes: dict[str, Any] | None = None) -> CachedLogprobs:
        reference = build.open_reference(pair_recipe(changes), cpu, tmp_path, 0)
        assert isinstance(reference, CachedLogprobs)
        return reference

    first = opened()
    assert (len(first), loaded) == (13, [1])
    again = opened()
    assert loaded == [1]
    assert np.array_equal(again.values, first.values)
    shorter = opened({"strategy.max_prompt_len": 2})
    assert loaded == [1, 1] and len(shorter) > 13, "rows that are cut otherwise are other rows"
    other = opened({"seed": 5})
    assert loaded == [1, 1, 1] and len(other) == 13, "another model"
    assert not np.array_equal(other.values, first.values)


def test_a_cache_is_computed_as_training_computes(
    pair_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernel that the recipe names: the reference is the model's equal at the start."""
    able: list[bool] = []
    complete = build.complete_cache

    def look(*args: Any) -> CachedLogprobs:
        able.append(torch.backends.cuda.flash_sdp_enabled())
        return complete(*args)

    monkeypatch.setattr(build, "complete_cache", look)
    build.open_reference(pair_recipe({"precision.attention": "math"}), torch.device("cpu"), tmp_path, 0)
    assert able == [False]


def test_which_reference_a_recipe_means(pair_recipe: Any, tmp_path: Path) -> None:
    """``auto`` is the adapter off under LoRA and a copy otherwise; losses without reference get none."""
    lora = {"lora": {}, "model": {"pretrained": "somewhere"}}
    for changes, kind in (
        ({"strategy.reference": "auto"}, "copy"),
        ({"strategy.reference": "auto", **lora}, "adapter_off"),
        ({"strategy.reference": "copy", **lora}, "copy"),
        ({"strategy": {"name": "dpo", "loss": "orpo"}}, "none"),
        ({"strategy": {"name": "sft"}}, "none"),
    ):
        assert build.reference_kind(pair_recipe(changes)) == kind
    copied = build.open_reference(pair_recipe({"strategy.reference": "copy"}), torch.device("cpu"), tmp_path, 0)
    assert isinstance(copied, FrozenCopy) and not copied.model.training
    assert not any(parameter.requires_grad for parameter in copied.model.parameters())
