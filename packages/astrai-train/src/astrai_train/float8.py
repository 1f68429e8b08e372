"""Products of the decoder blocks in float8: dynamic scales, one for each tensor (arXiv 2209.05433, section 3).

What is multiplied is rounded to e4m3 (activations and weights) or e5m2 (gradients, whose range is wider) after division
by its largest magnitude over the type's; products are added up in float32. Weights, their gradients, the optimizer and
the residual stream stay what they are.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from astrai_core.errors import ConfigError
from astrai_core.model.layers import Linear
from astrai_core.model.transformer import CausalLM

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
"""Types of activations and weights, and of gradients."""

MULTIPLE = 16
"""What every side of a float8 product is a multiple of (cuBLAS)."""

_ROUTERS = ("gate", "shared_expert_gate")

_SMALLEST = 1e-12
"""Taken for the largest magnitude of a tensor of zeros."""


def compute_in_float8(model: CausalLM) -> list[str]:
    """Let the projections of the decoder blocks compute in float8 wherever a gradient is recorded.

    Stacks of experts, routers, embedding and output projection keep computing in bfloat16. Evaluations do so throughout,
    as the exported model will.

    Returns
    -------
    Dotted names of the projections.

    Raises
    ------
    ConfigError
        If the device has no float8 products, or a projection's sides are no multiples of 16.
    """
    reason = unavailable(model.device)
    if reason is not None:
        raise ConfigError(f"field 'precision.fp8': {reason}; remove it")
    found = {
        f"model.layers.{name}": module
        for name, module in model.model.layers.named_modules()
        if isinstance(module, Linear) and name.rpartition(".")[2] not in _ROUTERS
    }
    for name, module in found.items():
        if module.out_features % MULTIPLE or module.in_features % MULTIPLE:
            raise ConfigError(
                f"field 'precision.fp8': {name} is {module.out_features} x {module.in_features}, and float8 products need "
                f"multiples of {MULTIPLE}; remove it"
            )
    for module in found.values():
        cls: Any = type(module)
        module.__class__ = _in_float8(cls)
    return list(found)


def unavailable(device: torch.device) -> str | None:
    """Say why float8 products cannot run on a device; None if they can.

    A CPU computes the same numbers as a GPU, by float32: for trying a recipe out.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        major, minor = torch.cuda.get_device_capability(device)
        return f"float8 products need compute capability 8.9, this GPU has {major}.{minor}"
    if device.type not in ("cuda", "cpu"):
        return f"float8 products run on CUDA devices and CPUs, not on {device.type}"
    zeros = torch.zeros(MULTIPLE, MULTIPLE, device=device).to(FORWARD)
    one = torch.ones((), device=device)
    try:
        torch._scaled_mm(zeros, zeros.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    except (NotImplementedError, RuntimeError) as error:
        return f"torch {torch.__version__} has no float8 product here ({str(error).splitlines()[0]})"
    return None


def scaled_linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T`` in float8, forward and backward.

    Parameters
    ----------
    x
        ``[..., in_features]``, bfloat16.
    weight
        ``[out_features, in_features]`` in any floating type, which its gradient has too.

    Returns
    -------
    ``[..., out_features]`` in the type of `x`.
    """
    rows = x.flatten(0, -2)
    n_rows = rows.shape[0]
    if n_rows % MULTIPLE:  # the weight's gradient sums over rows
        rows = F.pad(rows, (0, 0, 0, -n_rows % MULTIPLE))
    product: Tensor = _ScaledProduct.apply(rows, weight)
    # As F.linear does it: no view, of whose changes in place FSDP's hooks would warn.
    return torch.ops.aten._unsafe_view(product[:n_rows], [*x.shape[:-1], weight.shape[0]])


class _ScaledProduct(torch.autograd.Function):
    """``rows @ weight.T``; all three products take the left matrix by rows and the right one by columns."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        row_scale, weight_scale = _scale(rows, FORWARD), _scale(weight, FORWARD)
        narrow = _narrow(rows, row_scale, FORWARD)
        # The weight is rounded again in the backward pass: its float8 copy would stay as long as the activations.
        ctx.save_for_backward(narrow, row_scale, weight, weight_scale)
        ctx.dtype = rows.dtype
        right = _narrow(weight, weight_scale, FORWARD).t()
        return _product(narrow, right, row_scale, weight_scale, rows.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (grad,) = grad_outputs
        rows, row_scale, weight, weight_scale = ctx.saved_tensors
        scale = _scale(grad, BACKWARD)
        narrow = _narrow(grad, scale, BACKWARD)
        for_rows = for_weight = None
        if ctx.needs_input_grad[0]:
            right = _narrow(weight, weight_scale, FORWARD).t().contiguous().t()
            for_rows = _product(narrow, right, scale, weight_scale, ctx.dtype)
        if ctx.needs_input_grad[1]:
            left, right = narrow.t().contiguous(), rows.t().contiguous().t()
            for_weight = _product(left, right, scale, row_scale, weight.dtype)
        return for_rows, for_weight


def _scale(wide: Tensor, dtype: torch.dtype) -> Tensor:
    """The factor by which rounded values are multiplied, float32 without dimensions."""
    return wide.abs().amax().float().clamp(min=_SMALLEST) / torch.finfo(dtype).max


def _narrow(wide: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Round; a value that is not finite stays so, and makes the scale and all others NaN."""
    largest = torch.finfo(dtype).max
    return (wide.float() * scale.reciprocal()).clamp(-largest, largest).to(dtype)


def _product(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype, *, fast: bool = False
) -> Tensor:
    """Multiply; `fast` adds up in the tensor cores' own registers, with about 14 bits, as only activations bear."""
    return torch._scaled_mm(left, right, scale_a=left_scale, scale_b=right_scale, out_dtype=dtype, use_fast_accum=fast)


class _InFloat8(nn.Module):
    """Mixed into a projection's class, so that names and types stay (training rule 7)."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        """Project ``[..., in_features]`` to ``[..., out_features]``."""
        if not torch.is_grad_enabled():
            output: Tensor = super().forward(input)
            return output
        output = scaled_linear(input, self.weight)
        return output if self.bias is None else output + self.bias.to(output.dtype)


@functools.cache
def _in_float8(cls: Any) -> Any:
    return type(cls.__name__, (_InFloat8, cls), {"__module__": cls.__module__})
