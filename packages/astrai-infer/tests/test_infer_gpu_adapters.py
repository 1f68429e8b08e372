"""Adapters in captured steps on a CUDA device: the same bits as without graphs, and the text of the merged models."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from astrai_core import SamplingParams
from astrai_core.checkpoint.adapter import load_adapter
from astrai_core.config.lora import LoRAConfig
from astrai_core.model.lora import merge_lora
from astrai_core.model.transformer import CausalLM
from astrai_core.types import Completion, Request
from astrai_infer import EngineConfig, InferenceEngine
from astrai_infer.runtime.device import DeviceExecutor
from astrai_infer.runtime.shapes import StepShape
from astrai_infer.testing import byte_tokenizer, save_tiny_adapter
from astrai_infer.testing.device import steady
from astrai_infer.testing.models import GPU_SIZES, gpu_model

pytestmark = [pytest.mark.gpu, pytest.mark.kernel]

CONFIGS = {
    "wide": LoRAConfig(rank=40, alpha=40),
    "small": LoRAConfig(rank=6, alpha=12, target_modules=("q_proj", "v_proj", "down_proj")),
}
NAMES = (None, "wide", "small")


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return gpu_model()


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: save_tiny_adapter(root / name, seed, config, **GPU_SIZES)
        for seed, (name, config) in enumerate(CONFIGS.items())
    }


def engine_of(model: CausalLM, paths: dict[str, Path], **config: Any) -> InferenceEngine:
    settings = {"max_num_seqs": 16, "max_batch_tokens": 256, "kv_cache_bytes": 1 << 26} | config
    return InferenceEngine(model, byte_tokenizer(), EngineConfig(**settings), adapters=paths)


def requests(n: int, turn: int = 0) -> list[Request]:
    return [
        Request(
            prompt_token_ids=tuple(range(3 * i, 3 * i + 5 + 7 * i % 60)),
            params=SamplingParams(temperature=0.0, ignore_eos=True, logprobs=2, max_tokens=20 + i),
            request_id=f"r{i}",
            adapter=NAMES[(i + turn) % len(NAMES)],
        )
        for i in range(n)
    ]


def answers(completions: list[Completion]) -> list[tuple]:
    return [(c.token_ids, [entry.logprob for entry in c.logprobs or ()]) for c in completions]


@pytest.mark.parametrize("rank", [None, 64])
@pytest.mark.parametrize("n", [1, 3, 16])
def test_graphs_and_eager_agree_bit_for_bit(model: CausalLM, paths: dict[str, Path], n: int, rank: int | None) -> None:
    """G4 with adapters: captured steps read the adapter of each token on the device, whoever has which row, whether the
    parts of a fused projection share their factors or not."""
    config = {"prefix_cache": False, "max_lora_rank": rank}
    with engine_of(copy.deepcopy(model), paths, cuda_graphs=False, **config) as eager:
        expected = [answers(eager.scheduler.run_batch(requests(n, turn))) for turn in range(3)]
    assert len({tokens for turn in expected for tokens, _ in turn}) == 3 * n, "adapters and prompts matter"
    with engine_of(model, paths, cuda_graphs=True, **config) as captured:
        executor = captured.scheduler.executor
        assert isinstance(executor, DeviceExecutor)
        assert executor.graphs.has_graph(("forward", StepShape(1)))
        for _ in range(2):
            for turn in range(3):
                assert answers(captured.scheduler.run_batch(requests(n, turn))) == expected[turn]


@torch.no_grad()
def test_the_tokens_are_those_of_the_merged_models(model: CausalLM, paths: dict[str, Path]) -> None:
    """Issue 7, LoRA: each token is a largest logit of the whole sequence's forward through the model with the request's
    adapter merged into it, within roundings of bf16."""
    with engine_of(model, paths) as engine:
        completions = engine.scheduler.run_batch(requests(12))
    for name in NAMES:
        merged = copy.deepcopy(model)
        if name is not None:
            load_adapter(merged, paths[name])
            merge_lora(merged)
        for request, completion in zip(requests(12), completions, strict=True):
            if request.adapter != name:
                continue
            ids = torch.tensor([[*request.prompt_token_ids, *completion.token_ids]], device="cuda")
            logits = merged(ids).logits[0, len(request.prompt_token_ids) - 1 : -1].float()
            chosen = logits.gather(1, ids[0, len(request.prompt_token_ids) :, None]).squeeze(1)
            tolerance = 8 * torch.finfo(torch.bfloat16).eps * logits.abs().amax(1)
            assert (chosen >= logits.amax(1) - tolerance).all()


@pytest.mark.parametrize("graphs", [True, False])
def test_deterministic_answers_do_not_depend_on_other_adapters(
    model: CausalLM, paths: dict[str, Path], graphs: bool
) -> None:
    """Rule 1: alone, among others, with a warm prefix cache, while an adapter is loaded and another unloaded: the same
    tokens and log-probabilities."""
    config = {"deterministic": True, "cuda_graphs": graphs}
    with engine_of(model, {"wide": paths["wide"]}, max_loras=3, max_lora_rank=64, **config) as engine:
        engine.load_adapter("small", paths["small"])
        together = answers(engine.scheduler.run_batch(requests(12)))
        assert answers(engine.scheduler.run_batch(requests(12))) == together
        done: list[Completion] = []
        for request in requests(12):
            tasks = engine.tasks.make(
                request, lambda delta: done.append(delta.completion) if delta.completion else None
            )
            engine.scheduler.submit(tasks)
        for _ in range(8):
            engine.scheduler.step()
        engine.load_adapter("third", paths["wide"])
        engine.unload_adapter("small")
        while engine.scheduler.step():
            pass
        assert answers(sorted(done, key=lambda completion: int(completion.request_id[1:]))) == together
        engine.unload_adapter("wide")
        engine.unload_adapter("third")
        engine.load_adapter("small", paths["small"])
        engine.load_adapter("wide", paths["wide"])
        assert answers([engine.scheduler.run_batch([request])[0] for request in requests(12)]) == together


def test_a_steady_step_allocates_nothing_and_waits_for_nothing(model: CausalLM, paths: dict[str, Path]) -> None:
    """W1, C5 with adapters."""
    with engine_of(model, paths, prefix_cache=False) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
        for request in requests(8):
            longer = Request(prompt_token_ids=request.prompt_token_ids, params=params, adapter=request.adapter)
            engine.scheduler.submit(engine.tasks.make(longer, lambda delta: None))
        for _ in range(40):
            engine.scheduler.step()
        torch.cuda.synchronize()
        with steady():
            for _ in range(40):
                engine.scheduler.step()
