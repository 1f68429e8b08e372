"""Models, configs, tokenizer, attention backends and checkpoint files of astrai.

The names below are imported at first use, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from astrai_core._version import __version__

if TYPE_CHECKING:
    from astrai_core.auto import AutoModel, AutoTokenizer
    from astrai_core.checkpoint.adapter import load_adapter, save_adapter
    from astrai_core.checkpoint.hf_adapter import save_pretrained
    from astrai_core.checkpoint.source import open_source
    from astrai_core.config.lora import LoRAConfig
    from astrai_core.config.model import ModelConfig, RopeParameters
    from astrai_core.errors import AstraiError
    from astrai_core.model.lora import apply_lora, merge_lora, unmerge_lora
    from astrai_core.model.transformer import CausalLM, CausalLMOutput
    from astrai_core.tokenizer.tokenizer import Tokenizer
    from astrai_core.types import Completion, Request, SamplingParams, TokenLogprobs, Usage

_EXPORTS = {
    "AstraiError": "errors",
    "AutoModel": "auto",
    "AutoTokenizer": "auto",
    "CausalLM": "model.transformer",
    "CausalLMOutput": "model.transformer",
    "Completion": "types",
    "LoRAConfig": "config.lora",
    "ModelConfig": "config.model",
    "Request": "types",
    "RopeParameters": "config.model",
    "SamplingParams": "types",
    "TokenLogprobs": "types",
    "Tokenizer": "tokenizer.tokenizer",
    "Usage": "types",
    "apply_lora": "model.lora",
    "load_adapter": "checkpoint.adapter",
    "merge_lora": "model.lora",
    "open_source": "checkpoint.source",
    "save_adapter": "checkpoint.adapter",
    "save_pretrained": "checkpoint.hf_adapter",
    "unmerge_lora": "model.lora",
}

__all__ = [
    "AstraiError",
    "AutoModel",
    "AutoTokenizer",
    "CausalLM",
    "CausalLMOutput",
    "Completion",
    "LoRAConfig",
    "ModelConfig",
    "Request",
    "RopeParameters",
    "SamplingParams",
    "TokenLogprobs",
    "Tokenizer",
    "Usage",
    "__version__",
    "apply_lora",
    "load_adapter",
    "merge_lora",
    "open_source",
    "save_adapter",
    "save_pretrained",
    "unmerge_lora",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
