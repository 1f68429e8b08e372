"""The loss on held-out data, measured without a trace in the run (training rule 8)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from astrai_train.context import Evaluation, TrainContext
from astrai_train.rng import rng_state, set_rng_state
from astrai_train.strategy.base import merge_losses, step_loss
from astrai_train.strategy.reference import evaluating


def evaluate(context: TrainContext) -> Evaluation:
    """Go once through every member of the validation set; a collective.

    Modules are in evaluation mode meanwhile; modes, gradients and random streams are afterwards what they were.

    Returns
    -------
    The mean loss over the supervised tokens of each member, and of the whole: the members' losses by their weights.
    A member without a supervised token has no loss and no part in it.
    """
    losses: dict[str, float | None] = {}
    total = weight = 0.0
    world = context.parallel.world
    with undisturbed(context.model, context.device), torch.no_grad():
        for member, source in context.valid:
            outputs = []
            for batch in source:
                with context.autocast():
                    outputs.append(context.strategy(batch))
            loss = losses[member.path] = merge_losses(world.gather(step_loss(outputs))).loss
            if loss is not None:
                total += member.weight * loss
                weight += member.weight
    context.parallel.end_evaluation(context.model)
    return Evaluation(context.counters.step, total / weight if weight else None, losses)


@contextmanager
def undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Put `model` into evaluation mode; afterwards every module has its own mode, and every random stream its place.

    Parameters
    ----------
    device
        Where the model computes.
    """
    streams = rng_state(device)
    try:
        with evaluating(model):
            yield
    finally:
        set_rng_state(streams, device)
