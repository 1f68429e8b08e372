"""Preference optimisation on pairs: DPO and the losses that grew from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from astrai_core.errors import ConfigError, DataError
from astrai_train.data.collate import PADDING_DOC, PairBatch, TrainBatch
from astrai_train.strategy.base import BaseStrategy, LossOutput, StrategyFactory
from astrai_train.strategy.logprobs import batch_logprobs
from astrai_train.strategy.preference_losses import PairLogprobs, PreferenceLoss
from astrai_train.strategy.reference import Reference
from astrai_train.strategy.router_loss import add_router_loss, router_stats

if TYPE_CHECKING:
    from astrai_core.model.transformer import CausalLM

METRICS = ("reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy", "logp_chosen", "logp_rejected")
"""What is measured of each pair: the implicit rewards, their difference, whether it is above 0, and the answers'
log-probabilities under the model."""


@StrategyFactory.register("dpo")
class DPOStrategy(BaseStrategy):
    """A preference loss, summed over pairs; a pair without tokens (it fills up a batch) is none.

    Parameters
    ----------
    model
        The model that is trained.
    loss
        Of a pair's log-probabilities.
    reference
        Given if and only if the loss needs one.
    loss_chunk_tokens
        Tokens whose logits exist at once.

    Raises
    ------
    ConfigError
        If the reference is missing, or of no use.
    """

    def __init__(
        self, model: CausalLM, *, loss: PreferenceLoss, reference: Reference | None, loss_chunk_tokens: int
    ) -> None:
        super().__init__(model)
        if loss.needs_reference != (reference is not None):
            raise ConfigError(f"{type(loss).__name__} needs {'a' if loss.needs_reference else 'no'} reference")
        self.loss = loss
        self.reference = reference
        self.loss_chunk_tokens = loss_chunk_tokens

    def __call__(self, batch: TrainBatch) -> LossOutput:
        """Return the loss of a batch of pairs, summed over them.

        Raises
        ------
        DataError
            If the batch holds no pairs.
        """
        if not isinstance(batch, PairBatch):
            raise DataError("preference losses need pairs; preprocess the data as 'preference'")
        reference = None if self.reference is None else self.reference(batch)
        stats = router_stats(self.model, batch)
        scores = batch_logprobs(self.model, batch, self.loss_chunk_tokens, stats)
        lengths = scores.n_tokens.clamp(min=1)
        pairs = PairLogprobs(
            chosen=scores.sums[0::2],
            rejected=scores.sums[1::2],
            chosen_len=lengths[0::2],
            rejected_len=lengths[1::2],
            ref_chosen=None if reference is None else reference[0::2],
            ref_rejected=None if reference is None else reference[1::2],
        )
        real = (batch.prompt_len > 0).to(scores.sums.device)
        task = (self.loss(pairs) * real).sum()
        # The two answers of a pair share its one term of the loss, and the tokens of an answer its half of it.
        is_token = batch.doc_ids != PADDING_DOC
        shares = (0.5 * is_token / is_token.sum(1, keepdim=True).clamp(min=1)).flatten()
        loss, parts = add_router_loss(task, stats, shares, self.model.config.router_aux_loss_coef)
        n_pairs = int((batch.prompt_len > 0).sum())
        return LossOutput(loss, n_pairs, {**self._metrics(pairs, real), **parts})

    @torch.no_grad()
    def _metrics(self, pairs: PairLogprobs, real: Tensor) -> dict[str, float]:
        """Sum over the pairs; reads the device once."""
        chosen, rejected = self.loss.rewards(pairs)
        margin = chosen - rejected
        rows = torch.stack([chosen, rejected, margin, (margin > 0).float(), pairs.chosen, pairs.rejected])
        return dict(zip(METRICS, (rows * real).sum(1).tolist(), strict=True))
