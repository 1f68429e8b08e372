"""A moving average of the weights, which often answers better than the last step's (Polyak & Juditsky, 1992)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from astrai_core.errors import ConfigError
from astrai_train.optim.matrix import local

DIRECTORY = "ema"
"""Of the run directory: the averaged model, written when a run ends."""


class WeightAverage:
    """Exponential moving average of the trained weights, fp32 whatever they are, in the shards that they are in.

    After update t the decay is ``min(decay, (1 + t) / (10 + t))``, so that the starting weights do not linger.

    Parameters
    ----------
    named
        (name, parameter) of what is trained.
    decay
        Share of the average that an update keeps, in the long run.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], decay: float) -> None:
        self.decay = decay
        self._parameters = dict(named)
        self.values: dict[str, Tensor] = {
            name: parameter.detach().float().clone() for name, parameter in self._parameters.items()
        }

    @classmethod
    def of(cls, optimizer: Optimizer, decay: float) -> WeightAverage:
        """Average everything that an optimizer of ours moves."""
        groups: list[dict[str, Any]] = optimizer.param_groups
        return cls((pair for g in groups for pair in zip(g["param_names"], g["params"], strict=True)), decay)

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after `step`, counted from 1."""
        fresh = 1.0 - min(self.decay, (1 + step) / (10 + step))
        averages = [local(value) for value in self.values.values()]
        weights = [local(parameter) for parameter in self._parameters.values()]
        if all(weight.dtype == torch.float32 for weight in weights):
            torch._foreach_lerp_(averages, weights, fresh)
        else:
            for average, weight in zip(averages, weights, strict=True):
                average.lerp_(weight.float(), fresh)

    @torch.no_grad()
    def load(self, values: Mapping[str, Tensor]) -> None:
        """Go on from the values of a checkpoint.

        Raises
        ------
        ConfigError
            If it holds no average of these weights.
        """
        if values.keys() != self.values.keys():
            raise ConfigError(
                "cannot resume: the checkpoint holds no average of these weights; resume without ema_decay"
            )
        for name, value in values.items():
            local(self.values[name]).copy_(local(value))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model have the averages as its weights, rounded to their dtype; afterwards it has its own again."""
        kept = {name: local(parameter).detach().clone() for name, parameter in self._parameters.items()}
        self._fill(self.values)
        try:
            yield
        finally:
            self._fill(kept)

    @torch.no_grad()
    def _fill(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            local(parameter).copy_(local(values[name]))
