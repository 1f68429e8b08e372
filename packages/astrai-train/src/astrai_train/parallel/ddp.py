"""Replicas: every rank holds the whole model, and gradients are added up while the backward pass runs."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from astrai_train.parallel.mode import ParallelMode

if TYPE_CHECKING:
    from astrai_core.model.transformer import CausalLM
    from astrai_train.data.collate import TrainBatch
    from astrai_train.strategy.base import BaseStrategy, LossOutput


class _Losses(nn.Module):
    """The forward pass that DistributedDataParallel watches: whatever a strategy does with the model.

    It has the model's parameters and not its buffers, which are alike everywhere and need no exchange.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.weights = nn.ParameterList(model.parameters())

    def forward(self, strategy: BaseStrategy, batch: TrainBatch) -> LossOutput:
        return strategy(batch)


class DDP(ParallelMode):
    """torch's DistributedDataParallel; the model itself is not wrapped and keeps its names.

    Micro-batches before the last one add up their gradients on their rank.
    """

    def prepare(self, model: CausalLM) -> None:
        """Send rank 0's weights to all, and have gradients added up."""
        # torch would cut a compiled block where a bucket of gradients is full. The backward pass of a block is short enough
        # to wait for, and what is cut is not fused.
        torch._dynamo.config.optimize_ddp = False
        self._replica = DistributedDataParallel(_Losses(model), gradient_as_bucket_view=True)
        self._replica.register_comm_hook(None, lambda _, bucket: _sum(bucket))

    def loss(self, strategy: BaseStrategy, batch: TrainBatch, *, last: bool) -> LossOutput:
        """Compute the loss; only the backward pass of the last one talks to the other ranks."""
        with nullcontext() if last else self._replica.no_sync():
            output: LossOutput = self._replica(strategy, batch)
        return output


def _sum(bucket: Any) -> torch.futures.Future[Tensor]:
    """Add a bucket of gradients up; DistributedDataParallel alone would average."""
    work = distributed.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None, "async_op returns the work"
    return work.get_future().then(lambda done: done.value()[0])
