"""The training side of astrai: recipes, schedules and (with the training issue) the trainer.

Names are imported at first use, so that ``import astrai_train`` costs nothing and needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from astrai_train._version import __version__

if TYPE_CHECKING:
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
    from astrai_train.optim.lr_schedule import LRSchedule, LRScheduleFactory

_EXPORTS = {
    "AdamWConfig": "config",
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
    "ManoAdamWConfig": "config",
    "ModelSource": "config",
    "MuonAdamWConfig": "config",
    "NoraNAdamWConfig": "config",
    "ParallelConfig": "config",
    "PrecisionConfig": "config",
    "SFTConfig": "config",
    "SGDRConfig": "config",
    "SeqConfig": "config",
    "TrainConfig": "config",
    "WSDConfig": "config",
}

__all__ = [
    "AdamWConfig",
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
    "ManoAdamWConfig",
    "ModelSource",
    "MuonAdamWConfig",
    "NoraNAdamWConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "SFTConfig",
    "SGDRConfig",
    "SeqConfig",
    "TrainConfig",
    "WSDConfig",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
