"""Learning-rate schedules: pure functions of the step and the base learning rate.

A schedule keeps no state, so a checkpoint stores the step alone. Steps count from 0; a run of ``total_steps``
executes steps ``0 .. total_steps - 1``.

All schedules share three conventions:

* Warm-up is linear and starts at ``1 / warmup_steps``, never at 0: step ``t`` runs at ``(t + 1) / warmup_steps``.
* The floor ``min_ratio`` is reached at ``t == total_steps``, so the last executed step still learns.
* From ``total_steps`` on, the schedule holds its last value.

The constructors have no defaults: those are written once, in :mod:`astrai_train.config.schedule`.

    schedule = LRScheduleFactory.create("cosine", total_steps=1000, warmup=20, min_ratio=0.1)
    schedule(step, 3e-4)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal

from astrai_core.errors import ConfigError
from astrai_core.registry import BaseFactory, closest

DecayShape = Literal["linear", "1-sqrt", "square", "cosine"]
"""How the decay phase of `WSDSchedule` falls from 1 to 0."""

_DECAY_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda x: 1.0 - x,
    "1-sqrt": lambda x: 1.0 - math.sqrt(x),
    "square": lambda x: (1.0 - x) ** 2,
    "cosine": lambda x: 0.5 * (1.0 + math.cos(math.pi * x)),
}


def check_duration(value: object) -> int | float:
    """Check a length of time given in steps (a whole number) or as a share of the run (``0 <= x < 1``).

    Returns
    -------
    The value, unchanged.

    Raises
    ------
    ConfigError
        If it is neither.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, float) and 0.0 <= value < 1.0:
        return value
    raise ConfigError(
        f"must be a whole number of steps (0, 1, 2, ...) or a share of the run (0 <= x < 1), got {value!r}"
    )


def duration_in_steps(duration: int | float, total_steps: int) -> int:
    """Turn a duration into steps; a share of the run is rounded to the nearest step."""
    duration = check_duration(duration)
    return duration if isinstance(duration, int) else round(duration * total_steps)


class LRSchedule(ABC):
    """A learning rate that is a pure function of the step.

    Parameters
    ----------
    total_steps
        Optimizer steps of the whole run, at least 1.
    warmup
        Steps of linear warm-up, or their share of the run.
    min_ratio
        Floor, as a share of the base learning rate; holds from ``total_steps`` on.

    Raises
    ------
    ConfigError
        If a value is out of range or the warm-up is longer than the run.
    """

    def __init__(self, *, total_steps: int, warmup: int | float, min_ratio: float) -> None:
        if total_steps < 1:
            raise ConfigError(f"total_steps must be at least 1, got {total_steps}")
        if not 0.0 <= min_ratio <= 1.0:
            raise ConfigError(f"min_ratio must lie between 0 and 1, got {min_ratio}")
        self.total_steps = total_steps
        self.min_ratio = min_ratio
        self.warmup_steps = self._steps("warmup", warmup)
        if self.warmup_steps > total_steps:
            raise ConfigError(
                f"warmup of {self.warmup_steps} steps is longer than the run of {total_steps}; shorten the warmup"
            )

    def __call__(self, step: int, base_lr: float) -> float:
        """Return the learning rate of optimizer step `step` (counted from 0)."""
        return base_lr * self.factor(step)

    def factor(self, step: int) -> float:
        """Return the learning rate of `step` divided by the base learning rate, in ``[0, 1]``.

        Raises
        ------
        ValueError
            If `step` is negative.
        """
        if step < 0:
            raise ValueError(f"step must not be negative, got {step}")
        if step >= self.total_steps:
            return self.min_ratio
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        return self.min_ratio + (1.0 - self.min_ratio) * self._shape(step)

    @abstractmethod
    def _shape(self, step: int) -> float:
        """Position between floor (0) and base learning rate (1), for ``warmup_steps <= step < total_steps``."""

    def _steps(self, field: str, duration: int | float) -> int:
        try:
            return duration_in_steps(duration, self.total_steps)
        except ConfigError as error:
            raise ConfigError(f"{field} {error}") from None


