"""Nora on hidden matrices, NAdamW on the rest (arXiv 2605.03769)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from astrai_train.optim.composite import CompositeOptimizer
from astrai_train.optim.groups import decay_groups, matrix_groups, split_matrices
from astrai_train.optim.matrix import HALF, MatrixOptimizer, local, matrix_rows, per_row, require_row_shards


def row_tangent(update: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Project each row of an update off the same row of the weight and normalise what is left.

    `eps` is the smallest norm to divide by: a zero row of the weight projects nothing, a row without tangent has the
    direction 0.
    """
    unit = weight / torch.linalg.vector_norm(weight, dim=-1, keepdim=True).clamp(min=eps)
    tangent = update - (update * unit).sum(-1, keepdim=True) * unit
    return tangent / torch.linalg.vector_norm(tangent, dim=-1, keepdim=True).clamp(min=eps)


class Nora(MatrixOptimizer):
    """Nesterov step along a moving average of the gradient, row by row orthogonal to the weight and normalised.

    The step is scaled by ``sqrt(max(1, m / n))`` of the matrix ``[m, n]``. bfloat16 and float16 weights have a float32
    copy in the state, which is what moves; it is drawn from the weight at the first step. Nothing is summed over rows,
    so weights sharded by rows need no exchange; any other shard is refused.
    """

    def __init__(
        self, params: Iterable[Any], *, lr: float, weight_decay: float, beta: float, momentum: float, eps: float
    ) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay, beta=beta, momentum=momentum, eps=eps)

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        assert parameter.grad is not None, "the step passes over parameters without gradient"
        state = self.state[parameter]
        half = parameter.dtype in HALF
        if not state:
            state["average"] = torch.zeros_like(parameter, dtype=torch.float32 if half else None)
            if half:
                state["master"] = parameter.detach().float()
        weight, average = local(state["master"] if half else parameter), local(state["average"])
        grad = local(parameter.grad).to(average.dtype)
        average.lerp_(grad, 1.0 - group["beta"])
        direction = row_tangent(grad.lerp(average, group["momentum"]), weight, group["eps"])
        n = parameter.shape[-1]
        rows = matrix_rows(parameter, group["row_groups"])
        scale = per_row(rows, lambda m: math.sqrt(max(1.0, m / n)), direction)
        weight.mul_(1.0 - group["lr"] * group["weight_decay"]).sub_(direction * scale, alpha=group["lr"])
        if half:
            local(parameter).copy_(weight)

    def _check(self, name: str, parameter: nn.Parameter, row_groups: tuple[int, ...]) -> None:
        super()._check(name, parameter, row_groups)
        require_row_shards("nora_nadamw", name, parameter)


class NAdamW(Optimizer):
    """AdamW with a Nesterov first moment, in the simple form of timm and MLCommons' algorithmic-efficiency.

    ``m_hat = (b1 m_t + (1 - b1) g_t) / (1 - b1^t)``; all else is AdamW. (torch's NAdam follows Dozat's momentum
    schedule instead.)
    """

    def __init__(
        self, params: Iterable[Any], *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; run `closure` first, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        assert parameter.grad is not None, "the step passes over parameters without gradient"
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        step = int(state["step"])
        beta1, beta2 = group["betas"]
        weight, grad = local(parameter), local(parameter.grad)
        first, second = local(state["exp_avg"]), local(state["exp_avg_sq"])
        first.lerp_(grad, 1.0 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
        ahead = first.lerp(grad, 1.0 - beta1)
        spread = second.sqrt().div_(math.sqrt(1.0 - beta2**step)).add_(group["eps"])
        weight.mul_(1.0 - group["lr"] * group["weight_decay"])
        weight.addcdiv_(ahead, spread, value=-group["lr"] / (1.0 - beta1**step))


class NoraNAdamW(CompositeOptimizer):
    """Nora on hidden matrices, NAdamW on embeddings, head, adapters, routers, norms, biases and scalars.

    The matrices of a fused weight (q, k and v; gate and up) have scales of their own.
    :class:`~astrai_train.config.NoraNAdamWConfig` describes the options.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float,
        weight_decay: float,
        nora_beta: float,
        nora_momentum: float,
        nora_eps: float,
        nadamw_lr: float | None,
        nadamw_betas: tuple[float, float],
        nadamw_eps: float,
        nadamw_weight_decay: float,
    ) -> None:
        matrices, others = split_matrices(model, "nora_nadamw")
        parts: dict[str, Optimizer] = {
            "nora": Nora(
                matrix_groups(matrices),
                lr=lr,
                weight_decay=weight_decay,
                beta=nora_beta,
                momentum=nora_momentum,
                eps=nora_eps,
            )
        }
        if others:
            companion_lr = lr if nadamw_lr is None else nadamw_lr
            groups = decay_groups(others, nadamw_weight_decay)
            parts["nadamw"] = NAdamW(groups, lr=companion_lr, betas=nadamw_betas, eps=nadamw_eps)
        super().__init__(parts)
