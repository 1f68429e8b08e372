"""Logits to token ids: the fixed order of transformations, one path for greedy and random rows."""

from __future__ import annotations

import torch
from torch import Tensor

from astrai_core.types import TokenLogprobs
from astrai_infer.sampling import strategies
from astrai_infer.sampling.batch_info import NARROW, WIDE, SamplingBatchInfo, SamplingView, Width


class SamplingPipeline:
    """penalties, bias, allowed ids, min_tokens -> temperature -> top_k -> top_p -> min_p -> draw."""

    def __init__(self, info: SamplingBatchInfo) -> None:
        self.info = info

    def sample(
        self, logits: Tensor, view: SamplingView, positions: Tensor
    ) -> tuple[Tensor, list[TokenLogprobs | None]]:
        """Sample one token per row.

        Parameters
        ----------
        logits
            ``[batch, vocab]`` of any dtype; unchanged.
        positions
            ``[batch]`` int64: index within its sequence of each row's last token, the counter of the generator.

        Returns
        -------
        (token ids ``[batch]`` int64, log-probabilities of the rows that asked for them)
        """
        scores = logits.float()
        if view.any_penalty:
            scores = strategies.apply_penalties(scores, *self.info.penalties(view))
        if view.any_rule:
            scores = strategies.apply_rules(scores.clone() if scores is logits else scores, view.tasks)
        tokens = strategies.argmax(scores)
        for width, index in view.groups.items():
            tokens[index] = _draw(scores, view, positions, width, index)
        self.info.record(view, tokens)
        if not view.any_logprobs:
            return tokens, [None] * len(view.tasks)
        return tokens, [self._logprobs(logits, scores, tokens, view, i) for i in range(len(view.tasks))]

    def _logprobs(
        self, logits: Tensor, scores: Tensor, tokens: Tensor, view: SamplingView, i: int
    ) -> TokenLogprobs | None:
        params, row = view.tasks[i].params, slice(i, i + 1)
        if params.logprobs is None:
            return None
        source = logits[row] if params.logprobs_mode == "raw" else processed_scores(scores[row], view, i)
        return token_logprobs(source, tokens[row], params.logprobs)[0]


def processed_scores(scores: Tensor, view: SamplingView, i: int) -> Tensor:
    """Return the scores ``[1, vocab]`` after temperature and filters, -inf where they exclude a token."""
    row = slice(i, i + 1)
    if view.tasks[i].params.greedy:
        return scores
    scores = scores / view.temperature[row].unsqueeze(1)
    values, ids = scores.sort(dim=1, descending=True, stable=True)
    kept = strategies.filter_sorted(values, view.top_k[row], view.top_p[row], view.min_p[row], scores.logsumexp(1))
    return torch.empty_like(scores).scatter_(1, ids, kept)


def _draw(scores: Tensor, view: SamplingView, positions: Tensor, width: Width, index: Tensor) -> Tensor:
    """Draw from the rows at `index`, all of one :data:`Width`."""
    u = strategies.uniform(view.seed[index], positions[index])
    scores = scores[index] / view.temperature[index].unsqueeze(1)
    if width == "none":
        return strategies.draw(scores, u)
    top_k, top_p, min_p = view.top_k[index], view.top_p[index], view.min_p[index]
    total = scores.logsumexp(1) if width == "nucleus" else None

    def draw_from(n_columns: int) -> Tensor:
        values, ids = scores.topk(min(n_columns, scores.shape[1]), dim=1)
        kept = strategies.filter_sorted(values, top_k, top_p, min_p, total)
        return ids.gather(1, strategies.draw(kept, u).unsqueeze(1)).squeeze(1)

    if width == "narrow":
        return draw_from(NARROW)
    if width == "wide" or scores.shape[1] <= WIDE:
        return draw_from(WIDE)
    assert total is not None, "only rows without a top-k of at most WIDE come here"
    probs = (scores.topk(WIDE, dim=1).values - total.unsqueeze(1)).exp()
    fits = (top_k == 0) & ((probs.sum(1) > top_p) | (probs[:, -1] < min_p * probs[:, 0]))
    return draw_from(WIDE) if bool(fits.all()) else torch.where(fits, draw_from(WIDE), draw_from(scores.shape[1]))


def token_logprobs(logits: Tensor, token_ids: Tensor, n_top: int) -> list[TokenLogprobs]:
    """Return the log-probabilities of given tokens and of the likeliest ones, of the model's own logits.

    Parameters
    ----------
    logits
        ``[n, vocab]``.
    token_ids
        ``[n]`` int64.
    n_top
        Likeliest tokens to list; the given token is added at the end if it is not among them.
    """
    return logprob_entries(*logprob_tensors(logits, token_ids, n_top))


def logprob_tensors(logits: Tensor, token_ids: Tensor, n_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Do the device's part of :func:`token_logprobs`.

    Returns
    -------
    (token_ids, their log-probabilities ``[n]``, the likeliest ids ``[n, n_top]``, their log-probabilities)
    """
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    values, ids = logprobs.topk(n_top, dim=1) if n_top else (logprobs[:, :0], token_ids[:, None][:, :0])
    return token_ids, chosen, ids, values


def logprob_entries(token_ids: Tensor, chosen: Tensor, top_ids: Tensor, top_values: Tensor) -> list[TokenLogprobs]:
    """Do the host's part: turn what :func:`logprob_tensors` found into records."""
    entries = []
    for token, logprob, ids, values in zip(
        token_ids.tolist(), chosen.tolist(), top_ids.tolist(), top_values.tolist(), strict=True
    ):
        top = list(zip(ids, values, strict=True))
        if token not in ids:
            top.append((token, logprob))
        entries.append(TokenLogprobs(token, logprob, tuple(top)))
    return entries
