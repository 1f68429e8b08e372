"""The whole of a training run's configuration: a recipe."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any, Self

from pydantic import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from astrai_core.config.base import CONFIG, BaseConfig, dataclass
from astrai_core.config.lora import LoRAConfig
from astrai_core.errors import ConfigError
from astrai_train.config.data import DataConfig, ModelSource
from astrai_train.config.fields import Name, Share
from astrai_train.config.optimizer import OptimizerConfig
from astrai_train.config.recipe_file import RecipeFile, write_recipe
from astrai_train.config.report import explain
from astrai_train.config.runtime import CheckpointConfig, LogConfig, ParallelConfig, PrecisionConfig
from astrai_train.config.schedule import CosineConfig, LRScheduleConfig
from astrai_train.config.strategy import DPOConfig, StrategyConfig


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class TrainConfig(BaseConfig):
    """A training run (rows CF1, CF2).

    Built by its constructor, which raises pydantic's ``ValidationError``, or by `from_dict` and `from_yaml`, which
    raise `ConfigError` with one line that names the field as the recipe spells it (``optimizer.lr``).
    """

    model: ModelSource
    """The model to train."""

    data: DataConfig
    """The rows to train on."""

    strategy: StrategyConfig
    """What is optimised: ``seq``, ``sft`` or ``dpo``."""

    optimizer: OptimizerConfig
    """How the weights move: ``adamw``, ``muon_adamw``, ``mano_adamw`` or ``nora_nadamw``."""

    output_dir: Name
    """Run directory, for the recipe, the metrics, the checkpoints and the report."""

    batch_size: PositiveInt
    """Rows of one optimizer step, over all ranks and micro-batches."""

    micro_batch_size: PositiveInt = 1
    """Rows that one rank computes at once; what is left of `batch_size` is accumulated."""

    max_steps: PositiveInt | None = None
    """Optimizer steps of the run; give this or `epochs`."""

    epochs: PositiveFloat | None = None
    """Passes over the training data; give this or `max_steps`."""

    lr_schedule: LRScheduleConfig = CosineConfig()
    """How the learning rate moves: ``cosine``, ``wsd``, ``sgdr`` or ``constant``."""

    max_grad_norm: PositiveFloat | None = 1.0
    """Global gradient norm above which gradients are scaled down to it; null only measures it."""

    seed: NonNegativeInt = 0
    """Seed of initialisation, dropout and every other draw but the order of the data."""

    eval_interval: PositiveInt | None = None
    """Optimizer steps between evaluations on `data.valid`; null never evaluates."""

    early_stop_patience: PositiveInt | None = None
    """Evaluations without a new best loss after which the run stops; null never stops early."""

    ema_decay: Share | None = None
    """Decay of a moving average of the weights, kept beside them in fp32 (0.999 averages about 1000 steps) and written
    to ``ema/`` at the end; null keeps none."""

    parallel: ParallelConfig = ParallelConfig()
    """One process, replicas (``ddp``) or shards (``fsdp``)."""

    precision: PrecisionConfig = PrecisionConfig()
    """Numbers, compilation and recomputation."""

    lora: LoRAConfig | None = None
    """Train low-rank adapters and leave the base weights alone; null trains every weight."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    """Rhythm and retention of the checkpoints."""

    log: LogConfig = LogConfig()
    """What the run tells while it runs."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Build the configuration from plain data.

        Raises
        ------
        ConfigError
            One line that names the first offending field by its dotted path.
        """
        try:
            return cls(**data)
        except ValidationError as error:
            raise ConfigError(explain(error, cls).message) from None

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str], overrides: Mapping[str, Any] | None = None) -> Self:
        """Read a recipe.

        Parameters
        ----------
        overrides
            Dotted field (``optimizer.lr``) -> value that takes the place of the recipe's.

        Raises
        ------
        ConfigError
            One line that names the file, the line (of a missing field: that of the mapping it is missing from) and
            the dotted field; the field alone where it is overridden.
        """
        recipe = RecipeFile(path)
        data = copy.deepcopy(recipe.data)
        for dotted, value in (overrides or {}).items():
            *groups, last = dotted.split(".")
            inner = data
            for group in groups:
                if not isinstance(inner.get(group), dict):
                    inner[group] = {}
                inner = inner[group]
            inner[last] = value
        try:
            return cls(**data)
        except ValidationError as error:
            found = explain(error, cls)
            prefixes = {".".join(map(str, found.path[:n])) for n in range(1, len(found.path) + 1)}
            if prefixes & set(overrides or {}):
                raise ConfigError(found.message) from None
            line = recipe.line_of(found.path)
            where = f"{recipe.path}:{line}" if line is not None else f"{recipe.path}"
            raise ConfigError(f"{where}: {found.message}") from None

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """Return the JSON schema of a recipe, a description, type and bounds for every field."""
        return TypeAdapter(cls).json_schema()

    def to_yaml(self, path: str | os.PathLike[str]) -> None:
        """Write the recipe with every field spelt out, defaults included; the file is replaced whole or not at all.

        Raises
        ------
        ConfigError
            If the file cannot be written.
        """
        write_recipe(path, self.to_dict())

    def accumulation_steps(self, world_size: int) -> int:
        """Return how many micro-batches each of `world_size` ranks accumulates for one optimizer step.

        Raises
        ------
        ConfigError
            If `batch_size` cannot be shared out evenly.
        """
        rows = self.micro_batch_size * world_size
        if self.batch_size % rows:
            raise ConfigError(
                f"batch_size {self.batch_size} must be a multiple of micro_batch_size x ranks = "
                f"{self.micro_batch_size} x {world_size} = {rows}"
            )
        if "noise_scale" in self.log.metrics and self.batch_size == rows:
            raise ConfigError(
                f"field 'log.metrics': noise_scale compares a micro-batch with a step, and batch_size {self.batch_size} is "
                "one micro-batch a rank; lower micro_batch_size, or leave noise_scale out"
            )
        return self.batch_size // rows

    @field_validator("log")
    @classmethod
    def _gradients_are_apart(cls, log: LogConfig, info: ValidationInfo) -> LogConfig:
        parallel = info.data.get("parallel")
        if parallel and parallel.mode == "fsdp" and "noise_scale" in log.metrics:
            raise ValueError(
                "metrics lists noise_scale, but under 'fsdp' no rank has a gradient of its own; leave it out"
            )
        return log

    @field_validator("strategy")
    @classmethod
    def _pairs_fit_data(cls, strategy: StrategyConfig, info: ValidationInfo) -> StrategyConfig:
        data = info.data.get("data")
        if data and isinstance(strategy, DPOConfig) and (data.packing != "none" or data.overlong != "truncate"):
            field = "packing" if data.packing != "none" else "overlong"
            raise ValueError(
                f"'dpo' gives each answer a row of its own and cuts what is too long; remove data.{field} "
                f"{getattr(data, field)!r}"
            )
        if data and isinstance(strategy, DPOConfig) and (strategy.max_prompt_len or 0) >= data.seq_len:
            raise ValueError(
                f"max_prompt_len {strategy.max_prompt_len} leaves no room for an answer in rows of data.seq_len "
                f"{data.seq_len}"
            )
        return strategy

    @field_validator("micro_batch_size")
    @classmethod
    def _micro_batches_fill_batch(cls, value: int, info: ValidationInfo) -> int:
        batch_size = info.data.get("batch_size")
        if batch_size and batch_size % value:
            raise ValueError(f"batch_size {batch_size} must be a multiple of micro_batch_size {value}")
        return value

    @field_validator("lr_schedule")
    @classmethod
    def _schedule_fits_run(cls, schedule: LRScheduleConfig, info: ValidationInfo) -> LRScheduleConfig:
        if max_steps := info.data.get("max_steps"):
            schedule.create(max_steps)
        return schedule

    @field_validator("eval_interval")
    @classmethod
    def _something_to_evaluate(cls, value: int | None, info: ValidationInfo) -> int | None:
        data = info.data.get("data")
        if value and data and not data.valid:
            raise ValueError("there is nothing to evaluate on; add data.valid")
        return value

    @field_validator("early_stop_patience")
    @classmethod
    def _evaluates(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and info.data.get("eval_interval", 1) is None:
            raise ValueError("stopping early needs evaluations; set eval_interval")
        return value

    @field_validator("checkpoint")
    @classmethod
    def _best_is_known(cls, checkpoint: CheckpointConfig, info: ValidationInfo) -> CheckpointConfig:
        if checkpoint.keep_best and info.data.get("eval_interval", 1) is None:
            raise ValueError("keep_best needs evaluations; set eval_interval")
        return checkpoint

    @field_validator("precision")
    @classmethod
    def _float8_fits_strategy(cls, precision: PrecisionConfig, info: ValidationInfo) -> PrecisionConfig:
        strategy = info.data.get("strategy")
        if precision.fp8 and isinstance(strategy, DPOConfig):
            raise ValueError("fp8: the policy would differ from its bf16 reference before the first step; remove it")
        return precision

    @field_validator("lora")
    @classmethod
    def _adapter_fits_run(cls, lora: LoRAConfig | None, info: ValidationInfo) -> LoRAConfig | None:
        strategy = info.data.get("strategy")
        if lora is None and isinstance(strategy, DPOConfig) and strategy.reference == "adapter_off":
            raise ValueError("strategy.reference 'adapter_off' needs an adapter; add lora or choose 'copy'")
        model = info.data.get("model")
        if lora is not None and model and model.pretrained is None:
            raise ValueError("an adapter needs weights to adapt; give model.pretrained or remove lora")
        precision = info.data.get("precision")
        if lora is not None and precision and precision.fp8:
            raise ValueError("precision.fp8: an adapter would learn to mend the rounding of frozen weights; remove one")
        if lora is not None and "lm_head" in lora.target_modules:
            raise ValueError("target_modules: the loss takes lm_head's weight as it is; remove it")
        return lora

    @model_validator(mode="after")
    def _valid_is_looked_at(self) -> Self:
        if self.data.valid and self.eval_interval is None:
            raise ValueError("data.valid is never looked at; set eval_interval or remove data.valid")
        return self

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.max_steps is None) == (self.epochs is None):
            raise ValueError("give exactly one of max_steps and epochs")
        return self
