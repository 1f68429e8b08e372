"""Adapters that come and go while an engine runs, and what can be asked of it by name."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from astrai_core.checkpoint.adapter import load_adapter
from astrai_core.checkpoint.hf_adapter import checkpoint_tensors
from astrai_core.config.lora import LoRAConfig
from astrai_core.errors import CheckpointError, ConfigError, RequestError
from astrai_core.model.lora import merge_lora
from astrai_core.model.transformer import CausalLM
from astrai_core.types import Completion, Request
from astrai_infer import InferenceEngine
from astrai_infer.embedding import embed
from astrai_infer.testing import save_tiny_adapter, small_engine, tiny_model
from astrai_infer.testing.adapters import (
    GREEDY,
    NAMES,
    PROMPTS,
    asked,
    engine_on,
    expected,
    merged_model,
)


@pytest.fixture
def engine(adapter_paths: dict[str, Path]) -> Iterator[InferenceEngine]:
    with small_engine(tiny_model(), adapters=adapter_paths, max_num_seqs=4, max_batch_tokens=24) as made:
        yield made


# ---- while it runs ----


def drive(engine: InferenceEngine) -> None:
    while engine.scheduler.step():
        pass


def submit(engine: InferenceEngine, request: Request) -> list[Completion]:
    """Queue a request without the engine's thread; the list gets its completion."""
    done: list[Completion] = []
    tasks = engine.tasks.make(request, lambda delta: done.append(delta.completion) if delta.completion else None)
    engine.scheduler.submit(tasks)
    return done


def test_an_adapter_that_is_unloaded_serves_those_who_have_it(adapter_paths: Any, adapter_texts: Any) -> None:
    """New requests are refused at once, running and waiting ones finish, and their slot is nobody else's until then."""
    engine = small_engine(tiny_model(), adapters={"wide": adapter_paths["wide"]}, max_loras=1, max_num_seqs=1)
    running, waiting = (submit(engine, request) for request in asked(("wide", "wide", *[None] * 4))[:2])
    for _ in range(4):
        engine.scheduler.step()
    engine.unload_adapter("wide")
    with pytest.raises(RequestError, match="adapter 'wide' is not loaded, none is; load it"):
        engine.generate(PROMPTS[0], GREEDY, adapter="wide")
    with pytest.raises(RequestError, match="adapter 'wide' is not loaded"):
        engine.unload_adapter("wide")
    for _ in range(2):
        with pytest.raises(
            RequestError, match="all 1 slots for adapters are taken, 1 of them by requests of adapters that"
        ):
            engine.load_adapter("small", adapter_paths["small"])
        while not running:
            engine.scheduler.step()
    drive(engine)
    assert [running[0].token_ids, waiting[0].token_ids] == [adapter_texts["wide", 0], adapter_texts["wide", 1]]
    engine.load_adapter("small", adapter_paths["small"])
    assert engine.generate(PROMPTS[2], GREEDY, adapter="small").token_ids == adapter_texts["small", 2]
    engine.close()


def test_a_request_made_before_and_queued_after_is_refused(engine: InferenceEngine, adapter_paths: Any) -> None:
    """Its slot may be another's by then."""
    tasks = engine.tasks.make(asked(("wide", *[None] * 5))[0], lambda delta: None)
    engine.unload_adapter("wide")
    engine.load_adapter("other", adapter_paths["small"])
    with pytest.raises(RequestError, match="adapter 'wide' is not loaded any more; load it again"):
        engine.scheduler.submit(tasks)
    assert not engine.scheduler.has_work


def test_a_name_can_be_given_again(adapter_paths: Any, adapter_texts: Any) -> None:
    """Another adapter under an old name: nothing that the old one computed is found, in its slot or in the cache."""
    engine = small_engine(tiny_model(), adapters={"it": adapter_paths["wide"]}, max_num_seqs=2)
    assert engine.generate(PROMPTS[0], GREEDY, adapter="it").token_ids == adapter_texts["wide", 0]
    engine.unload_adapter("it")
    engine.load_adapter("it", adapter_paths["small"])
    completion = engine.generate(PROMPTS[0], GREEDY, adapter="it")
    assert completion.token_ids == adapter_texts["small", 0]
    assert completion.usage.cached_tokens == 0
    engine.close()


def test_loading_leaves_what_runs_alone(adapter_paths: Any, adapter_texts: Any) -> None:
    """On both roads, with a step in flight on that of the device: those who run go on, and the new one is served."""
    for road in ("plain", "captured"):
        engine = engine_on(road, adapters={"wide": adapter_paths["wide"]}, max_loras=2, max_num_seqs=4)
        names = ("wide", None, *[None] * 4)
        done = [submit(engine, request) for request in asked(names)[:2]]
        for _ in range(5):
            engine.scheduler.step()
        engine.load_adapter("small", adapter_paths["small"])
        done.append(submit(engine, asked((None, None, "small", None, None, None))[2]))
        drive(engine)
        assert [each[0].token_ids for each in done] == [
            adapter_texts["wide", 0],
            adapter_texts[None, 1],
            adapter_texts["small", 2],
        ]
        engine.close()


