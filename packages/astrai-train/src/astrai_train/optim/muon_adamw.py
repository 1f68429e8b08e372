"""Muon on hidden matrices, AdamW on the rest (K. Jordan; "Muon is Scalable for LLM Training", arXiv 2502.16982)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn, optim

from astrai_train.optim.adamw import fused_adamw
from astrai_train.optim.composite import CompositeOptimizer
from astrai_train.optim.groups import decay_groups, matrix_groups, split_matrices
from astrai_train.optim.matrix import MatrixOptimizer, gather_like, local, matrix_rows, shard_like

Scale = Literal["match_rms_adamw", "original"]
NewtonSchulzDtype = Literal["bf16", "fp32"]

_DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}


def newton_schulz(update: Tensor, *, steps: int, coefficients: tuple[float, float, float], eps: float) -> Tensor:
    """Bring every singular value of a matrix near 1 (with the default coefficients: into 0.68 .. 1.14).

    Parameters
    ----------
    update
        ``[m, n]`` or a stack ``[..., m, n]``; the work is done in its dtype.
    coefficients
        a, b, c of ``X <- a X + (b A + c A^2) X`` with ``A = X X^T``.
    eps
        Smallest Frobenius norm to divide by; a zero matrix stays zero.
    """
    a, b, c = coefficients
    tall = update.shape[-2] > update.shape[-1]
    x = update.mT if tall else update
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=eps)
    addmm = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        x = addmm(x, addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def update_scale(kind: Scale, m: int, n: int) -> float:
    """Return the factor on the update of a matrix ``[m, n]``."""
    if kind == "original":
        return math.sqrt(max(1.0, m / n))
    return 0.2 * math.sqrt(max(m, n))


class Muon(MatrixOptimizer):
    """Momentum orthogonalised by Newton-Schulz; decay is scaled by the learning rate, not by the update's scale.

    The momentum is a moving average (``B <- mu B + (1 - mu) g``), kept in the parameter's dtype. float64 weights are
    orthogonalised in float64 whatever `ns_dtype` is. Of a sharded weight every rank gathers the momentum and
    orthogonalises the whole of it, which costs an all-gather of the weight's size and needs no other exchange.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        weight_decay: float,
        momentum: float,
        nesterov: bool,
        ns_steps: int,
        ns_coefficients: tuple[float, float, float],
        ns_dtype: NewtonSchulzDtype,
        eps: float,
        scale: Scale,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            ns_steps=ns_steps,
            ns_coefficients=ns_coefficients,
            ns_dtype=ns_dtype,
            eps=eps,
            scale=scale,
        )

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        assert parameter.grad is not None, "the step passes over parameters without gradient"
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        weight, grad, momentum = local(parameter), local(parameter.grad), local(state["momentum"])
        momentum.lerp_(grad, 1.0 - group["momentum"])
        update = grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        moved = shard_like(self._orthogonal(gather_like(update, parameter), group), parameter)
        weight.mul_(1.0 - group["lr"] * group["weight_decay"]).add_(moved, alpha=-group["lr"])

    @staticmethod
    def _orthogonal(update: Tensor, group: dict[str, Any]) -> Tensor:
        dtype = update.dtype if update.dtype == torch.float64 else _DTYPES[group["ns_dtype"]]
        moved = torch.empty_like(update)
        for rows in matrix_rows(update, group["row_groups"]):
            part = update[..., rows.start : rows.stop, :]
            direction = newton_schulz(
                part.to(dtype), steps=group["ns_steps"], coefficients=group["ns_coefficients"], eps=group["eps"]
            )
            scale = update_scale(group["scale"], rows.rows, update.shape[-1])
            moved[..., rows.start : rows.stop, :] = direction.to(update.dtype) * scale
        return moved


class MuonAdamW(CompositeOptimizer):
    """Muon on hidden matrices, AdamW on embeddings, head, adapters, routers, norms, biases and scalars.

    The matrices of a fused weight (q, k and v; gate and up) are orthogonalised and scaled one by one, as if they were
    parameters of their own. :class:`~astrai_train.config.MuonAdamWConfig` describes the options.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float,
        weight_decay: float,
        muon_momentum: float,
        muon_nesterov: bool,
        muon_ns_steps: int,
        muon_ns_coefficients: tuple[float, float, float],
        muon_ns_dtype: NewtonSchulzDtype,
        muon_eps: float,
        muon_scale: Scale,
        adamw_lr: float | None,
        adamw_betas: tuple[float, float],
        adamw_eps: float,
        adamw_weight_decay: float,
    ) -> None:
        matrices, others = split_matrices(model, "muon_adamw")
        parts: dict[str, optim.Optimizer] = {
            "muon": Muon(
                matrix_groups(matrices),
                lr=lr,
                weight_decay=weight_decay,
                momentum=muon_momentum,
                nesterov=muon_nesterov,
                ns_steps=muon_ns_steps,
                ns_coefficients=muon_ns_coefficients,
                ns_dtype=muon_ns_dtype,
                eps=muon_eps,
                scale=muon_scale,
            )
        }
        if others:
            companion_lr = lr if adamw_lr is None else adamw_lr
            groups = decay_groups(others, adamw_weight_decay)
            parts["adamw"] = fused_adamw(groups, lr=companion_lr, betas=adamw_betas, eps=adamw_eps)
        super().__init__(parts)
