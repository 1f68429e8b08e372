"""Pre-training: next-token cross entropy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from astrai_train.data.collate import TrainBatch
from astrai_train.strategy.base import BaseStrategy, StrategyFactory, prediction_targets, separation
from astrai_train.strategy.cross_entropy import summed_cross_entropy

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

    def compute_loss(self, batch: TrainBatch) -> Tensor:
        """Return the summed cross entropy; the documents of a packed row never see each other (training rule 4)."""
        doc_lens = separation(batch)
        places, targets = prediction_targets(batch)
        device = self.model.device
        moved = batch.to(device, non_blocking=True)
        hidden = self.model.hidden_states(moved.input_ids, moved.position_ids, doc_lens=doc_lens)
        return summed_cross_entropy(
            hidden.flatten(0, 1).index_select(0, places.to(device, non_blocking=True)),
            self.model.lm_head,
            targets.to(device, non_blocking=True),
            chunk_tokens=self.loss_chunk_tokens,
            label_smoothing=self.label_smoothing,
        )
