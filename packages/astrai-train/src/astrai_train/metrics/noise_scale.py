"""The gradient noise scale: the batch size at which noise and signal are equal (McCandlish et al., arXiv 1812.06162)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from astrai_core.errors import ConfigError
from astrai_train.optim.matrix import local


@dataclass(frozen=True)
class NoiseScale:
    """Unbiased estimates from the gradients of a large and a small batch."""

    signal: float
    """Squared norm of the true gradient; an estimate may be negative."""
    noise: float
    """Trace of the covariance of one sample's gradient."""

    @property
    def batch_size(self) -> float:
        """``B_simple``: the batch size at which noise and signal are equal; NaN where there is no signal."""
        return self.noise / self.signal if self.signal > 0 else math.nan


def noise_scale(*, small: float, n_small: float, large: float, n_large: float) -> NoiseScale:
    """Estimate the gradient noise scale (arXiv 1812.06162, appendix A).

    Parameters
    ----------
    small, large
        Squared gradient norm of a small batch (averaged over such batches: ranks or micro-batches) and of a large one.
    n_small, n_large
        Samples in them.

    Raises
    ------
    ConfigError
        Unless ``0 < n_small < n_large``.
    """
    if not 0 < n_small < n_large:
        raise ConfigError(f"the noise scale needs 0 < n_small < n_large, got {n_small} and {n_large}")
    estimate = _estimate(
        *(torch.tensor(value, dtype=torch.float64) for value in (small, 1 / n_small, large, 1 / n_large))
    )
    return NoiseScale(*estimate.tolist())


def _estimate(small: Tensor, small_share: Tensor, large: Tensor, large_share: Tensor) -> Tensor:
    """Return (signal, noise), float64 ``[2]``: a squared norm is the signal's plus the noise times 1 / samples."""
    noise = (small - large) / (small_share - large_share)
    return torch.stack([large - noise * large_share, noise])


class NoiseScaleTracker:
    """Moving averages of signal and noise, whose ratio is told: one step's estimates are noisy, and may be negative.

    The small batch is the first micro-batch of each rank, before ranks exchange gradients; the large one is the step.
    Samples are what the loss is a mean over: supervised tokens, or pairs. Each step costs one pass over the gradients;
    nothing is read back from the device until :meth:`batch_size`.

    Parameters
    ----------
    parameters
        What is trained.
    beta
        Decay of both averages, ``0 <= beta < 1``.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], beta: float) -> None:
        self.beta = beta
        self._parameters = list(parameters)
        self._averages = torch.zeros(2, dtype=torch.float64, device=local(self._parameters[0]).device)
        self._part = torch.zeros(3, dtype=torch.float64, device=self._averages.device)

    @torch.no_grad()
    def begin(self, n_samples: int) -> None:
        """Take in the gradients of a step's first micro-batch, which are sums over `n_samples`."""
        grads = [local(parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        if not n_samples or not grads:
            self._part = torch.zeros_like(self._part)
            return
        norms = torch.stack(torch._foreach_norm(grads, 2.0, dtype=torch.float32)).double()
        shares = torch.tensor([1 / n_samples, 1.0], dtype=torch.float64).to(norms.device, non_blocking=True)
        self._part = torch.cat([norms.square().sum()[None] / n_samples**2, shares])

    @torch.no_grad()
    def update(self, norm: Tensor, n_samples: int, add_up: Callable[[Tensor], Tensor]) -> None:
        """Take in a step; one whose first micro-batches are all of it, or nothing, changes nothing.

        Parameters
        ----------
        norm
            Of the step's mean gradient.
        n_samples
            Of the step, on all ranks.
        add_up
            Adds a float64 ``[3]`` up over the ranks.
        """
        squares, shares, n_ranks = add_up(self._part).unbind()
        small, small_share = squares / n_ranks, shares / n_ranks
        large_share = torch.full_like(small_share, 1 / n_samples)
        found = _estimate(small, small_share, norm.double().square(), large_share)
        is_smaller = (n_ranks > 0) & (small_share > large_share * (1 + 1e-9))
        self._averages = torch.where(is_smaller, torch.lerp(found, self._averages, self.beta), self._averages)

    def batch_size(self) -> float | None:
        """Return ``B_simple`` in samples; None while there is no estimate, or no signal in it. Waits for the device."""
        found = NoiseScale(*self._averages.tolist()).batch_size
        return None if math.isnan(found) else found

    def state_dict(self) -> dict[str, Any]:
        """Return the averages; they are the same on every rank."""
        return {"averages": self._averages.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over saved averages."""
        self._averages.copy_(torch.tensor(state["averages"], dtype=torch.float64))
