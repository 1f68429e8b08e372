"""Supervised fine-tuning: cross entropy over the supervised tokens of conversations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from astrai_train.data.collate import TrainBatch
from astrai_train.strategy.base import StrategyFactory
from astrai_train.strategy.neftune import neftune_noise
from astrai_train.strategy.seq import SeqStrategy

if TYPE_CHECKING:
    from astrai_core.model.transformer import CausalLM


@StrategyFactory.register("sft")
class SFTStrategy(SeqStrategy):
    """Cross entropy of the tokens that the data's masks supervise.

    Parameters
    ----------
    model, label_smoothing, loss_chunk_tokens
        As `SeqStrategy`.
    neftune_alpha
        Strength of NEFTune's noise while the model is in training mode; None is off.
    """

    def __init__(
        self, model: CausalLM, *, label_smoothing: float, loss_chunk_tokens: int, neftune_alpha: float | None
    ) -> None:
        super().__init__(model, label_smoothing=label_smoothing, loss_chunk_tokens=loss_chunk_tokens)
        self.neftune_alpha = neftune_alpha

    def embedding_noise(self, batch: TrainBatch) -> Tensor | None:
        """Draw the noise of a host batch from torch's global stream."""
        if self.neftune_alpha is None or not self.model.training:
            return None
        return neftune_noise(batch, self.model.config.hidden_size, self.neftune_alpha, self.model.device)
