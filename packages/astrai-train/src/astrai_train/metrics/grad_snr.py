"""How much of the gradient is signal: its signal-to-noise ratio over time (row TR3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from astrai_core.errors import CheckpointError, ConfigError
from astrai_train.optim.matrix import local


class GradSNRTracker:
    """Moving averages m of the gradient and v of its square, one pair for each weight, float32, bias-corrected.

    The ratio is ``sum(m^2) / sum(max(v - m^2, 0))`` over all parameters with two samples or more. Gradients are those
    of whole steps, accumulated and before clipping. Costs 8 bytes a weight. Of sharded parameters each rank averages
    its shards.

    Parameters
    ----------
    parameters
        (name, parameter) of what is trained.
    beta
        Decay of both averages, ``0 <= beta < 1``.

    Raises
    ------
    ConfigError
        If `beta` is out of range.
    """

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], beta: float) -> None:
        if not 0.0 <= beta < 1.0:
            raise ConfigError(f"grad_snr_beta must lie in [0, 1), got {beta}")
        self.beta = beta
        self._parameters = list(parameters)
        self._samples: dict[str, int] = {}
        self._means: dict[str, Tensor] = {}
        self._squares: dict[str, Tensor] = {}
        for name, parameter in self._parameters:
            self._reset(name, parameter)

    @torch.no_grad()
    def update(self, divisor: float = 1.0) -> None:
        """Take in the gradients of a step; a parameter without gradient keeps its averages.

        Parameters
        ----------
        divisor
            What the gradients have yet to be divided by.
        """
        present = [(name, parameter) for name, parameter in self._parameters if parameter.grad is not None]
        if not present:
            return
        for name, parameter in present:
            if self._means[name].shape != parameter.shape:
                self._reset(name, parameter)
            self._samples[name] += 1
        grads = [local(parameter.grad).float() for _, parameter in present if parameter.grad is not None]
        means = [local(self._means[name]) for name, _ in present]
        squares = [local(self._squares[name]) for name, _ in present]
        torch._foreach_mul_(means, self.beta)
        torch._foreach_add_(means, grads, alpha=(1.0 - self.beta) / divisor)
        torch._foreach_mul_(squares, self.beta)
        torch._foreach_addcmul_(squares, grads, grads, (1.0 - self.beta) / divisor**2)

    @torch.no_grad()
    def sums(self) -> Tensor:
        """Return this rank's (signal, noise), float64 ``[2]``; both 0 before any parameter has two samples."""
        totals = []
        for name, _ in self._parameters:
            if self._samples[name] < 2:
                continue
            correction = 1.0 - self.beta ** self._samples[name]
            signal = (local(self._means[name]) / correction).square()
            noise = (local(self._squares[name]) / correction).sub_(signal).clamp_min_(0)
            totals.append(torch.stack([signal.sum(dtype=torch.float64), noise.sum(dtype=torch.float64)]))
        if not totals:
            return torch.zeros(2, dtype=torch.float64, device=local(self._parameters[0][1]).device)
        return torch.stack(totals).sum(0)

    def ratio(self, add_up: Callable[[Tensor], Tensor] | None = None) -> float | None:
        """Return the signal-to-noise ratio, or None before the second step and where nothing varies.

        Parameters
        ----------
        add_up
            Adds a float64 ``[2]`` up over the ranks that hold the shards; None where every rank holds all.
        """
        sums = self.sums()
        signal, noise = (sums if add_up is None else add_up(sums)).tolist()
        return signal / noise if noise > 0 else None

    def decibels(self, add_up: Callable[[Tensor], Tensor] | None = None) -> float | None:
        """Return ``10 log10`` of the ratio; None where there is none, or no signal at all."""
        ratio = self.ratio(add_up)
        return 10.0 * math.log10(ratio) if ratio else None

    def state_dict(self) -> dict[str, Any]:
        """Return the decay, the averages and the number of samples in them."""
        return {
            "beta": self.beta,
            "samples": dict(self._samples),
            "means": dict(self._means),
            "squares": dict(self._squares),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over saved averages; those of a parameter that is new or of another shape start again.

        Raises
        ------
        CheckpointError
            If they were taken with another decay.
        """
        if state["beta"] != self.beta:
            raise CheckpointError(
                f"grad_snr_beta is {self.beta}, the checkpoint has {state['beta']}; resume with that value"
            )
        for name, parameter in self._parameters:
            self._reset(name, parameter)
            if name in state["means"] and state["means"][name].shape == parameter.shape:
                self._samples[name] = state["samples"][name]
                self._means[name].copy_(state["means"][name])
                self._squares[name].copy_(state["squares"][name])

    def _reset(self, name: str, parameter: nn.Parameter) -> None:
        self._samples[name] = 0
        self._means[name] = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
        self._squares[name] = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
