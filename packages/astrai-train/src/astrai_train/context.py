"""What a run consists of: built once, and shown to strategies' users, callbacks and the trainer alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from astrai_core.model.transformer import CausalLM
from astrai_train.checkpoint import CheckpointStore
from astrai_train.config import DataSource, TrainConfig
from astrai_train.data.collate import BatchSource, TrainBatch
from astrai_train.ema import WeightAverage
from astrai_train.metrics.grad_snr import GradSNRTracker
from astrai_train.metrics.mfu import peak_flops
from astrai_train.metrics.noise_scale import NoiseScaleTracker
from astrai_train.optim.composite import CompositeOptimizer
from astrai_train.optim.lr_schedule import LRSchedule
from astrai_train.parallel.mode import ParallelMode
from astrai_train.precision import autocast
from astrai_train.strategy.base import BaseStrategy


@dataclass
class Counters:
    """How far a run is."""

    step: int = 0
    """Optimizer steps that are done; the next is step + 1, at the schedule's position `step`."""

    tokens: int = 0
    """Tokens seen, padding left out."""

    supervised_tokens: int = 0
    """Terms of all losses: tokens, or preference pairs."""

    best_valid_loss: float | None = None
    """Lowest loss of the evaluations so far."""

    best_step: int | None = None
    """Steps done before that evaluation."""

    evaluations_since_best: int = 0
    """Evaluations after that one."""


@dataclass
class TrainContext:
    """The parts of a run. Callbacks may read everything and change nothing."""

    config: TrainConfig
    run_dir: Path
    model: CausalLM
    strategy: BaseStrategy
    optimizer: CompositeOptimizer
    schedule: LRSchedule
    source: BatchSource
    checkpoints: CheckpointStore
    total_steps: int
    accumulation_steps: int
    """Micro-batches of one optimizer step on each rank."""
    parallel: ParallelMode
    """How the ranks share the work; `source` and `valid` are this rank's part of it."""
    valid: Sequence[tuple[DataSource, Iterable[TrainBatch]]] = ()
    """Members of the validation set; each iteration over one's batches goes through it once."""
    grad_snr: GradSNRTracker | None = None
    noise_scale: NoiseScaleTracker | None = None
    ema: WeightAverage | None = None
    counters: Counters = field(default_factory=Counters)

    @property
    def device(self) -> torch.device:
        """Where this rank's model computes."""
        return self.model.device

    @property
    def peak_flops(self) -> float | None:
        """Dense bf16 FLOPs per second of all ranks' devices together; None where it is not known."""
        peak = peak_flops(self.device)
        return None if peak is None else peak * self.parallel.world.size

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which losses are computed; see :func:`astrai_train.precision.autocast`."""
        return autocast(self.config, self.device)


@dataclass(frozen=True)
class StepRecord:
    """What one optimizer step did."""

    step: int
    """Counted from 1."""
    loss: float | None
    """Mean over what the step supervised on all ranks; None for a step that had none and was skipped."""
    lr: float
    """Learning rate of the first parameter group."""
    grad_norm: float | None
    """Global norm before clipping; None for a skipped step."""
    grad_snr: float | None
    """Signal over noise of the gradient in decibels; None where it is not known, and between the steps that are logged."""
    noise_scale: float | None
    """Samples of a step whose gradient has as much noise as signal; None as above."""
    n_tokens: int
    """Tokens of the step on all ranks, padding left out."""
    flops: float
    """Of the step on all ranks, by the convention of :mod:`astrai_train.metrics.mfu`."""
    seconds: float
    """Wall time of the step, waiting for data included."""
    metrics: Mapping[str, float]
    """What the strategy measured, as means over the same."""


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found."""

    step: int
    """Steps done before it."""
    loss: float | None
    """The members' losses by their weights; None if nothing was supervised."""
    losses: Mapping[str, float | None]
    """Loss of each member, by its path."""


@dataclass(frozen=True)
class TrainResult:
    """How a run ended."""

    step: int
    """Steps done, those of earlier parts of a resumed run included."""
    checkpoint: Path
    """Directory of the last checkpoint."""
    stopped_by: str | None
    """What ended the run early, the signal's name or ``early_stop_patience``; None if all steps are done."""