class LRScheduleFactory(BaseFactory[LRSchedule]):
    """Learning-rate schedules by name."""


@LRScheduleFactory.register("constant")
class ConstantSchedule(LRSchedule):
    """Warm-up, then the base learning rate for ever."""

    def __init__(self, *, total_steps: int, warmup: int | float) -> None:
        super().__init__(total_steps=total_steps, warmup=warmup, min_ratio=1.0)

    def _shape(self, step: int) -> float:
        return 1.0


@LRScheduleFactory.register("cosine")
class CosineSchedule(LRSchedule):
    """Warm-up, then half a cosine from the base learning rate to the floor (Loshchilov & Hutter, 2017)."""

    def _shape(self, step: int) -> float:
        progress = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        return 0.5 * (1.0 + math.cos(math.pi * progress))


@LRScheduleFactory.register("wsd")
class WSDSchedule(LRSchedule):
    """Warm-up, stable phase, decay (MiniCPM, arXiv 2404.06395; 1-sqrt: Hägele et al., arXiv 2405.18392).

    Parameters
    ----------
    decay
        Length of the decay that ends the run: steps, or their share of the run.
    decay_shape
        With ``x`` from 0 to 1 over the decay: ``linear`` 1 - x, ``1-sqrt`` 1 - sqrt(x), ``square`` (1 - x)^2,
        ``cosine`` (1 + cos(pi x)) / 2.

    Raises
    ------
    ConfigError
        As for `LRSchedule`; also if warm-up and decay together are longer than the run.
    """

    def __init__(
        self,
        *,
        total_steps: int,
        warmup: int | float,
        min_ratio: float,
        decay: int | float,
        decay_shape: DecayShape,
    ) -> None:
        super().__init__(total_steps=total_steps, warmup=warmup, min_ratio=min_ratio)
        if decay_shape not in _DECAY_SHAPES:
            raise ConfigError(
                f"decay_shape {decay_shape!r} is unknown{closest(decay_shape, _DECAY_SHAPES)}; "
                f"choose one of {', '.join(_DECAY_SHAPES)}"
            )
        self.decay_steps = self._steps("decay", decay)
        self.decay_shape = decay_shape
        if self.warmup_steps + self.decay_steps > total_steps:
            raise ConfigError(
                f"warmup of {self.warmup_steps} and decay of {self.decay_steps} steps do not fit into the run of "
                f"{total_steps}; shorten one of them"
            )

    def _shape(self, step: int) -> float:
        into_decay = step - (self.total_steps - self.decay_steps)
        return 1.0 if into_decay < 0 else _DECAY_SHAPES[self.decay_shape](into_decay / self.decay_steps)


@LRScheduleFactory.register("sgdr")
class SGDRSchedule(LRSchedule):
    """Warm-up, then cosine cycles with warm restarts (Loshchilov & Hutter, arXiv 1608.03983).

    Parameters
    ----------
    cycle
        Length of the first cycle: steps, or their share of the run.
    cycle_mult
        Each cycle is this many times as long as the one before it.

    Raises
    ------
    ConfigError
        As for `LRSchedule`; also if the first cycle has no step.
    """

    def __init__(
        self,
        *,
        total_steps: int,
        warmup: int | float,
        min_ratio: float,
        cycle: int | float,
        cycle_mult: int,
    ) -> None:
        super().__init__(total_steps=total_steps, warmup=warmup, min_ratio=min_ratio)
        self.cycle_steps = self._steps("cycle", cycle)
        self.cycle_mult = cycle_mult
        if self.cycle_steps < 1:
            raise ConfigError(f"cycle of {cycle!r} is less than one step in a run of {total_steps}; lengthen it")
        if cycle_mult < 1:
            raise ConfigError(f"cycle_mult must be at least 1, got {cycle_mult}")

    def _shape(self, step: int) -> float:
        position, length = step - self.warmup_steps, self.cycle_steps
        if self.cycle_mult == 1:
            position %= length
        else:
            while position >= length:
                position -= length
                length *= self.cycle_mult
        return 0.5 * (1.0 + math.cos(math.pi * position / length))
