"""The balance of a model's experts as a part of the loss (row TR2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from astrai_core.model.moe import RouterStats
from astrai_train.data.collate import PADDING_DOC, TrainBatch
from astrai_train.strategy.base import runs

if TYPE_CHECKING:
    from astrai_core.model.transformer import CausalLM

METRICS = ("task_loss", "aux_loss", "aux_loss_weighted", "router_entropy", "router_imbalance")
"""What is measured of a pass whose loss holds the balance."""


def router_stats(model: CausalLM, batch: TrainBatch) -> RouterStats | None:
    """Return what a training pass of a host batch shall fill; None where the balance is no part of the loss."""
    if not model.training or model.config.router_aux_loss_coef == 0 or not any(model.config.moe_layers):
        return None
    documents = runs(batch.doc_ids)
    real = torch.tensor([document != PADDING_DOC for document, _ in documents])
    n_documents = int(real.sum())
    numbers = torch.where(real, real.cumsum(0) - 1, n_documents)
    lengths = torch.tensor([length for _, length in documents])
    return RouterStats(numbers.repeat_interleave(lengths).to(model.device, non_blocking=True), n_documents)


def add_router_loss(
    task: Tensor, stats: RouterStats | None, weights: Tensor, coefficient: float
) -> tuple[Tensor, Mapping[str, float]]:
    """Add the balance to a summed loss.

    Each document's balance counts as often as its terms of the loss do. So the division by the step's terms makes it
    a mean, which is the same for any split into micro-batches, ranks or packed rows (training rule 1).

    Parameters
    ----------
    task
        Scalar, the loss of the task, summed over its terms.
    stats
        Filled by the pass; None adds nothing.
    weights
        ``[tokens]`` on the host: share of each token in the terms of the loss.
    coefficient
        Weight of the balance.

    Returns
    -------
    (their sum, its parts summed over the terms: ``task_loss``, ``aux_loss``, ``aux_loss_weighted``; and what the routers
    did, likewise: ``router_entropy`` in nats, ``router_imbalance``, which is 1 where the experts share evenly)
    """
    if stats is None:
        return task, {}
    terms = weights.to(task.device, torch.float32, non_blocking=True)
    of_documents = terms.new_zeros(stats.n_documents + 1).index_add(0, stats.documents, terms)[:-1]
    balance = (stats.balance() * of_documents).sum()
    weighted = coefficient * balance
    values = torch.stack([task.detach(), balance.detach(), weighted.detach(), *(stats.spread() @ of_documents)])
    return task + weighted, dict(zip(METRICS, values.tolist(), strict=True))
