"""RMSNorm, alone and behind a residual add."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import _checks as checks
from ._library import refuse_grad, register
from ._loader import extension


def _check(op: str, x: Tensor, weight: Tensor, eps: float, *others: tuple[str, Tensor]) -> None:
    """Check the inputs; ``others`` are further inputs of x's shape and type, by name."""
    checks.check_device(op, "x", x)
    checks.check_float(op, "x", x)
    if x.dim() < 1 or x.shape[-1] < 1:
        raise ValueError(f"{op}: x has shape {tuple(x.shape)}, expected [..., hidden] with hidden of at least 1")
    checks.check_last_dim(op, "x", x)
    for name, tensor in others:
        checks.check_device(op, name, tensor, x.device)
        checks.check_dtype(op, name, tensor, x.dtype)
        checks.check_shape(op, name, tensor, tuple(x.shape), "that of x")
        checks.check_last_dim(op, name, tensor)
    checks.check_device(op, "weight", weight, x.device)
    checks.check_dtype(op, "weight", weight, x.dtype)
    checks.check_shape(op, "weight", weight, (x.shape[-1],), "the last dimension of x")
    checks.check_last_dim(op, "weight", weight)
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"{op}: eps is {eps}, expected a finite number of at least 0")


def _launch_rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    rows, inner, (x_strides, out_strides) = checks.row_strides("rms_norm", x=x, out=out)
    if rows == 0:
        return
    extension().rms_norm(
        checks.DTYPE_NUMBERS[x.dtype],
        x.device.index,
        torch.cuda.current_stream(x.device).cuda_stream,
        (x.data_ptr(), *x_strides),
        weight.data_ptr(),
        (out.data_ptr(), *out_strides),
        rows,
        inner,
        x.shape[-1],
        eps,
    )


def _launch_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor, residual_out: Tensor, overlap: bool
) -> None:
    rows, inner, strides = checks.row_strides(
        "add_rms_norm", x=x, residual=residual, out=out, residual_out=residual_out
    )
    if rows == 0:
        return
    extension().add_rms_norm(
        checks.DTYPE_NUMBERS[x.dtype],
        x.device.index,
        torch.cuda.current_stream(x.device).cuda_stream,
        (x.data_ptr(), *strides[0]),
        (residual.data_ptr(), *strides[1]),
        weight.data_ptr(),
        (out.data_ptr(), *strides[2]),
        (residual_out.data_ptr(), *strides[3]),
        rows,
        inner,
        x.shape[-1],
        eps,
        overlap,
    )


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    _check("rms_norm", x, weight, eps)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_rms_norm(x, weight, eps, out)
    return out


