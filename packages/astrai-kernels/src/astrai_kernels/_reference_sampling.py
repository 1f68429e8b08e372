"""Twins of argmax and sample in plain torch, by sorting; part of :mod:`astrai_kernels.reference`."""

from __future__ import annotations

import torch
from torch import Tensor


def argmax(logits: Tensor) -> Tensor:
    """Twin of :func:`astrai_kernels.argmax`; torch's own does not say which of equals it returns.

    Parameters
    ----------
    logits : Tensor
        ``[rows, vocab]``.

    Returns
    -------
    Tensor
        ``[rows]`` int64: the smallest id of the largest logit; NaN is larger than every number.
    """
    largest = logits.amax(-1, keepdim=True)
    is_largest = (logits == largest) | logits.isnan()
    ids = torch.arange(logits.shape[1], device=logits.device).expand_as(logits)
    return ids.where(is_largest, logits.shape[1]).amin(-1)


def apply_penalties(
    scores: Tensor, presence: Tensor, frequency: Tensor, repetition: Tensor, counts: Tensor, seen: Tensor
) -> Tensor:
    """Penalise tokens of the history.

    Parameters
    ----------
    scores : Tensor
        ``[rows, vocab]`` float32.
    presence, frequency, repetition : Tensor
        ``[rows]`` or ``[rows, 1]`` float32: subtracted once per token that counts, subtracted per count, and dividing
        positive (multiplying other) scores of seen tokens (CTRL, arXiv:1909.05858, section 4.1).
    counts : Tensor
        ``[rows, vocab]`` int32.
    seen : Tensor
        ``[rows, vocab]`` bool.

    Returns
    -------
    Tensor
        ``[rows, vocab]`` float32.
    """
    presence, frequency, repetition = (t.reshape(-1, 1) for t in (presence, frequency, repetition))
    scaled = torch.where(scores > 0, scores / repetition, scores * repetition)
    scores = torch.where(seen, scaled, scores)
    return scores - presence * (counts > 0) - frequency * counts


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """Draw a number per row from a counter-based generator (SplitMix64's finaliser, Steele et al. 2014).

    Parameters
    ----------
    seed, position : Tensor
        ``[rows]`` int64.

    Returns
    -------
    Tensor
        ``[rows]`` float64 in [0, 1), a function of the two alone on every device.
    """
    x = _mix(seed ^ _mix(position + 1))
    return _shift(x, 11).double() * 2.0**-53


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


def kept_weights(
    scores: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return what a draw chooses from: weights, 0 where a token is excluded, in the order of the draw, and the order.

    Parameters
    ----------
    scores : Tensor
        ``[rows, vocab]`` float32, after penalties.
    temperature, top_k, top_p, min_p : Tensor or None
        As :func:`astrai_kernels.sample` takes them; every temperature above 0.

    Returns
    -------
    weights : Tensor
        ``[rows, vocab]`` float64, 1 for the likeliest token.
    ids : Tensor
        ``[rows, vocab]`` int64: falling scores, ties by rising id; rising ids in rows without a filter.
    """
    rows, vocab = scores.shape
    k = torch.zeros(rows, 1, dtype=torch.int64, device=scores.device) if top_k is None else top_k.reshape(-1, 1)
    p = torch.ones(rows, 1, device=scores.device) if top_p is None else top_p.reshape(-1, 1)
    m = torch.zeros(rows, 1, device=scores.device) if min_p is None else min_p.reshape(-1, 1)
    values, ids = scores.sort(dim=-1, descending=True, stable=True)
    weights = ((values - values[:, :1]).double() / temperature.reshape(-1, 1).double()).exp()
    weights[:, 0] = 1
    rank = torch.arange(vocab, device=scores.device)
    weights = weights.masked_fill((k > 0) & (rank >= k), 0)
    before = weights.cumsum(-1) - weights
    total = weights.sum(-1, keepdim=True)
    drop = ((p < 1) & (before >= p.double() * total)) | (weights < m.double())
    drop[:, 0] = False
    weights = weights.masked_fill(drop, 0)
    plain = (k <= 0) & (p >= 1) & (m <= 0)
    by_id = ids.argsort(-1)
    return weights.where(~plain, weights.gather(1, by_id)), ids.where(~plain, ids.gather(1, by_id))


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seed: Tensor,
    position: Tensor,
    *,
    penalties: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """Twin of :func:`astrai_kernels.sample`, with weights in float64.

    Parameters
    ----------
    logits : Tensor
        ``[rows, vocab]``.
    temperature, top_k, top_p, min_p, seed, position, penalties
        As :func:`astrai_kernels.sample` takes them.

    Returns
    -------
    Tensor
        ``[rows]`` int64.
    """
    scores = logits.float()
    if penalties is not None:
        scores = apply_penalties(scores, *penalties)
    best = argmax(scores)
    temperature = temperature.reshape(-1)
    draws = (temperature > 0) & scores.gather(1, best.unsqueeze(1)).squeeze(1).isfinite()
    weights, ids = kept_weights(scores, temperature.where(draws, 1), top_k, top_p, min_p)
    cumulative = weights.where(draws.unsqueeze(1), 1).cumsum(-1)
    target = uniform(seed.reshape(-1), position.reshape(-1)) * cumulative[:, -1]
    column = torch.searchsorted(cumulative, target.unsqueeze(1), right=True).clamp_max(logits.shape[1] - 1)
    return ids.gather(1, column).squeeze(1).where(draws, best)
