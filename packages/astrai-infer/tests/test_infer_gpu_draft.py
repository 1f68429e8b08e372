"""A draft model on a CUDA device: captured passes, nothing read between them, nothing allocated, the same answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from astrai_core import SamplingParams
from astrai_core.model.transformer import CausalLM
from astrai_core.types import Request
from astrai_infer import EngineConfig, InferenceEngine
from astrai_infer.runtime.device import DeviceExecutor
from astrai_infer.testing import byte_tokenizer
from astrai_infer.testing.device import steady
from astrai_infer.testing.models import gpu_model

pytestmark = [pytest.mark.gpu, pytest.mark.kernel]


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return gpu_model()


@pytest.fixture(scope="module")
def drafts(model: CausalLM) -> dict[str, CausalLM]:
    """One that is always right where sums are in a fixed order, and one that is nearly always wrong."""
    return {"same": gpu_model(), "other": gpu_model(1, num_hidden_layers=1)}


def engine_of(model: CausalLM, draft: CausalLM | None, **config: Any) -> InferenceEngine:
    settings = {"max_num_seqs": 24, "max_batch_tokens": 256, "kv_cache_bytes": 1 << 26, "max_draft_tokens": 4} | config
    if draft is not None:
        settings["speculation"] = "draft"
    return InferenceEngine(model, byte_tokenizer(), EngineConfig(**settings), draft_model=draft)


def requests(n: int, max_tokens: int = 40) -> list[Request]:
    return [
        Request(
            prompt_token_ids=tuple((11 * i + k) % 250 for k in range(3 + 9 * i)),
            params=SamplingParams(temperature=(i % 3) / 2, seed=i, max_tokens=max_tokens, ignore_eos=True),
            request_id=str(i),
        )
        for i in range(n)
    ]


def draft_of(engine: InferenceEngine) -> Any:
    executor = engine.scheduler.executor
    assert isinstance(executor, DeviceExecutor) and executor.draft is not None
    return executor.draft


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("which", ["same", "other"])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_draft_model_changes_no_token(model, drafts, which, graphs, prefix_cache):
    """Rules 1, 2, G4: in deterministic mode bit by bit, greedy or drawn, cold or warm, captured or not."""
    asked = requests(6)
    with engine_of(model, None, deterministic=True) as engine:
        expected = [done.token_ids for done in engine.scheduler.run_batch(asked)]
    config = {"deterministic": True, "cuda_graphs": graphs, "prefix_cache": prefix_cache}
    with engine_of(model, drafts[which], **config) as engine:
        for _ in range(3):
            assert [done.token_ids for done in engine.scheduler.run_batch(asked)] == expected
        health = engine.health()
        if which == "same":
            assert health.n_accepted == health.n_drafted > 0
        assert (len(draft_of(engine).graphs) > 0) == graphs
        assert engine.pool.n_used == 0


def test_passes_wait_for_nothing_and_allocate_nothing(model, drafts):
    """W1, C5: by torch's detector of synchronising calls and the allocator's counters, in every step's drafting."""
    with engine_of(model, drafts["same"], prefix_cache=False) as engine:
        for request in requests(3, 900):
            engine.scheduler.submit(engine.tasks.make(request, lambda delta: None))
        for _ in range(60):
            engine.scheduler.step()
        draft, checked = draft_of(engine), []
        guess = draft.guess

        def watched(tasks: Any, lens: list[int]) -> None:
            with steady():
                guess(tasks, lens)
            checked.append(max(lens))

        draft.guess = watched
        for _ in range(30):
            engine.scheduler.step()
        assert len(engine.scheduler.running) == 3, "they are not at their end"
        assert max(checked) == 4


def test_the_cache_of_both_fits_the_memory_asked_for(model, drafts):
    """G6: the draft model's keys, values and graphs are part of what is measured and shared out."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    held = torch.cuda.memory_reserved()
    asked = {"kv_cache_bytes": None, "memory_fraction": 0.05, "max_num_seqs": 256, "max_batch_tokens": 1024}
    with engine_of(model, drafts["other"], **asked) as engine:
        engine.scheduler.run_batch(requests(12))
        taken = torch.cuda.memory_reserved() - held
        assert taken <= 0.05 * free * 1.1
        assert all(len(group.storages) == 2 for group in engine.pool.groups)
