"""How a model is spread over the ranks: one process, replicas (DDP) or shards (FSDP2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from astrai_train.optim.matrix import local

if TYPE_CHECKING:
    from astrai_core.model.transformer import CausalLM
    from astrai_train.config import TrainConfig
    from astrai_train.data.collate import TrainBatch
    from astrai_train.parallel.world import World
    from astrai_train.strategy.base import BaseStrategy, LossOutput


class ParallelMode:
    """One process; the base of the other modes.

    Gradients are *summed* over ranks, never averaged: the trainer divides once by what all ranks supervised.

    Parameters
    ----------
    world
        The ranks.
    """

    def __init__(self, world: World) -> None:
        self.world = world

    def prepare(self, model: CausalLM) -> None:
        """Spread a model whose weights are in place over the ranks; its parameters may be replaced by others."""

    def loss(self, strategy: BaseStrategy, batch: TrainBatch, *, last: bool) -> LossOutput:
        """Compute the loss of one micro-batch.

        Parameters
        ----------
        last
            Whether the step's last backward pass follows: after it every rank has the sum of all gradients.
        """
        return strategy(batch)

    def end_evaluation(self, model: CausalLM) -> None:
        """Undo what forward passes without a backward pass have left behind."""

    def whole(self, model: CausalLM) -> CausalLM | None:
        """Return the model with its weights whole, on rank 0; None on the others. A collective."""
        return model if self.world.is_first else None

    def add_up_shards(self, values: Tensor) -> Tensor:
        """Add up what the ranks computed over their parts of the weights; the same tensor where each has them whole."""
        return values

    @torch.no_grad()
    def total_norm(self, grads: Sequence[Tensor]) -> Tensor:
        """Return the norm of all gradients together, float32, the same on every rank (row D2)."""
        # Not torch's get_total_norm, which rounds it to the gradients' dtype: three digits in bf16.
        norms = torch._foreach_norm([local(grad) for grad in grads], 2.0, dtype=torch.float32)
        return torch.linalg.vector_norm(torch.stack(norms))


def create_mode(config: TrainConfig, world: World) -> ParallelMode:
    """Return the mode that a recipe asks for."""
    if config.parallel.mode == "ddp":
        from astrai_train.parallel.ddp import DDP

        return DDP(world)
    if config.parallel.mode == "fsdp":
        from astrai_train.parallel.fsdp import FSDP

        return FSDP(world, reshard_after_forward=config.parallel.reshard_after_forward, dtype=config.precision.dtype)
    return ParallelMode(world)
