"""How the learning rate moves: one class for each schedule, told apart by `name`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from astrai_core.config.base import CONFIG, BaseConfig, dataclass
from astrai_train.config.fields import Duration, Ratio
from astrai_train.optim.lr_schedule import DecayShape, LRSchedule, LRScheduleFactory


class _Schedule(BaseConfig):
    def create(self, total_steps: int) -> LRSchedule:
        """Build the schedule of a run of `total_steps` optimizer steps.

        Raises
        ------
        ConfigError
            If the phases do not fit into the run.
        """
        options = self.to_dict()
        return LRScheduleFactory.create(options.pop("name"), total_steps=total_steps, **options)


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class CosineConfig(_Schedule):
    """Warm-up, then half a cosine down to the floor."""

    name: Literal["cosine"] = "cosine"
    """Selects this schedule."""

    warmup: Duration = 0.02
    """Linear warm-up, in steps or as a share of the run."""

    min_ratio: Ratio = 0.1
    """Floor, as a share of the base learning rate."""


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class WSDConfig(_Schedule):
    """Warm-up, stable phase, decay down to the floor."""

    name: Literal["wsd"] = "wsd"
    """Selects this schedule."""

    warmup: Duration = 0.02
    """Linear warm-up, in steps or as a share of the run."""

    decay: Duration = 0.2
    """Decay that ends the run, in steps or as a share of the run."""

    decay_shape: DecayShape = "1-sqrt"
    """With x from 0 to 1 over the decay: ``linear`` 1 - x, ``1-sqrt`` 1 - sqrt(x), ``square`` (1 - x)^2, ``cosine``
    (1 + cos(pi x)) / 2."""

    min_ratio: Ratio = 0.1
    """Floor, as a share of the base learning rate."""


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class SGDRConfig(_Schedule):
    """Warm-up, then cosine cycles with warm restarts."""

    name: Literal["sgdr"] = "sgdr"
    """Selects this schedule."""

    warmup: Duration = 0.02
    """Linear warm-up, in steps or as a share of the run."""

    cycle: Duration = 0.25
    """First cycle, in steps or as a share of the run."""

    cycle_mult: PositiveInt = 1
    """Each cycle is this many times as long as the one before it."""

    min_ratio: Ratio = 0.1
    """Floor, as a share of the base learning rate."""


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class ConstantConfig(_Schedule):
    """Warm-up, then the base learning rate for ever."""

    name: Literal["constant"] = "constant"
    """Selects this schedule."""

    warmup: Duration = 0.02
    """Linear warm-up, in steps or as a share of the run."""


LRScheduleConfig = Annotated[CosineConfig | WSDConfig | SGDRConfig | ConstantConfig, Field(discriminator="name")]
"""One of the schedules, chosen by its `name`."""
