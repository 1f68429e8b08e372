"""Logits to token ids: the fixed order of transformations, one path for greedy and random rows."""

from __future__ import annotations

import torch
from torch import Tensor

from astrai_core.types import TokenLogprobs
from astrai_infer.sampling import strategies
from astrai_infer.sampling.batch_info import SamplingBatchInfo, SamplingView

PARTIAL_WIDTH = 1024
"""Columns that are sorted first; a row whose nucleus is wider sorts everything (sorting 49,152 columns costs 4 ms a row
on a CPU, finding the 1,024 largest 0.3 ms)."""


class SamplingPipeline:
    """penalties, bias, allowed ids, min_tokens -> temperature -> top_k -> top_p -> min_p -> draw."""

    def __init__(self, info: SamplingBatchInfo) -> None:
        self.info = info

    def sample(self, logits: Tensor, view: SamplingView, positions: Tensor) -> Tensor:
        """Sample one token per row.

        Parameters
        ----------
        logits
            ``[batch, vocab]`` of any dtype; unchanged.
        positions
            ``[batch]`` int64: index of the sampled token within its sequence, the counter of the generator.

        Returns
        -------
        ``[batch]`` int64
        """
        scores = logits.float()
        if view.any_penalty:
            scores = strategies.apply_penalties(scores, *self.info.penalties(view))
        if view.any_rule:
            scores = strategies.apply_rules(scores.clone() if scores is logits else scores, view.tasks)
        tokens = scores.argmax(-1)
        if view.any_random:
            tokens = torch.where(view.temperature > 0, self._draw(scores, view, positions), tokens)
        self.info.record(view, tokens)
        return tokens

    def _draw(self, scores: Tensor, view: SamplingView, positions: Tensor) -> Tensor:
        u = strategies.uniform(view.seed, positions)
        scores = scores / view.temperature.clamp_min(1e-10).unsqueeze(1)
        if not view.any_filter:
            return strategies.draw(scores, u)
        width = self._width(scores, view)
        values, ids = scores.topk(width, dim=1)
        kept = strategies.filter_sorted(values, view.top_k, view.top_p, view.min_p, scores.logsumexp(1))
        return ids.gather(1, strategies.draw(kept, u).unsqueeze(1)).squeeze(1)

    @staticmethod
    def _width(scores: Tensor, view: SamplingView) -> int:
        """Columns that hold everything the filters can keep."""
        vocab = scores.shape[1]
        if view.max_top_k:
            return min(view.max_top_k, vocab)
        if vocab <= PARTIAL_WIDTH:
            return vocab
        values = scores.topk(PARTIAL_WIDTH, dim=1).values
        probs = (values - scores.logsumexp(1, keepdim=True)).exp()
        by_mass = probs.sum(1) >= view.top_p
        by_ratio = probs[:, -1] < view.min_p * probs[:, 0]
        by_count = (view.top_k > 0) & (view.top_k <= PARTIAL_WIDTH)
        return PARTIAL_WIDTH if bool((by_mass | by_ratio | by_count | (view.temperature == 0)).all()) else vocab


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
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1).tolist()
    values, ids = logprobs.topk(n_top, dim=1) if n_top else (logprobs[:, :0], token_ids[:, None][:, :0])
    entries = []
    for token, logprob, top_ids, top_values in zip(
        token_ids.tolist(), chosen, ids.tolist(), values.tolist(), strict=True
    ):
        top = list(zip(top_ids, top_values, strict=True))
        if token not in top_ids:
            top.append((token, logprob))
        entries.append(TokenLogprobs(token, logprob, tuple(top)))
    return entries
