"""Cross entropy through the output projection, a chunk of tokens at a time, its gradient made on the way.

The gradient of a summed cross entropy needs nothing from the backward pass but a factor, so a chunk's logits are turned
into its share of the gradient while they are there: three products a chunk instead of the four of recomputation, and at
most ``chunk_tokens * vocab`` logits in memory (the idea of Liger Kernel, arXiv 2410.10989, section 3.2).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from astrai_core.errors import ConfigError

Piece = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]


def summed_cross_entropy(
    hidden: Tensor,
    head: nn.Module,
    targets: Tensor,
    *,
    chunk_tokens: int,
    label_smoothing: float = 0.0,
    compiled: bool = False,
) -> Tensor:
    """Return the cross entropy of ``head(hidden)`` against `targets`, summed, without ever holding all logits.

    Logits are in the type of `hidden`; softmax, sums and the weight's gradient over chunks are in fp32.

    Parameters
    ----------
    hidden
        ``[n, hidden]``, the states that predict; n may be 0.
    head
        Output projection to ``[n, vocab]`` without bias or adapter; its weight must be whole (not a shard).
    targets
        ``[n]`` int64.
    chunk_tokens
        Tokens whose logits exist at once.
    label_smoothing
        Share of the target's probability that is spread evenly over the vocabulary (arXiv 1512.00567, section 7).
    compiled
        Compile the passes over the logits into one kernel each.

    Returns
    -------
    Scalar fp32.

    Raises
    ------
    ConfigError
        If the projection is more than a product with a weight.
    """
    if not isinstance(head, nn.Linear) or head.bias is not None or getattr(head, "adapter", None) is not None:
        raise ConfigError("the loss takes an output projection without bias and adapter; take lm_head out of lora")
    wants_gradient = torch.is_grad_enabled() and (hidden.requires_grad or head.weight.requires_grad)
    with torch.autocast(hidden.device.type, enabled=False):
        loss: Tensor = _LinearCrossEntropy.apply(
            hidden, head.weight, targets, chunk_tokens, label_smoothing, compiled, wants_gradient
        )
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        chunk_tokens: int,
        label_smoothing: float,
        compiled: bool,
        wants_gradient: bool,
    ) -> Tensor:
        table = weight.to(hidden.dtype)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for_hidden = torch.empty_like(hidden) if wants_gradient and ctx.needs_input_grad[0] else None
        for_weight: Tensor | None = None
        # Equal chunks: what is compiled for one size serves them all.
        n_chunks = max(1, -(-hidden.shape[0] // chunk_tokens))
        size = max(1, -(-hidden.shape[0] // n_chunks))
        start = 0
        for states, wanted in zip(hidden.split(size), targets.split(size), strict=True):
            stop = start + states.shape[0]
            # Sizes 0 and 1 are constants to the compiler, which would make a kernel for each.
            piece = _compiled_piece() if compiled and stop - start > 1 else loss_and_gradient
            loss, slope = piece(states @ table.T, wanted, label_smoothing)
            total += loss
            if for_hidden is not None:
                torch.mm(slope, table, out=for_hidden[start:stop])
            if wants_gradient and ctx.needs_input_grad[1]:
                for_weight = _add_product(for_weight, slope.T, states)
            start = stop
        ctx.save_for_backward(for_hidden, for_weight)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (factor,) = grad_outputs
        for_hidden, for_weight = ctx.saved_tensors
        return (
            None if for_hidden is None else for_hidden * factor.to(for_hidden.dtype),
            None if for_weight is None else _scaled(for_weight, factor, ctx.weight_dtype),
            *(None,) * 5,
        )


def _add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """Return ``total + left @ right`` in fp32; `total` is used up, None stands for zeros."""
    if total is None:
        return (left @ right).float()
    return total.addmm_(left, right) if left.dtype == total.dtype else total.add_(left @ right)


def _scaled(values: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply and round in one pass: a table of 100 M weights is 0.8 GB less to move."""
    return torch.mul(values, factor, out=torch.empty_like(values, dtype=dtype))


def loss_and_gradient(logits: Tensor, targets: Tensor, label_smoothing: float) -> tuple[Tensor, Tensor]:
    """Return the summed cross entropy of a chunk and its gradient with respect to the logits.

    Parameters
    ----------
    logits
        ``[n, vocab]``.
    targets
        ``[n]`` int64.

    Returns
    -------
    (scalar fp32, ``[n, vocab]`` in the logits' type)
    """
    logprobs = F.log_softmax(logits, -1, dtype=torch.float32)
    index = targets.unsqueeze(1)
    share = 1.0 - label_smoothing
    loss = -share * logprobs.gather(1, index).sum()
    slope = logprobs.exp()
    if label_smoothing:
        spread = label_smoothing / logits.shape[1]
        loss = loss - spread * logprobs.sum()
        slope = slope - spread
    if torch.compiler.is_compiling():
        # As a comparison it is part of the same kernel; a scatter would be one of its own, over memory.
        chosen = torch.arange(logits.shape[1], device=logits.device) == index
        slope = torch.where(chosen, slope - share, slope)
    else:
        slope.scatter_add_(1, index, torch.full_like(index, -share, dtype=slope.dtype))
    return loss, slope.to(logits.dtype)


@functools.cache
def _compiled_piece() -> Piece:
    return torch.compile(loss_and_gradient)
