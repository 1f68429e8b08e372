"""Adapters by name beside one base: mixed in a batch, kept apart in the prefix cache, on both roads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from astrai_core import SamplingParams
from astrai_core.checkpoint.adapter import load_adapter
from astrai_core.errors import ConfigError, RequestError
from astrai_core.model.lora import adapters_off
from astrai_infer import InferenceEngine
from astrai_infer.runtime.device import DeviceExecutor
from astrai_infer.testing import small_engine, tiny_model
from astrai_infer.testing.adapters import (
    GREEDY,
    NAMES,
    PROMPTS,
    asked,
    engine_on,
    expected,
    merged_model,
    save_tiny_adapters,
)
from astrai_infer.testing.device import Recorder, device_engine

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "sliding_window": 9},
    "shared expert": {
        "model_type": "qwen2_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
    },
}
Logits = dict[tuple[tuple[int, ...], str | None, int], torch.Tensor]
"""(prompt, adapter, tokens before the sampled one) -> the model's logits for it."""


def record_logits(engine: InferenceEngine, name: str | None = None) -> Logits:
    """Keep what the sampler is given; `name` stands for requests without an adapter."""
    pipeline, found = engine.scheduler.executor.pipeline, Logits()
    sample = pipeline.sample

    def recording(logits: torch.Tensor, view: Any, positions: torch.Tensor) -> Any:
        for task, row in zip(view.tasks, logits, strict=True):
            own = name if task.adapter is None else task.adapter.name
            found[task.prompt_ids, own, task.total_len] = row.clone()
        return sample(logits, view, positions)

    pipeline.sample = recording
    return found


@pytest.fixture
def engine(adapter_paths: dict[str, Path]) -> Iterator[InferenceEngine]:
    with small_engine(tiny_model(), adapters=adapter_paths, max_num_seqs=4, max_batch_tokens=24) as made:
        yield made


# ---- parity ----


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixed_batch_is_that_of_the_merged_models(tmp_path: Path, family: str) -> None:
    """Issue 7, LoRA: base and adapters of two ranks in one batch, in chunks and decodes, preempted and not: every token,
    and every logit within 1e-5, is that of the model with the request's adapter merged into it."""
    changes = FAMILIES[family]
    adapter_paths = save_tiny_adapters(tmp_path, **changes)
    tokens: dict[int, tuple[int, ...]] = {}
    logits: Logits = {}
    for name in (None, *adapter_paths):
        with small_engine(
            merged_model(adapter_paths.get(name or ""), **changes), prefix_cache=False, max_num_seqs=1
        ) as alone:
            found = record_logits(alone, name)
            for i, own in enumerate(NAMES):
                if own == name:
                    tokens[i] = alone.generate(PROMPTS[i], GREEDY).token_ids
            logits |= found
    ways: list[dict[str, Any]] = [
        {"max_num_seqs": 6},
        {"max_num_seqs": 3, "max_batch_tokens": 7},
        {"max_num_seqs": 6, "max_batch_tokens": 16, "n_pages": 5, "page_size": 1},
        {"max_num_seqs": 6, "cache_mode": "contiguous"},
    ]
    for way in ways:
        with small_engine(tiny_model(**changes), adapters=adapter_paths, **way) as engine:
            found = record_logits(engine)
            completions = engine.scheduler.run_batch(asked())
            assert [c.token_ids for c in completions] == [tokens[i] for i in range(len(NAMES))]
            assert found.keys() == logits.keys()
            for key, row in found.items():
                torch.testing.assert_close(row, logits[key], atol=1e-5, rtol=1e-5)
            assert (engine.scheduler.n_preemptions > 0) == ("n_pages" in way)
            assert engine.pool.n_used == 0


def test_the_prefix_cache_keeps_adapters_apart(engine: InferenceEngine, adapter_texts: Any) -> None:
    """Rule 8: what one adapter, or the base, computed is never found for another, and always for itself."""
    for n_cached in (0, 32):
        for name in (None, "wide", "small"):
            completion = engine.generate(PROMPTS[0], GREEDY, adapter=name)
            assert completion.token_ids == adapter_texts[name, 0]
            assert completion.usage.cached_tokens == n_cached


def test_choices_share_their_prompt_and_a_seed_its_text(engine: InferenceEngine) -> None:
    """Rule 2: n choices with an adapter differ, repeat, and compute their prompt once."""
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)
    first, again = (engine.generate(PROMPTS[0], params, adapter="wide") for _ in range(2))
    assert len({c.token_ids for c in first}) == 3
    assert [c.token_ids for c in first] == [c.token_ids for c in again]
    assert [c.token_ids for c in first] != [c.token_ids for c in engine.generate(PROMPTS[0], params)]


