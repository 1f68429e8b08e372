"""Recipes: one frozen configuration class for each group of fields, and `TrainConfig` over them."""

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

__all__ = [
    "TrainConfig",
    "ModelSource",
    "DataConfig",
    "DataSource",
    "StrategyConfig",
    "SeqConfig",
    "SFTConfig",
    "DPOConfig",
    "OptimizerConfig",
    "AdamWConfig",
    "MuonAdamWConfig",
    "ManoAdamWConfig",
    "NoraNAdamWConfig",
    "LRScheduleConfig",
    "CosineConfig",
    "WSDConfig",
    "SGDRConfig",
    "ConstantConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "LoRAConfig",
    "CheckpointConfig",
    "LogConfig",
]
