"""Recipes: one frozen configuration class for each group of fields, and `TrainConfig` over them.

The names are imported at first use: a worker of preprocessing needs one module of these and starts a quarter of a second
sooner without the others.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from astrai_core.config.lora import LoRAConfig
    from astrai_train.config.data import DataConfig, DataSource, ModelSource
    from astrai_train.config.optimizer import (
        AdamWConfig,
        ManoAdamWConfig,
        MuonAdamWConfig,
        NoraNAdamWConfig,
        OptimizerConfig,
    )
    from astrai_train.config.runtime import CheckpointConfig, LogConfig, ParallelConfig, PrecisionConfig
    from astrai_train.config.schedule import ConstantConfig, CosineConfig, LRScheduleConfig, SGDRConfig, WSDConfig
    from astrai_train.config.strategy import DPOConfig, SeqConfig, SFTConfig, StrategyConfig
    from astrai_train.config.train import TrainConfig

_MODULES = {
    "astrai_core.config.lora": ("LoRAConfig",),
    "astrai_train.config.data": ("DataConfig", "DataSource", "ModelSource"),
    "astrai_train.config.optimizer": (
        "AdamWConfig",
        "ManoAdamWConfig",
        "MuonAdamWConfig",
        "NoraNAdamWConfig",
        "OptimizerConfig",
    ),
    "astrai_train.config.runtime": ("CheckpointConfig", "LogConfig", "ParallelConfig", "PrecisionConfig"),
    "astrai_train.config.schedule": ("ConstantConfig", "CosineConfig", "LRScheduleConfig", "SGDRConfig", "WSDConfig"),
    "astrai_train.config.strategy": ("DPOConfig", "SFTConfig", "SeqConfig", "StrategyConfig"),
    "astrai_train.config.train": ("TrainConfig",),
}
_EXPORTS = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "AdamWConfig",
    "CheckpointConfig",
    "ConstantConfig",
    "CosineConfig",
    "DPOConfig",
    "DataConfig",
    "DataSource",
    "LRScheduleConfig",
    "LoRAConfig",
    "LogConfig",
    "ManoAdamWConfig",
    "ModelSource",
    "MuonAdamWConfig",
    "NoraNAdamWConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "SFTConfig",
    "SGDRConfig",
    "SeqConfig",
    "StrategyConfig",
    "TrainConfig",
    "WSDConfig",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