def _rms_norm_fake(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    _check("rms_norm", x, weight, eps)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _rms_norm_out_fake(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    _check("rms_norm", x, weight, eps)
    checks.check_output("rms_norm", "out", out, "x", x)


def _rms_norm_out(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    _rms_norm_out_fake(x, weight, eps, out)
    checks.check_in_place("rms_norm", "out", out, "x", x)
    _launch_rms_norm(x, weight, eps, out)


def _add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, overlap: bool = False
) -> tuple[Tensor, Tensor]:
    out, residual_out = _add_rms_norm_fake(x, residual, weight, eps)
    _launch_add_rms_norm(x, residual, weight, eps, out, residual_out, overlap)
    return out, residual_out


def _add_rms_norm_fake(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, overlap: bool = False
) -> tuple[Tensor, Tensor]:
    _check("add_rms_norm", x, weight, eps, ("residual", residual))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return out, torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _add_rms_norm_out_fake(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor, residual_out: Tensor, overlap: bool = False
) -> None:
    _check("add_rms_norm", x, weight, eps, ("residual", residual))
    checks.check_output("add_rms_norm", "out", out, "x", x)
    checks.check_output("add_rms_norm", "residual_out", residual_out, "x", x)


def _add_rms_norm_out(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor, residual_out: Tensor, overlap: bool = False
) -> None:
    _add_rms_norm_out_fake(x, residual, weight, eps, out, residual_out)
    if out.numel() > 0 and out.data_ptr() == residual_out.data_ptr():
        raise ValueError("add_rms_norm: out and residual_out are the same memory, expected two tensors")
    for name, target in (("out", out), ("residual_out", residual_out)):
        checks.check_in_place("add_rms_norm", name, target, "x", x)
        checks.check_in_place("add_rms_norm", name, target, "residual", residual)
    _launch_add_rms_norm(x, residual, weight, eps, out, residual_out, overlap)


_rms_norm_op = register("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", _rms_norm, _rms_norm_fake)
_rms_norm_out_op = register(
    "rms_norm_out(Tensor x, Tensor weight, float eps, Tensor(a!) out) -> ()", _rms_norm_out, _rms_norm_out_fake
)
_add_rms_norm_op = register(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, bool overlap=False) -> (Tensor, Tensor)",
    _add_rms_norm,
    _add_rms_norm_fake,
)
_add_rms_norm_out_op = register(
    "add_rms_norm_out(Tensor x, Tensor residual, Tensor weight, float eps, Tensor(a!) out, Tensor(b!) residual_out, "
    "bool overlap=False) -> ()",
    _add_rms_norm_out,
    _add_rms_norm_out_fake,
)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, *, out: Tensor | None = None) -> Tensor:
    """Normalise each row by its root mean square and scale it (Zhang & Sennrich 2019, arXiv:1910.07467).

    Everything is fp32 but two roundings to ``x.dtype``: of the normalised row, and of its product with ``weight``, as
    in Hugging Face's LlamaRMSNorm. A row's bits depend on that row and the weight alone.

    Parameters
    ----------
    x : Tensor
        ``[..., hidden]``, float32, float16 or bfloat16, on a CUDA device; the last dimension contiguous, the leading
        ones describable by two strides (so the heads of a fused QKV projection can be normed in place).
    weight : Tensor
        ``[hidden]``, of x's type, contiguous.
    eps : float
        Added to the mean square.
    out : Tensor, optional
        Where to write, of x's shape and type; may be ``x`` itself.

    Returns
    -------
    Tensor
        ``out``, or a new contiguous tensor.

    Raises
    ------
    ValueError, TypeError
        Naming the argument whose device, shape, strides, value or type is not accepted.
    RuntimeError
        If an input requires a gradient while gradients are enabled, or CUDA refuses the launch.
    ImportError
        If the compiled module is missing.
    """
    refuse_grad("rms_norm", x=x, weight=weight, out=out)
    if out is None:
        result: Tensor = _rms_norm_op(x, weight, eps)
        return result
    _rms_norm_out_op(x, weight, eps, out)
    return out


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    out: tuple[Tensor, Tensor] | None = None,
    overlap: bool = False,
) -> tuple[Tensor, Tensor]:
    """Add the residual stream and normalise the sum, in one pass.

    ``new_residual = x + residual``, rounded to ``x.dtype``; ``normed = rms_norm(new_residual, weight, eps)``.

    Parameters
    ----------
    x, residual : Tensor
        ``[..., hidden]``, one shape and type, as :func:`rms_norm` takes x.
    weight : Tensor
        ``[hidden]``, of x's type, contiguous.
    eps : float
        Added to the mean square.
    out : (Tensor, Tensor), optional
        Where to write ``normed`` and ``new_residual``; each may be ``x`` or ``residual`` itself.
    overlap : bool
        The caller's word that `residual` was written before a kernel that has started since and is neither
        :func:`linear` nor a library's product: it is then read while the kernel directly ahead still runs
        (csrc/include/astrai/common/pdl.cuh).

    Returns
    -------
    normed, new_residual : Tensor
        ``out``, or new contiguous tensors.

    Raises
    ------
    ValueError, TypeError, RuntimeError, ImportError
        As :func:`rms_norm`.
    """
    if out is None:
        refuse_grad("add_rms_norm", x=x, residual=residual, weight=weight)
        normed, new_residual = _add_rms_norm_op(x, residual, weight, eps, overlap)
        return normed, new_residual
    normed, new_residual = out
    refuse_grad("add_rms_norm", x=x, residual=residual, weight=weight, out=normed, residual_out=new_residual)
    _add_rms_norm_out_op(x, residual, weight, eps, normed, new_residual, overlap)
    return normed, new_residual
