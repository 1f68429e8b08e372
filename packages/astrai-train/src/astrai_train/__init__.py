"""The training side of astrai: recipes, data, strategies, optimizers and the trainer.

Names are imported at first use, so that ``import astrai_train`` costs nothing and needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from astrai_train._version import __version__

if TYPE_CHECKING:
    from astrai_train.callbacks.base import Callback
    from astrai_train.config import (
        AdamWConfig,
        CheckpointConfig,
        ConstantConfig,
        CosineConfig,
        DataConfig,
        DataSource,
        DPOConfig,
        LogConfig,
        LoRAConfig,
        ManoAdamWConfig,
        ModelSource,
        MuonAdamWConfig,
        NoraNAdamWConfig,
        ParallelConfig,
        PrecisionConfig,
        SeqConfig,
        SFTConfig,
        SGDRConfig,
        TrainConfig,
        WSDConfig,
    )
    from astrai_train.context import StepRecord, TrainContext, TrainResult
    from astrai_train.optim.lr_schedule import LRSchedule, LRScheduleFactory
    from astrai_train.parallel.launch import launch
    from astrai_train.run import train
    from astrai_train.strategy.base import BaseStrategy, LossOutput
    from astrai_train.trainer import Trainer

_EXPORTS = {
    "AdamWConfig": "config",
    "BaseStrategy": "strategy.base",
    "Callback": "callbacks.base",
    "CheckpointConfig": "config",
    "ConstantConfig": "config",
    "CosineConfig": "config",
    "DPOConfig": "config",
    "DataConfig": "config",
    "DataSource": "config",
    "LRSchedule": "optim.lr_schedule",
    "LRScheduleFactory": "optim.lr_schedule",
    "LoRAConfig": "config",
    "LogConfig": "config",
    "LossOutput": "strategy.base",
    "ManoAdamWConfig": "config",
    "ModelSource": "config",
    "MuonAdamWConfig": "config",
    "NoraNAdamWConfig": "config",
    "ParallelConfig": "config",
    "PrecisionConfig": "config",
    "SFTConfig": "config",
    "SGDRConfig": "config",
    "SeqConfig": "config",
    "StepRecord": "context",
    "TrainConfig": "config",
    "TrainContext": "context",
    "TrainResult": "context",
    "Trainer": "trainer",
    "WSDConfig": "config",
    "launch": "parallel.launch",
    "train": "run",
}

__all__ = [
    "AdamWConfig",
    "BaseStrategy",
    "Callback",
    "CheckpointConfig",
    "ConstantConfig",
    "CosineConfig",
    "DPOConfig",
    "DataConfig",
    "DataSource",
    "LRSchedule",
    "LRScheduleFactory",
    "LoRAConfig",
    "LogConfig",
    "LossOutput",
    "ManoAdamWConfig",
    "ModelSource",
    "MuonAdamWConfig",
    "NoraNAdamWConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "SFTConfig",
    "SGDRConfig",
    "SeqConfig",
    "StepRecord",
    "TrainConfig",
    "TrainContext",
    "TrainResult",
    "Trainer",
    "WSDConfig",
    "__version__",
    "launch",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
