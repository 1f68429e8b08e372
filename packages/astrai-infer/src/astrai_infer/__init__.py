"""Inference engine of astrai: paged KV cache, continuous batching, sampling, streaming.

The names below are imported at first use, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from astrai_infer._version import __version__

if TYPE_CHECKING:
    from astrai_core.types import Completion, Request, SamplingParams
    from astrai_infer.config import EngineConfig
    from astrai_infer.engine import InferenceEngine
    from astrai_infer.scheduler import InferenceScheduler
    from astrai_infer.task import Delta

_EXPORTS = {
    "Completion": "astrai_core.types",
    "Delta": "astrai_infer.task",
    "EngineConfig": "astrai_infer.config",
    "InferenceEngine": "astrai_infer.engine",
    "InferenceScheduler": "astrai_infer.scheduler",
    "Request": "astrai_core.types",
    "SamplingParams": "astrai_core.types",
}

__all__ = [
    "Completion",
    "Delta",
    "EngineConfig",
    "InferenceEngine",
    "InferenceScheduler",
    "Request",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
