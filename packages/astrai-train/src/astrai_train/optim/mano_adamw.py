"""Mano, second version, on hidden matrices; AdamW on the rest (arXiv 2601.23000; rows O2 and O3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn, optim

from astrai_train.optim.adamw import fused_adamw
from astrai_train.optim.composite import COUNTER, CompositeOptimizer
from astrai_train.optim.groups import decay_groups, matrix_groups, split_matrices
from astrai_train.optim.matrix import (
    MatrixOptimizer,
    MatrixRows,
    exact,
    local,
    matrix_rows,
    per_row,
    require_row_shards,
    sum_over_row_shards,
)


def tangent_direction(update: Tensor, weight: Tensor, total: Callable[[Tensor], Tensor], eps: float) -> Tensor:
    """Project an update off the weight and normalise what is left, slice by slice.

    Parameters
    ----------
    total
        Sums over each slice (row or column) and returns the sums in a shape that broadcasts to the argument's.
    eps
        Added to the norms; a slice without tangent has the direction 0.

    Notes
    -----
    As in the second version, the weight is not normalised, so that the projection is orthogonal at unit norm only.
    """
    tangent = update - weight * total(update * weight)
    return tangent / (total(tangent.square()).sqrt() + eps)


class Mano(MatrixOptimizer):
    """Momentum projected onto the tangent of the weight's columns (even steps) or rows (odd steps) and normalised.

    A group counts its steps in ``steps``: it is part of the saved state, since it decides the axis. The heavy-ball
    momentum (``M <- mu M + g``) is kept in the parameter's dtype. Where rows are sharded, the row steps are local and
    a column step adds up two rows of sums for each matrix over the ranks.
    """

    def __init__(
        self, params: Iterable[Any], *, lr: float, weight_decay: float, momentum: float, nesterov: bool, eps: float
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            eps=eps,
            **{COUNTER: 0},
        )

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        assert parameter.grad is not None, "the step passes over parameters without gradient"
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        stored, grad, momentum = local(parameter), local(parameter.grad), local(state["momentum"])
        momentum.mul_(group["momentum"]).add_(grad)
        update = grad.add(momentum, alpha=group["momentum"]) if group["nesterov"] else momentum
        weight, update = exact(stored), exact(update)
        if group[COUNTER] % 2 == 0:
            rows = matrix_rows(parameter, group["row_groups"])
            direction = tangent_direction(update, weight, lambda x: _column_sums(x, rows, parameter), group["eps"])
            scale = per_row(rows, lambda count: 0.2 * math.sqrt(count), weight)
            direction = direction * scale
        else:
            direction = tangent_direction(update, weight, lambda x: x.sum(-1, keepdim=True), group["eps"])
            direction = direction * (0.2 * math.sqrt(parameter.shape[-1]))
        stored.copy_(weight.mul(1.0 - group["lr"] * group["weight_decay"]).sub(direction, alpha=group["lr"]))

    def _finish(self, group: dict[str, Any]) -> None:
        group[COUNTER] += 1

    def _check(self, name: str, parameter: nn.Parameter, row_groups: tuple[int, ...]) -> None:
        super()._check(name, parameter, row_groups)
        require_row_shards("mano_adamw", name, parameter)


def _column_sums(values: Tensor, rows: list[MatrixRows], parameter: Tensor) -> Tensor:
    """Sum each column over the rows of its matrix; return the sums at every row of `values` (of one matrix: once)."""
    sums = torch.stack([values[..., part.start : part.stop, :].sum(-2) for part in rows], dim=-2)
    sums = sum_over_row_shards(sums, parameter)
    if len(rows) == 1:
        return sums
    pairs = zip(sums.split(1, dim=-2), rows, strict=True)
    return torch.cat([one.repeat_interleave(part.stop - part.start, dim=-2) for one, part in pairs], dim=-2)


class ManoAdamW(CompositeOptimizer):
    """Mano on hidden matrices, AdamW on embeddings, head, adapters, routers, norms, biases and scalars.

    The matrices of a fused weight (q, k and v; gate and up) have columns and scales of their own, as if they were
    parameters of their own. :class:`~astrai_train.config.ManoAdamWConfig` describes the options.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float,
        weight_decay: float,
        mano_momentum: float,
        mano_nesterov: bool,
        mano_eps: float,
        adamw_lr: float | None,
        adamw_betas: tuple[float, float],
        adamw_eps: float,
        adamw_weight_decay: float,
    ) -> None:
        matrices, others = split_matrices(model, "mano_adamw")
        parts: dict[str, optim.Optimizer] = {
            "mano": Mano(
                matrix_groups(matrices),
                lr=lr,
                weight_decay=weight_decay,
                momentum=mano_momentum,
                nesterov=mano_nesterov,
                eps=mano_eps,
            )
        }
        if others:
            companion_lr = lr if adamw_lr is None else adamw_lr
            groups = decay_groups(others, adamw_weight_decay)
            parts["adamw"] = fused_adamw(groups, lr=companion_lr, betas=adamw_betas, eps=adamw_eps)
        super().__init__(parts)
