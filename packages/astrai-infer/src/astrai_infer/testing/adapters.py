"""Adapters for tests: of the tiny model, served beside it and merged into it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from astrai_core.checkpoint.adapter import load_adapter, save_adapter
from astrai_core.config.lora import LoRAConfig
from astrai_core.model.lora import adapters, apply_lora, merge_lora
from astrai_core.model.transformer import CausalLM
from astrai_core.types import Request, SamplingParams
from astrai_infer.engine import InferenceEngine
from astrai_infer.testing.device import Recorder, device_engine
from astrai_infer.testing.engines import small_engine
from astrai_infer.testing.models import tiny_model

CONFIGS = {
    "wide": LoRAConfig(rank=12, alpha=24),
    "small": LoRAConfig(rank=3, alpha=6, rslora=True, target_modules=("q_proj", "v_proj", "down_proj")),
}
"""Two that differ in rank, scaling and targets."""

NAMES: Sequence[str | None] = (None, "wide", "small", "wide", None, "small")
PROMPTS = [tuple(range(10 + i, 10 + i + length)) for i, length in enumerate((40, 5, 33, 18, 20, 40))]
"""Adapters of :data:`CONFIGS` by request, and their prompts."""

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


def save_tiny_adapter(directory: Path, seed: int = 0, config: LoRAConfig | None = None, **changes: Any) -> Path:
    """Write an adapter of :func:`tiny_model` that changes its text, and return its directory."""
    model = tiny_model(**changes)
    generator = torch.Generator().manual_seed(seed)
    apply_lora(model, config or LoRAConfig(rank=4, alpha=8), generator)
    with torch.no_grad():
        for _, factors in adapters(model):
            factors.lora_B.normal_(0.0, 0.1, generator=generator)
    save_adapter(model, directory, "tiny")
    return directory


def save_tiny_adapters(root: Path, **changes: Any) -> dict[str, Path]:
    """Write those of :data:`CONFIGS`; return name -> directory."""
    return {
        name: save_tiny_adapter(root / name, seed, config, **changes)
        for seed, (name, config) in enumerate(CONFIGS.items())
    }


def merged_model(directory: Path | None, **changes: Any) -> CausalLM:
    """Return :func:`tiny_model` with an adapter merged into it; None: as it is."""
    model = tiny_model(**changes)
    if directory is not None:
        load_adapter(model, directory)
        merge_lora(model)
    return model


def asked(names: Sequence[str | None] = NAMES, params: SamplingParams = GREEDY) -> list[Request]:
    """Ask every prompt of its adapter."""
    return [
        Request(prompt_token_ids=prompt, params=params, request_id=str(i), adapter=name)
        for i, (prompt, name) in enumerate(zip(PROMPTS, names, strict=True))
    ]


def expected(
    texts: Mapping[tuple[str | None, int], tuple[int, ...]], names: Sequence[str | None] = NAMES
) -> list[tuple[int, ...]]:
    """Return the tokens of (adapter, prompt) for each request."""
    return [texts[name, i] for i, name in enumerate(names)]


def engine_on(road: str, **config: Any) -> InferenceEngine:
    """Build an engine on the plain road, or on the device's: "captured" or not."""
    if road == "plain":
        return small_engine(tiny_model(), **config)
    return device_engine(tiny_model(), Recorder() if road == "captured" else None, **config)
