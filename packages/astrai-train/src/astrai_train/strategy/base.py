"""The strategy seam: a batch becomes a *sum* over supervised tokens, and the trainer divides once a step.

Training rule 1: because nothing is averaged here, loss and gradient are the same for any split of a step's rows into
micro-batches, ranks or packed rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from astrai_core.registry import BaseFactory
from astrai_train.data.collate import IGNORE_LABEL, PADDING_DOC, TrainBatch

if TYPE_CHECKING:
    from astrai_core.model.transformer import CausalLM


@dataclass(frozen=True)
class LossOutput:
    """What a strategy makes of one micro-batch (row TR1)."""

    loss_sum: Tensor
    """Scalar fp32 with its graph: the loss summed over the supervised tokens, or over the preference pairs."""

    n_supervised: int
    """Terms of the sum: supervised tokens, or pairs."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further sums over the same terms, as plain floats."""

    def detach(self) -> LossOutput:
        """Return the same without the graph."""
        return replace(self, loss_sum=self.loss_sum.detach())


@dataclass(frozen=True)
class StepLoss:
    """The losses of a step's micro-batches, divided once by the step's supervised tokens."""

    loss: float | None
    """Mean over the supervised tokens; None if there were none."""

    n_supervised: int

    metrics: Mapping[str, float]
    """Means over the supervised tokens."""


def step_loss(outputs: Sequence[LossOutput]) -> StepLoss:
    """Sum over micro-batches and divide once; reads the device once for the whole step.

    maths.md section 11: token losses [4] and [1, 1, 1] in two micro-batches give 1.75, not the mean of means 2.5.
    """
    terms = add_terms([(output.n_supervised, output.metrics) for output in outputs])
    if terms[0] == 0:
        return StepLoss(None, 0, {})
    return StepLoss(float(total_loss(outputs)) / terms[0], terms[0], means(*terms))


def total_loss(outputs: Sequence[LossOutput]) -> Tensor:
    """Return the sum over micro-batches, float64 without dimensions, on their device."""
    return torch.stack([output.loss_sum for output in outputs]).sum(dtype=torch.float64)


def add_terms(parts: Sequence[tuple[int, Mapping[str, float]]]) -> tuple[int, dict[str, float]]:
    """Add up (supervised terms, metrics) of micro-batches or ranks."""
    sums: dict[str, float] = {}
    for _, metrics in parts:
        for name, value in metrics.items():
            sums[name] = sums.get(name, 0.0) + value
    return sum(count for count, _ in parts), sums


def means(n_supervised: int, sums: Mapping[str, float]) -> dict[str, float]:
    """Divide metrics by what was supervised; none where that is nothing."""
    return {name: value / n_supervised for name, value in sums.items()} if n_supervised else {}


def merge_losses(parts: Sequence[StepLoss]) -> StepLoss:
    """Return the loss of a step from its parts, each on a rank of its own; a single part is returned as it is."""
    if len(parts) == 1:
        return parts[0]
    counted = [part for part in parts if part.n_supervised]
    n_supervised = sum(part.n_supervised for part in counted)
    if n_supervised == 0:
        return StepLoss(None, 0, {})
    total, sums = 0.0, dict[str, float]()
    for part in counted:
        assert part.loss is not None, "there is a mean where something was supervised"
        total += part.loss * part.n_supervised
        for name, value in part.metrics.items():
            sums[name] = sums.get(name, 0.0) + value * part.n_supervised
    return StepLoss(total / n_supervised, n_supervised, {name: value / n_supervised for name, value in sums.items()})


class BaseStrategy(ABC):
    """Computes the loss of a micro-batch.

    It neither steps nor saves, and knows no ranks.

    Parameters
    ----------
    model
        The model that is trained.

    Attributes
    ----------
    compiled
        Compile what the loss does with logits; see :func:`astrai_train.compilation.compile_training`.
    """

    compiled = False

    def __init__(self, model: CausalLM) -> None:
        self.model = model

    @abstractmethod
    def __call__(self, batch: TrainBatch) -> LossOutput:
        """Return loss and metrics of a batch whose tensors are still on the host.

        A batch without a supervised token gives 0 and a gradient of zeros.
        """

    def compute_loss(self, batch: TrainBatch) -> Tensor:
        """Return the scalar fp32 loss of a host batch, summed, with its graph (row TR1)."""
        return self(batch).loss_sum


class StrategyFactory(BaseFactory[BaseStrategy]):
    """Strategies by the name that a recipe gives."""


def document_lens(batch: TrainBatch) -> tuple[int, ...]:
    """Return the lengths of the documents of a host batch, row after row, without padding."""
    return tuple(length for doc, length in runs(batch.doc_ids) if doc != PADDING_DOC)


def separation(batch: TrainBatch) -> tuple[int, ...] | None:
    """Return the lengths of the runs of a host batch that must not see each other, row after row, padding included.

    None if every row is one document, or one with padding behind it: causal attention never looks to the right, so
    such rows need no separation.
    """
    doc_ids = batch.doc_ids
    alone = (doc_ids[:, 1:] == doc_ids[:, :-1]) | (doc_ids[:, 1:] == PADDING_DOC)
    return None if bool(alone.all()) else tuple(length for _, length in runs(doc_ids))


def runs(doc_ids: Tensor) -> list[tuple[int, int]]:
    """Return (document id, length) of every run of equal ids within a row of ``[rows, seq_len]``."""
    starts = torch.ones_like(doc_ids, dtype=torch.bool)
    starts[:, 1:] = doc_ids[:, 1:] != doc_ids[:, :-1]
    places = starts.view(-1).nonzero().view(-1)
    lengths = torch.diff(places, append=places.new_tensor([doc_ids.numel()]))
    return list(zip(doc_ids.reshape(-1)[places].tolist(), lengths.tolist(), strict=True))


def prediction_targets(batch: TrainBatch) -> tuple[Tensor, Tensor]:
    """Shift once: return the places of a host batch that predict, and the tokens they predict (training rule 2).

    Returns
    -------
    (places in the flattened ``[rows * seq_len]`` tokens ``[n_supervised]`` int64, labels ``[n_supervised]`` int64)
    """
    predicts = torch.zeros_like(batch.labels, dtype=torch.bool)
    predicts[:, :-1] = (batch.labels[:, 1:] != IGNORE_LABEL) & (batch.doc_ids[:, 1:] == batch.doc_ids[:, :-1])
    places = predicts.view(-1).nonzero().view(-1)
    assert places.numel() == batch.n_supervised, "collate gives no label to the first token of a document"
    return places, batch.labels.view(-1)[places + 1]