def test_new_weights_stay_under_the_adapters(engine: InferenceEngine, adapter_paths: Any) -> None:
    """Rule 12: after an update a request has its adapter on the new weights, also one that ran meanwhile."""
    long, short = (asked(("wide", "wide", *[None] * 4))[i] for i in (0, 1))
    engine.scheduler.run_batch([long])
    done = submit(engine, short)
    for _ in range(4):
        engine.scheduler.step()
    engine.update_weights(checkpoint_tensors(tiny_model(seed=1)), 1)
    drive(engine)
    model = tiny_model(seed=1)
    load_adapter(model, adapter_paths["wide"])
    with small_engine(merged(model), prefix_cache=False, max_num_seqs=1) as alone:
        before, after = done[0].token_ids[:4], done[0].token_ids[4:]
        assert after == alone.generate((*PROMPTS[1], *before), GREEDY).token_ids[:6]
        (again,) = engine.scheduler.run_batch([long])
        assert again.token_ids == alone.generate(PROMPTS[0], GREEDY).token_ids


def merged(model: CausalLM) -> CausalLM:
    merge_lora(model)
    return model


def test_sleep_keeps_adapters(engine: InferenceEngine, adapter_texts: Any) -> None:
    engine.sleep()
    engine.resume()
    assert engine.generate(PROMPTS[1], GREEDY, adapter="small").token_ids == adapter_texts["small", 1]


# ---- by name ----


def test_prompts_of_a_call_have_adapters_of_their_own(engine: InferenceEngine, adapter_texts: Any) -> None:
    """One name for all, or a list; an unknown one ends its prompt alone, streamed, waited for or by asyncio."""
    results = engine.generate(list(PROMPTS), GREEDY, adapter=list(NAMES))
    assert [c.token_ids for c in results] == expected(adapter_texts)
    results = engine.generate(list(PROMPTS), GREEDY, adapter="small")
    assert [c.token_ids for c in results] == expected(adapter_texts, ["small"] * len(PROMPTS))
    assert (
        asyncio.run(waited(engine.generate_async(PROMPTS[1], GREEDY, adapter="wide"))).token_ids
        == adapter_texts["wide", 1]
    )
    good, bad = engine.generate(list(PROMPTS[:2]), GREEDY, adapter=["wide", "nobody"])
    assert good.token_ids == adapter_texts["wide", 0]
    assert bad.finish_reason == "error"
    assert bad.error == "adapter 'nobody' is not loaded, there are wide, small; load it, or leave it out for the base"
    with pytest.raises(RequestError, match="adapter 'nobody' is not loaded"):
        engine.generate(PROMPTS[0], GREEDY, adapter="nobody")
    with pytest.raises(RequestError, match="1 adapters for 2 prompts"):
        engine.generate(list(PROMPTS[:2]), GREEDY, adapter=["wide"])


async def waited(result: Any) -> Any:
    return await result


def test_embeddings_are_those_of_the_merged_model(engine: InferenceEngine, adapter_paths: Any) -> None:
    vectors = {name: embed(engine, [PROMPTS[0]], "mean", name)[0] for name in (None, *adapter_paths)}
    for name, vector in vectors.items():
        with small_engine(merged_model(adapter_paths.get(name or ""))) as alone:
            assert vector == pytest.approx(embed(alone, [PROMPTS[0]], "mean")[0], abs=1e-5)
    assert max(map(abs, (a - b for a, b in zip(vectors["wide"], vectors["small"], strict=True)))) > 0.01
    with pytest.raises(RequestError, match="adapter 'nobody' is not loaded"):
        embed(engine, [PROMPTS[0]], "mean", "nobody")


def test_room_is_fixed_at_the_start(tmp_path: Path, adapter_paths: Any) -> None:
    """By the adapters given, or by max_loras and max_lora_rank; what does not fit is refused, and the model left alone."""
    model = tiny_model()
    with small_engine(model, adapters=adapter_paths) as engine:
        slots = engine.adapters.slots
        assert slots is not None
        assert (slots.n_slots, slots.rank) == (2, 16)
        with pytest.raises(RequestError, match="all 2 slots for adapters are taken; unload one, or raise max_loras"):
            engine.load_adapter("third", adapter_paths["wide"])
        with pytest.raises(
            RequestError, match="adapter 'wide' is loaded already; unload it first, or take another name"
        ):
            engine.load_adapter("wide", adapter_paths["small"])
        with pytest.raises(CheckpointError, match="no such file; give the directory of a PEFT adapter"):
            engine.load_adapter("gone", tmp_path / "gone")
    assert all(linear.adapter is None for linear in model.modules() if hasattr(linear, "adapter"))
    with pytest.raises(ConfigError, match="2 adapters are given, max_loras is 1; raise it"):
        small_engine(model, adapters=adapter_paths, max_loras=1)
    with pytest.raises(ConfigError, match="field 'r': 12 is more than max_lora_rank 8; raise that"):
        small_engine(model, adapters=adapter_paths, max_lora_rank=8)
    large = save_tiny_adapter(tmp_path / "large", config=LoRAConfig(rank=72))
    with pytest.raises(
        ConfigError, match="field 'r': 72 is more than 64, the largest that can be served beside its base"
    ):
        small_engine(model, adapters={"large": large})
    with pytest.raises(ConfigError, match="the KV cache has 8 bytes"):
        small_engine(model, adapters=adapter_paths, kv_cache_bytes=8)
    with pytest.raises(ConfigError, match="the name of an adapter is empty"):
        small_engine(model, adapters={"": adapter_paths["wide"]})
    assert all(linear.adapter is None for linear in model.modules() if hasattr(linear, "adapter"))
    with small_engine(model, max_loras=3) as engine:
        slots = engine.adapters.slots
        assert slots is not None
        assert (slots.n_slots, slots.rank) == (3, 16)
        engine.load_adapter("wide", adapter_paths["wide"])
