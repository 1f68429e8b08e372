"""The sampling end of the ops door: one token per row of logits, by kernel where one can run, else by its torch twin.

What the kernel computes, and the order of its draw, is written down here; :mod:`astrai_core.ops` says when a kernel runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from astrai_core import kernels, ops

Penalties = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""presence, frequency, repetition ``[rows, 1]`` fp32; counts ``[rows, vocab]`` int32; seen ``[rows, vocab]`` bool."""


def argmax(logits: Tensor, out: Tensor) -> None:
    """Write the id of each row's largest logit, the smallest of equals.

    Parameters
    ----------
    logits
        ``[rows, vocab]``.
    out
        ``[rows]`` int64.
    """
    if ops.by_kernel(logits):
        kernels.module("sampling").argmax(logits, out=out)
    else:
        out.copy_(logits.float().argmax(-1))


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    out: Tensor,
    penalties: Penalties | None = None,
) -> None:
    """Draw one token per row: penalties, temperature, top-k, top-p, min-p, then the inverse of the distribution.

    A row's token depends on that row alone. The kernel's weights are fixed-point and the twin's fp64: they differ where
    the drawn number falls within rounding of a boundary.

    Parameters
    ----------
    logits
        ``[rows, vocab]``.
    temperature
        ``[rows]`` fp32; 0 is the row's argmax.
    top_k
        ``[rows]`` int64; 0 is off.
    top_p, min_p
        ``[rows]`` fp32; 1 and 0 are off. top_p acts on what top_k left, renormalised; min_p on the ratio to the likeliest.
    seed, position
        ``[rows]`` int64: key and counter of the generator, see :func:`uniform`.
    out
        ``[rows]`` int64.
    """
    if ops.by_kernel(logits):
        draw = kernels.module("sampling").sample
        draw(logits, temperature, top_k, top_p, min_p, seed, position, penalties=penalties, out=out)
        return
    scores = logits.float()
    if penalties is not None:
        scores = apply_penalties(scores, *penalties)
    weights, ids = _kept_weights(scores, temperature, top_k, top_p, min_p)
    cumulative = weights.cumsum(-1)
    target = (uniform(seed, position) * cumulative[:, -1]).unsqueeze(1)
    column = torch.searchsorted(cumulative, target, right=True).clamp_max(scores.shape[1] - 1)
    out.copy_(torch.where(temperature > 0, ids.gather(1, column).squeeze(1), scores.argmax(-1)))


def _kept_weights(
    scores: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """Return fp64 weights, 0 where a token is excluded, and ids, both ``[rows, vocab]`` in the order of the draw: falling
    scores with ties by rising id, or rising ids in rows without a filter."""
    values, ids = scores.sort(dim=-1, descending=True, stable=True)
    divisor = torch.where(temperature > 0, temperature, 1.0).unsqueeze(1).double()
    weights = ((values - values[:, :1]).double() / divisor).exp()
    weights[:, 0] = 1.0
    k, p, m = top_k.unsqueeze(1), top_p.unsqueeze(1), min_p.unsqueeze(1)
    weights = weights.masked_fill((k > 0) & (torch.arange(scores.shape[1], device=scores.device) >= k), 0.0)
    before = weights.cumsum(-1) - weights
    drop = ((p < 1) & (before >= p.double() * weights.sum(-1, keepdim=True))) | (weights < m.double())
    drop[:, 0] = False
    weights = weights.masked_fill(drop, 0.0)
    filtered = (k > 0) | (p < 1) | (m > 0)
    by_id = ids.argsort(-1)
    return torch.where(filtered, weights, weights.gather(1, by_id)), torch.where(filtered, ids, ids.gather(1, by_id))


def apply_penalties(
    logits: Tensor, presence: Tensor, frequency: Tensor, repetition: Tensor, counts: Tensor, seen: Tensor
) -> Tensor:
    """Penalise tokens of the history (row SM1).

    Parameters
    ----------
    logits
        ``[batch, vocab]`` fp32.
    presence, frequency, repetition
        ``[batch, 1]`` fp32: subtracted once per seen token, subtracted per count, and dividing positive (multiplying
        negative) logits of seen tokens (CTRL, arXiv 1909.05858, section 4.1).
    counts
        ``[batch, vocab]`` int32: occurrences in completion and the last rep_window prompt tokens.
    seen
        ``[batch, vocab]`` bool: occurs in prompt or completion.
    """
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen, scaled, logits)
    return logits - presence * (counts > 0) - frequency * counts


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """Draw one number in [0, 1) per row from a counter-based generator (SplitMix64's finaliser, Steele et al. 2014).

    Parameters
    ----------
    seed, position
        ``[batch]`` int64. The result is a function of the two alone, on every device.

    Returns
    -------
    ``[batch]`` fp64
    """
    x = _mix(seed ^ _mix(position + 1))
    return ((x >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >> 63 else constant