# ---- the road of the device ----


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("config", [{"max_batch_tokens": 24}, {"max_batch_tokens": 200, "n_pages": 9}])
def test_the_road_of_the_device_gives_the_same_answers(
    adapter_paths: Any, adapter_texts: Any, captured: bool, config: Any
) -> None:
    """Ids among the packed inputs, padded to buckets, one step ahead, replayed: requests that come and go with other
    adapters in the same rows get their own."""
    recorder = Recorder() if captured else None
    engine = device_engine(tiny_model(), recorder, adapters=adapter_paths, max_num_seqs=5, **config)
    for turn in range(len(NAMES)):
        names = NAMES[turn:] + NAMES[:turn]
        completions = engine.scheduler.run_batch(asked(names))
        assert [c.token_ids for c in completions] == expected(adapter_texts, names)
    assert engine.pool.n_used == 0
    assert recorder is None or recorder.n_replays > engine.scheduler.n_steps
    engine.close()


def test_padding_has_no_adapter_and_ids_stay_where_they_are(adapter_paths: Any) -> None:
    """W1: a shape's ids have one address; rows that nobody has are -1, whoever had them in the step before."""
    engine = device_engine(tiny_model(), None, adapters=adapter_paths, max_num_seqs=7, max_batch_tokens=64)
    executor = engine.scheduler.executor
    assert isinstance(executor, DeviceExecutor)
    slots = executor.adapters
    assert slots is not None
    applied, seen = slots.applied, {}

    def recording(ids: torch.Tensor) -> Any:
        seen.setdefault(len(ids), []).append((ids.data_ptr(), ids.tolist()))
        return applied(ids)

    slots.applied = recording
    launch = executor.launch

    def checked(batch: Any) -> Any:
        for found in seen.values():
            found.clear()
        flight = launch(batch)
        ((_, ids),) = [entry for found in seen.values() for entry in found]
        own = [item.task.adapter_slot for item in batch.items for _ in range(item.n_tokens)]
        assert [i for i in ids if i >= 0] == [i for i in own if i >= 0]
        assert len(ids) >= len(own)
        return flight

    executor.launch = checked
    engine.scheduler.run_batch(asked())
    executor.launch = launch
    engine.scheduler.run_batch(asked())
    places = [{place for place, _ in found} for found in seen.values() if len(found) > 3]
    assert places
    assert all(len(place) == 1 for place in places)
    engine.close()


@pytest.mark.parametrize("road", ["plain", "device", "captured"])
@pytest.mark.parametrize("how", ["ngram", "draft"])
def test_guesses_have_the_adapter_of_their_request(adapter_paths: Any, adapter_texts: Any, road: str, how: str) -> None:
    """Speculation: every row of a step that verifies has the adapter of its request, and no token changes; a draft model
    has none."""
    answers = {str(i): tokens for i, tokens in enumerate(expected(adapter_texts))}
    config = {"max_num_seqs": 24, "max_batch_tokens": 64, "speculation": how, "max_draft_tokens": 3}
    draft = {"draft_model": tiny_model()} if how == "draft" else {}
    with engine_on(road, adapters=adapter_paths, **config, **draft) as engine:
        drafter: Any = engine.scheduler.drafter
        drafter.propose = lambda task, limit: answers[task.request_id][task.output_len :][: min(limit, 3)]
        for _ in range(2):
            n_before = engine.scheduler.n_steps
            completions = engine.scheduler.run_batch(asked())
            assert [c.token_ids for c in completions] == expected(adapter_texts)
            assert engine.scheduler.n_steps - n_before < (9 if how == "ngram" else 14)
        assert drafter.counts.n_accepted > 0


# ---- without ----


def test_an_engine_without_adapters_pays_nothing(adapter_texts: Any) -> None:
    """No room, no ids among the inputs, projections as they were; a request that names one is refused."""
    model = tiny_model()
    engine = device_engine(model, None, max_num_seqs=4)
    assert all(linear.adapter is None for linear in model.modules() if hasattr(linear, "adapter"))
    executor = engine.scheduler.executor
    assert isinstance(executor, DeviceExecutor)
    layouts = [executor.packed.layout(shape)[1] for shape in executor.buckets.first]
    assert all(len(fields.adapter_ids) == 0 for fields in layouts)
    assert [c.token_ids for c in engine.scheduler.run_batch(asked([None] * 6))] == expected(adapter_texts, [None] * 6)
    with pytest.raises(RequestError, match="adapter 'wide' is not loaded, none is"):
        engine.scheduler.run_batch(asked())
    with pytest.raises(ConfigError, match="this engine has no room for adapters; set max_loras"):
        engine.load_adapter("wide", "anywhere")
    engine.close()


def test_a_model_with_adapters_of_its_own_takes_no_others(adapter_paths: Any) -> None:
    """What a LoRA run trains is served as it is, and not beside others."""
    model = tiny_model()
    load_adapter(model, adapter_paths["wide"])
    with pytest.raises(ConfigError, match="beside those that the model has already"):
        small_engine(model, adapters={"small": adapter_paths["small"]})
    with adapters_off(model), small_engine(model) as base, small_engine(tiny_model()) as plain:
        assert base.generate(PROMPTS[1], GREEDY).token_ids == plain.generate(PROMPTS[1], GREEDY).token_ids
