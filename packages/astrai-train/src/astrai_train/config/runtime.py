"""How a run is carried out: parallelism, numbers, adapters, checkpoints and what is logged."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, PositiveFloat, PositiveInt, ValidationInfo, field_validator

from astrai_core.config.base import CONFIG, BaseConfig, dataclass
from astrai_train.config.fields import ModuleName, Share

Metric = Literal["loss", "lr", "grad_norm", "grad_snr", "tokens", "tokens_per_s", "mfu", "memory"]
"""A column of metrics.jsonl."""

Tracker = Literal["tensorboard", "wandb", "trackio"]
"""An outside tracker, each an extra of its own."""


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class ParallelConfig(BaseConfig):
    """How the ranks share the work."""

    mode: Literal["none", "ddp", "fsdp"] = "none"
    """``none`` is one process; ``ddp`` replicates the model; ``fsdp`` shards it (FSDP2)."""

    reshard_after_forward: bool = False
    """Free the gathered parameters between forward and backward: less memory, slower steps; ``fsdp`` only (row TR4)."""

    @field_validator("reshard_after_forward")
    @classmethod
    def _only_fsdp(cls, value: bool, info: ValidationInfo) -> bool:
        mode = info.data.get("mode")
        if value and mode in ("none", "ddp"):
            raise ValueError(f"mode {mode!r} shards nothing; remove it or choose 'fsdp'")
        return value


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class PrecisionConfig(BaseConfig):
    """The numbers of the run and what they cost."""

    dtype: Literal["bf16_mixed", "bf16", "fp32"] = "bf16_mixed"
    """``bf16_mixed`` computes in bfloat16 over float32 master weights; ``bf16`` keeps the weights in it too; ``fp32``
    is float32 throughout."""

    deterministic: bool = False
    """Use deterministic kernels only: bitwise resume on a GPU, at some speed."""

    compile: bool = False
    """Compile the model with torch.compile."""

    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """Recompute in the backward pass: every decoder block (``full``), or `gradient_checkpointing_modules`
    (``selective``)."""

    gradient_checkpointing_modules: tuple[ModuleName, ...] = ()
    """Modules to recompute under ``selective``, by class name or dotted name."""

    @field_validator("gradient_checkpointing_modules")
    @classmethod
    def _modules_fit_mode(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        mode = info.data.get("activation_checkpointing")
        if value and mode in ("none", "full"):
            raise ValueError(f"activation_checkpointing {mode!r} does not use it; remove it or choose 'selective'")
        if not value and mode == "selective":
            raise ValueError("activation_checkpointing 'selective' needs at least one module")
        return value


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class LoRAConfig(BaseConfig):
    """Low-rank adapters on a frozen model (arXiv 2106.09685); the files are PEFT's."""

    rank: PositiveInt = 16
    """Rank of an adapter."""

    alpha: PositiveFloat = 32.0
    """An adapter's output is scaled by alpha / rank, or by alpha / sqrt(rank) with `rslora`."""

    dropout: Share = 0.0
    """Dropout before an adapter's first matrix."""

    rslora: bool = False
    """Rank-stabilised scaling (arXiv 2312.03732)."""

    target_modules: Annotated[tuple[ModuleName, ...], Field(min_length=1)] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """Linear modules that get an adapter, by their names in the Hugging Face files."""


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class CheckpointConfig(BaseConfig):
    """When the state is saved and what is kept."""

    interval: PositiveInt = 1000
    """Optimizer steps between checkpoints; the last step is always saved."""

    keep: PositiveInt | None = 3
    """Newest checkpoints kept; null keeps all. The last good one is never deleted."""

    asynchronous: bool = True
    """Write in the background while training goes on."""


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class LogConfig(BaseConfig):
    """What a run tells while it runs; metrics.jsonl is always written."""

    interval: PositiveInt = 10
    """Optimizer steps between lines of metrics."""

    metrics: tuple[Metric, ...] = get_args(Metric)
    """Columns computed and logged (row TR3)."""

    grad_snr_beta: Share = 0.999
    """Decay of the gradient moments behind ``grad_snr``."""

    trackers: tuple[Tracker, ...] = ()
    """Outside trackers that get the same metrics."""

    progress: bool = True
    """Show a progress bar on a terminal."""

    @field_validator("metrics", "trackers")
    @classmethod
    def _once_each(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if twice := sorted({name for name in value if value.count(name) > 1}):
            raise ValueError(f"{', '.join(twice)} is listed more than once; list it once")
        return value
