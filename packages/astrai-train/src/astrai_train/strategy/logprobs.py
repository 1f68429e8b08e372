"""Log-probabilities that a model gives to answers: summed over supervised tokens, with exactly one shift."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from astrai_core.errors import ConfigError
from astrai_train.data.collate import IGNORE_LABEL, TrainBatch
from astrai_train.strategy.base import separation

if TYPE_CHECKING:
    from astrai_core.model.moe import RouterStats
    from astrai_core.model.transformer import CausalLM


@dataclass(frozen=True)
class SequenceLogprobs:
    """One value for each row of a batch."""

    sums: Tensor
    """``[rows]`` float32: log-probability of the supervised tokens together, in nats."""

    n_tokens: Tensor
    """``[rows]`` int64: supervised tokens that were scored."""

    def means(self) -> Tensor:
        """Return the log-probability per token ``[rows]``; 0 for a row without supervised tokens."""
        return self.sums / self.n_tokens.clamp(min=1)


def sequence_logprobs(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    input_ids: Tensor,
    supervised: Tensor,
    *,
    chunk_tokens: int,
) -> SequenceLogprobs:
    """Score the supervised tokens of every row.

    Token i is scored by the state before it, if and only if token i is supervised (training rule 2); a row's first
    token has no state before it and is never scored. Only the states that score a token are projected, `chunk_tokens`
    at a time, and projected again in the backward pass, so that at most ``chunk_tokens * vocab`` logits exist.

    Parameters
    ----------
    hidden
        ``[rows, seq_len, hidden]``: the model's final states.
    head
        Output projection of states ``[n, hidden]`` to logits ``[n, vocab]``; called at least once, also for n = 0, so
        that every rank takes part in a sharded projection's collectives.
    input_ids
        ``[rows, seq_len]`` int64.
    supervised
        ``[rows, seq_len]`` bool.
    chunk_tokens
        Tokens whose logits exist at once, at least 1.

    Raises
    ------
    ConfigError
        If `chunk_tokens` or a shape is wrong.
    """
    if chunk_tokens < 1:
        raise ConfigError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
    if not hidden.shape[:2] == input_ids.shape == supervised.shape:
        raise ConfigError(
            f"hidden, input_ids and supervised must share [rows, seq_len], got {list(hidden.shape[:2])}, "
            f"{list(input_ids.shape)} and {list(supervised.shape)}"
        )
    scored = supervised[:, 1:].bool()
    states, targets = hidden[:, :-1][scored], input_ids[:, 1:][scored]
    chunks = list(zip(states.split(chunk_tokens), targets.split(chunk_tokens), strict=True))
    if len(chunks) == 1:
        values = _token_logprobs(head, *chunks[0])
    else:
        # The projection draws no random number, so there is no generator state to keep for the second time.
        values = torch.cat(
            [
                checkpoint(_token_logprobs, head, *chunk, use_reentrant=False, preserve_rng_state=False)
                for chunk in chunks
            ]
        )
    # Each value has a place of its own, so that the sums have one order on every device.
    sums = values.new_zeros(scored.shape).masked_scatter(scored, values).sum(1)
    return SequenceLogprobs(sums, scored.sum(1))


def batch_logprobs(
    model: CausalLM, batch: TrainBatch, chunk_tokens: int, router_stats: RouterStats | None = None
) -> SequenceLogprobs:
    """Score the supervised tokens of every row of a host batch by a model; see :func:`sequence_logprobs`."""
    doc_lens = separation(batch)
    moved = batch.to(model.device, non_blocking=True)
    hidden = model.hidden_states(moved.input_ids, moved.position_ids, doc_lens=doc_lens, router_stats=router_stats)
    supervised = moved.labels != IGNORE_LABEL
    return sequence_logprobs(hidden, model.lm_head, moved.input_ids, supervised, chunk_tokens=chunk_tokens)


def _token_logprobs(head: Callable[[Tensor], Tensor], states: Tensor, targets: Tensor) -> Tensor:
    """Return float32 ``[n]`` log-probabilities of `targets` ``[n]`` after `states` ``[n, hidden]``."""
    logits = head(states).float()
    return logits.gather(1, targets[:, None]).squeeze(1) - logits.logsumexp(1)
