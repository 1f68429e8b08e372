"""RMSNorm behind a residual add whose other operand is a product in slices, not yet summed."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import _checks as checks
from ._library import refuse_grad, register
from ._loader import extension

_OP = "add_rms_norm_partials"
SLICES = (2, 4)
"""Numbers of slices that the kernel knows."""
MAX_HIDDEN = 8192


def _check(parts: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor, residual_out: Tensor) -> None:
    checks.check_device(_OP, "parts", parts)
    checks.check_dtype(_OP, "parts", parts, torch.float32)
    if parts.dim() != 3 or parts.shape[0] not in SLICES:
        raise ValueError(f"{_OP}: parts has shape {tuple(parts.shape)}, expected [2 or 4, rows, hidden]")
    hidden = parts.shape[-1]
    if hidden % 8 or not 8 <= hidden <= MAX_HIDDEN:
        raise ValueError(f"{_OP}: hidden is {hidden} by parts' shape, expected a multiple of 8 up to {MAX_HIDDEN}")
    checks.check_device(_OP, "residual", residual, parts.device)
    checks.check_dtype(_OP, "residual", residual, torch.float16, torch.bfloat16)
    checks.check_shape(_OP, "residual", residual, tuple(parts.shape[1:]), "rows and hidden of parts")
    checks.check_device(_OP, "weight", weight, parts.device)
    checks.check_dtype(_OP, "weight", weight, residual.dtype)
    checks.check_shape(_OP, "weight", weight, (hidden,), "the last dimension of parts")
    for name, tensor in (("parts", parts), ("residual", residual), ("weight", weight)):
        checks.check_last_dim(_OP, name, tensor)
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"{_OP}: eps is {eps}, expected a finite number of at least 0")
    for name, target in (("out", out), ("residual_out", residual_out)):
        checks.check_output(_OP, name, target, "residual", residual)
    for name, tensor in (("parts", parts), ("residual", residual), ("out", out), ("residual_out", residual_out)):
        elements = 16 // tensor.element_size()
        if any(tensor.stride(i) % elements for i in range(tensor.dim() - 1) if tensor.shape[i] > 1):
            raise ValueError(
                f"{_OP}: {name} has strides {tuple(tensor.stride())}, expected multiples of 16 bytes for its rows"
            )


def _fake(
    parts: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor, residual_out: Tensor, overlap: bool
) -> None:
    _check(parts, residual, weight, eps, out, residual_out)


def _kernel(
    parts: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor, residual_out: Tensor, overlap: bool
) -> None:
    _check(parts, residual, weight, eps, out, residual_out)
    if parts.numel() == 0:
        return
    if out.data_ptr() == residual_out.data_ptr():
        raise ValueError(f"{_OP}: out and residual_out are the same memory, expected two tensors")
    for name, target in (("out", out), ("residual_out", residual_out)):
        checks.check_in_place(_OP, name, target, "residual", residual)
    for name, tensor in (
        *(("parts", parts), ("residual", residual), ("weight", weight)),
        *(("out", out), ("residual_out", residual_out)),
    ):
        if tensor.data_ptr() % 16:
            raise ValueError(f"{_OP}: {name} starts {tensor.data_ptr() % 16} bytes past a multiple of 16, expected 0")
    extension().add_rms_norm_partials(
        checks.DTYPE_NUMBERS[residual.dtype],
        residual.device.index,
        torch.cuda.current_stream(residual.device).cuda_stream,
        (parts.data_ptr(), parts.stride(0), parts.stride(1)),
        (residual.data_ptr(), residual.stride(0)),
        weight.data_ptr(),
        (out.data_ptr(), out.stride(0)),
        (residual_out.data_ptr(), residual_out.stride(0)),
        parts.shape[1],
        parts.shape[2],
        parts.shape[0],
        eps,
        overlap,
    )


_op = register(
    f"{_OP}(Tensor parts, Tensor residual, Tensor weight, float eps, Tensor(a!) out, Tensor(b!) residual_out, "
    "bool overlap) -> ()",
    _kernel,
    _fake,
)


def add_rms_norm_partials(
    parts: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    out: tuple[Tensor, Tensor] | None = None,
    overlap: bool = False,
) -> tuple[Tensor, Tensor]:
    """Sum the slices of a product, add the residual stream and normalise, in one pass.

    The slices are added in fp32 in rising order and rounded once to residual's type; from there on the bits are those of
    :func:`add_rms_norm`. One thread block a row: for the few rows whose products need slices.

    Parameters
    ----------
    parts : Tensor
        ``[slices, rows, hidden]`` float32 on a CUDA device, slices 2 or 4, hidden a multiple of 8 up to 8,192; the last
        dimension contiguous, the others at multiples of 16 bytes.
    residual : Tensor
        ``[rows, hidden]``, float16 or bfloat16; rows at multiples of 16 bytes.
    weight : Tensor
        ``[hidden]``, of residual's type, contiguous.
    eps : float
        Added to the mean square.
    out : (Tensor, Tensor), optional
        Where to write ``normed`` and ``new_residual``; one of them may be ``residual`` itself.
    overlap : bool
        As :func:`add_rms_norm` takes it.

    Returns
    -------
    normed, new_residual : Tensor
        ``out``, or new contiguous tensors, of residual's shape and type.

    Raises
    ------
    ValueError, TypeError
        Naming the argument whose device, shape, strides, value or type is not accepted.
    RuntimeError
        If an input requires a gradient while gradients are enabled, or CUDA refuses the launch.
    ImportError
        If the compiled module is missing.
    """
    if out is None:
        out = (
            torch.empty(residual.shape, dtype=residual.dtype, device=residual.device),
            torch.empty(residual.shape, dtype=residual.dtype, device=residual.device),
        )
    normed, new_residual = out
    refuse_grad(_OP, parts=parts, residual=residual, weight=weight, out=normed, residual_out=new_residual)
    _op(parts, residual, weight, eps, normed, new_residual, overlap)
    return normed, new_residual
