"""How a run is carried out: parallelism, numbers, checkpoints and what is logged."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import PositiveInt, ValidationInfo, field_validator

from astrai_core.config.base import CONFIG, BaseConfig, dataclass
from astrai_train.config.fields import ModuleName, Share

Metric = Literal["loss", "lr", "grad_norm", "grad_snr", "tokens", "tokens_per_s", "mfu", "memory", "noise_scale"]
"""A column of metrics.jsonl."""

Tracker = Literal["tensorboard", "wandb"]
"""An outside tracker, each an extra of its own."""


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class ParallelConfig(BaseConfig):
    """How the ranks share the work."""

    mode: Literal["none", "ddp", "fsdp"] = "none"
    """``none`` is one process; ``ddp`` replicates the model; ``fsdp`` shards it (FSDP2)."""

    reshard_after_forward: bool = False
    """Free a block's gathered weights after its forward pass and send the gradients of every micro-batch on: less memory,
    slower steps; ``fsdp`` only. Otherwise gathered weights and gradients stay whole until the step's last backward
    pass."""

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

    fp8: bool = False
    """Multiply in float8 in the decoder blocks' projections, forward and backward, with one scale for each tensor; all
    else stays in `dtype`. Needs a GPU of compute capability 8.9 (Ada, Hopper) and pays with large matrices, compiled; a
    CPU computes the same numbers slowly."""

    deterministic: bool = False
    """Use deterministic kernels only: bitwise resume on a GPU, at some speed."""

    attention: Literal["auto", "cudnn", "flash", "math"] = "auto"
    """Kernel of the attention. ``auto``: on a GPU cuDNN's for rows of one document (flash's where rows differ in length
    or `deterministic` is set) and flash's varlen kernel for rows of several; on a CPU torch's own choice. By name:
    ``cudnn`` and ``math`` compute the documents of a row one by one, ``flash`` in one call."""

    compile: Literal["none", "default", "max-autotune"] = "none"
    """Compile decoder blocks and loss with torch.compile: ``default`` fuses what lies between products, a minute at the
    start for a fifth to a third of the time of a step; ``max-autotune`` also times candidates for the products."""

    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """Compute again in the backward pass instead of keeping: of a decoder block all but its input (``full``, about a
    third more time), or all but the results of products and attention (``selective``, a few percent); with
    `gradient_checkpointing_modules`, ``selective`` computes just those modules again."""

    checkpointing_every: PositiveInt = 1
    """Compute again in every so many-th decoder block only."""

    gradient_checkpointing_modules: tuple[ModuleName, ...] = ()
    """Modules to compute again as a whole under ``selective``, by class name or dotted name."""

    @field_validator("fp8")
    @classmethod
    def _float8_fits_dtype(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("dtype") == "fp32":
            raise ValueError("dtype 'fp32' is float32 throughout; choose 'bf16_mixed' or remove it")
        return value

    @field_validator("checkpointing_every")
    @classmethod
    def _every_fits_mode(cls, value: int, info: ValidationInfo) -> int:
        if value > 1 and info.data.get("activation_checkpointing") == "none":
            raise ValueError("activation_checkpointing 'none' does not use it; remove it or choose 'full'")
        return value

    @field_validator("gradient_checkpointing_modules")
    @classmethod
    def _modules_fit_mode(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        mode = info.data.get("activation_checkpointing")
        if value and mode in ("none", "full"):
            raise ValueError(f"activation_checkpointing {mode!r} does not use it; remove it or choose 'selective'")
        if value and info.data.get("checkpointing_every", 1) > 1:
            raise ValueError("checkpointing_every counts decoder blocks and these are named; remove one of the two")
        return value


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class CheckpointConfig(BaseConfig):
    """When the state is saved and what is kept."""

    interval: PositiveInt = 1000
    """Optimizer steps between checkpoints; the last step is always saved."""

    keep: PositiveInt | None = 3
    """Newest checkpoints kept; null keeps all. The last good one is never deleted."""

    keep_every: PositiveInt | None = None
    """Keep the checkpoint of every so many steps for good, besides the newest; a multiple of `interval`."""

    keep_best: bool = False
    """Save after every evaluation with a new lowest loss too, and keep the best checkpoint besides the newest."""

    asynchronous: bool = True
    """Write in the background while training goes on."""

    @field_validator("keep_every")
    @classmethod
    def _every_is_saved(cls, value: int | None, info: ValidationInfo) -> int | None:
        interval = info.data.get("interval")
        if value and interval and value % interval:
            raise ValueError(f"{value} is no multiple of interval {interval}, between which nothing is saved")
        return value

    @field_validator("keep_every", "keep_best")
    @classmethod
    def _something_is_deleted(cls, value: int | bool | None, info: ValidationInfo) -> int | bool | None:
        if value and info.data.get("keep", 1) is None:
            raise ValueError("keep null keeps every checkpoint; remove one of the two")
        return value


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class LogConfig(BaseConfig):
    """What a run tells while it runs; metrics.jsonl is always written."""

    interval: PositiveInt = 10
    """Optimizer steps between lines of metrics."""

    metrics: tuple[Metric, ...] = get_args(Metric)[:-1]
    """Columns computed and logged (row TR3); all but ``noise_scale``, which needs several micro-batches a step."""

    grad_snr_beta: Share = 0.999
    """Decay of the gradient moments behind ``grad_snr``."""

    noise_scale_beta: Share = 0.99
    """Decay of the estimates behind ``noise_scale``."""

    trackers: tuple[Tracker, ...] = ()
    """Outside trackers that get the same metrics."""

    progress: bool = True
    """Show a progress bar on a terminal."""

    @field_validator("grad_snr_beta", "noise_scale_beta")
    @classmethod
    def _noise_is_measured(cls, value: float, info: ValidationInfo) -> float:
        assert info.field_name is not None, "of a field"
        metric = info.field_name.removesuffix("_beta")
        if value != getattr(cls, info.field_name) and metric not in info.data.get("metrics", (metric,)):
            raise ValueError(f"metrics does not list {metric}, which it is for; add that or remove this")
        return value

    @field_validator("metrics", "trackers")
    @classmethod
    def _once_each(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if twice := sorted({name for name in value if value.count(name) > 1}):
            raise ValueError(f"{', '.join(twice)} is listed more than once; list it once")
        return value
