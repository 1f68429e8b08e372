"""Pre-training: next-token cross entropy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from astrai_train.data.collate import IGNORE_LABEL, TrainBatch, upload
from astrai_train.strategy.base import BaseStrategy, LossOutput, StrategyFactory, prediction_targets, separation
from astrai_train.strategy.cross_entropy import summed_cross_entropy
from astrai_train.strategy.router_loss import add_router_loss, router_stats

if TYPE_CHECKING:
    from astrai_core.model.transformer import CausalLM


@StrategyFactory.register("seq")
class SeqStrategy(BaseStrategy):
    """Cross entropy of every supervised token given those before it in its document.

    Parameters
    ----------
    model
        The model that is trained.
    label_smoothing
        Share of the target's probability that is spread evenly over the vocabulary.
    loss_chunk_tokens
        Tokens whose logits exist at once.
    """

    def __init__(self, model: CausalLM, *, label_smoothing: float, loss_chunk_tokens: int) -> None:
        super().__init__(model)
        self.label_smoothing = label_smoothing
        self.loss_chunk_tokens = loss_chunk_tokens

    def __call__(self, batch: TrainBatch) -> LossOutput:
        """Return the summed cross entropy; the documents of a packed row never see each other (training rule 4)."""
        doc_lens = separation(batch)
        device = self.model.device
        moved = batch.to(device, non_blocking=True)
        stats = router_stats(self.model, batch)
        hidden = self.model.hidden_states(
            moved.input_ids,
            moved.position_ids,
            doc_lens=doc_lens,
            embedding_noise=self.embedding_noise(batch),
            router_stats=stats,
        )
        places, targets = prediction_targets(batch)  # on the host, while the device computes the hidden states
        loss = summed_cross_entropy(
            hidden.flatten(0, 1).index_select(0, upload(places, device)),
            self.model.lm_head,
            upload(targets, device),
            chunk_tokens=self.loss_chunk_tokens,
            label_smoothing=self.label_smoothing,
            compiled=self.compiled,
        )
        supervised = (batch.labels != IGNORE_LABEL).flatten()
        total, metrics = add_router_loss(loss, stats, supervised, self.model.config.router_aux_loss_coef)
        return LossOutput(total, batch.n_supervised, metrics)

    def embedding_noise(self, batch: TrainBatch) -> Tensor | None:
        """Return what is added to the token vectors of a host batch, ``[rows, seq_len, hidden]``."""
        return None
