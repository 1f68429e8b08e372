"""Gated activations and the embedding gather."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _checks as checks
from ._library import refuse_grad, register
from ._loader import extension

# Numbers of csrc/include/astrai/fused/params.h.
_KIND_NUMBERS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}


def _check_gated(op: str, x: Tensor, kind: str) -> tuple[int, ...]:
    """Check the inputs and return the output's shape."""
    checks.check_device(op, "x", x)
    checks.check_float(op, "x", x)
    if kind not in _KIND_NUMBERS:
        raise ValueError(f"{op}: kind is {kind!r}, expected one of {', '.join(_KIND_NUMBERS)}")
    if x.dim() < 1 or x.shape[-1] < 2 or x.shape[-1] % 2:
        raise ValueError(f"{op}: x has shape {tuple(x.shape)}, expected [..., 2 * width] with width of at least 1")
    checks.check_last_dim(op, "x", x)
    return (*x.shape[:-1], x.shape[-1] // 2)


def _launch_gated(x: Tensor, kind: str, out: Tensor) -> None:
    width = out.shape[-1]
    if out.numel() == 0:
        return
    if x.is_contiguous() and out.is_contiguous():
        rows, inner, x_strides, out_strides = out.numel() // width, 1, (2 * width, 0), (width, 0)
    else:
        rows, inner, (x_strides, out_strides) = checks.row_strides("gated_activation", x=x[..., :width], out=out)
    extension().gated_activation(
        checks.DTYPE_NUMBERS[x.dtype],
        _KIND_NUMBERS[kind],
        x.device.index,
        torch.cuda.current_stream(x.device).cuda_stream,
        (x.data_ptr(), *x_strides),
        (out.data_ptr(), *out_strides),
        rows,
        inner,
        width,
    )


def _gated_activation_fake(x: Tensor, kind: str) -> Tensor:
    return torch.empty(_check_gated("gated_activation", x, kind), dtype=x.dtype, device=x.device)


def _gated_activation(x: Tensor, kind: str) -> Tensor:
    out = _gated_activation_fake(x, kind)
    _launch_gated(x, kind, out)
    return out


def _gated_activation_out_fake(x: Tensor, kind: str, out: Tensor) -> None:
    shape = _check_gated("gated_activation", x, kind)
    checks.check_shape("gated_activation", "out", out, shape, "that of x, with half the last dimension")
    checks.check_output("gated_activation", "out", out, "x", x[..., : shape[-1]])


def _gated_activation_out(x: Tensor, kind: str, out: Tensor) -> None:
    _gated_activation_out_fake(x, kind, out)
    if out.numel() > 0 and out.data_ptr() == x.data_ptr():
        raise ValueError("gated_activation: out starts where x does, expected memory that does not overlap x")
    _launch_gated(x, kind, out)


def check_embedding(op: str, ids: Tensor, table: Tensor) -> None:
    checks.check_device(op, "table", table)
    checks.check_float(op, "table", table)
    if table.dim() != 2 or table.shape[1] < 1:
        raise ValueError(f"{op}: table has shape {tuple(table.shape)}, expected [vocab, hidden]")
    checks.check_last_dim(op, "table", table)
    checks.check_device(op, "ids", ids, table.device)
    checks.check_dtype(op, "ids", ids, torch.int32, torch.int64)
    if ids.dim() != 1:
        raise ValueError(f"{op}: ids has shape {tuple(ids.shape)}, expected [tokens]")


def launch_embedding(
    ids: Tensor, table: Tensor, out: Tensor, following: tuple[Tensor, Tensor, Tensor] | None = None
) -> None:
    """``following``, weight, rows and squares of the norm behind, is of ``normed_projection.py``."""
    if ids.shape[0] == 0:
        return
    extension().embedding(
        checks.DTYPE_NUMBERS[table.dtype],
        table.device.index,
        torch.cuda.current_stream(table.device).cuda_stream,
        (ids.data_ptr(), ids.stride(0)),
        ids.dtype == torch.int64,
        (table.data_ptr(), table.stride(0)),
        (out.data_ptr(), out.stride(0)),
        (0, 0, 0) if following is None else tuple(tensor.data_ptr() for tensor in following),
        ids.shape[0],
        table.shape[0],
        table.shape[1],
    )


def _embedding_fake(ids: Tensor, table: Tensor) -> Tensor:
    check_embedding("embedding", ids, table)
    return torch.empty((ids.shape[0], table.shape[1]), dtype=table.dtype, device=table.device)


def _embedding(ids: Tensor, table: Tensor) -> Tensor:
    out = _embedding_fake(ids, table)
    launch_embedding(ids, table, out)
    return out


def _embedding_out_fake(ids: Tensor, table: Tensor, out: Tensor) -> None:
    check_embedding("embedding", ids, table)
    checks.check_shape("embedding", "out", out, (ids.shape[0], table.shape[1]), "tokens of ids, hidden of table")
    checks.check_output("embedding", "out", out, "table", table[:1].expand(ids.shape[0], -1))


def _embedding_out(ids: Tensor, table: Tensor, out: Tensor) -> None:
    _embedding_out_fake(ids, table, out)
    launch_embedding(ids, table, out)


_gated_activation_op = register(
    "gated_activation(Tensor x, str kind) -> Tensor", _gated_activation, _gated_activation_fake
)
_gated_activation_out_op = register(
    "gated_activation_out(Tensor x, str kind, Tensor(a!) out) -> ()", _gated_activation_out, _gated_activation_out_fake
)
_embedding_op = register("embedding(Tensor ids, Tensor table) -> Tensor", _embedding, _embedding_fake)
_embedding_out_op = register(
    "embedding_out(Tensor ids, Tensor table, Tensor(a!) out) -> ()", _embedding_out, _embedding_out_fake
)


def gated_activation(x: Tensor, kind: str = "silu", *, out: Tensor | None = None) -> Tensor:
    """Activate the first half of each row and multiply it by the second (Shazeer 2020, arXiv:2002.05202).

    ``act(x[..., :width]) * x[..., width:]``, rounded to ``x.dtype`` after the activation and after the product, as in
    Hugging Face's MLPs; fp32 in between.

    Parameters
    ----------
    x : Tensor
        ``[..., 2 * width]``, float32, float16 or bfloat16, on a CUDA device: the output of a fused gate and up
        projection, gates first. The last dimension contiguous, the leading ones describable by two strides.
    kind : {"silu", "gelu_tanh", "gelu"}
        SwiGLU; GeGLU by the tanh approximation (``gelu_pytorch_tanh``) or by erf.
    out : Tensor, optional
        ``[..., width]`` of x's type; memory that does not overlap x.

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
    refuse_grad("gated_activation", x=x, out=out)
    if out is None:
        result: Tensor = _gated_activation_op(x, kind)
        return result
    _gated_activation_out_op(x, kind, out)
    return out


def embedding(ids: Tensor, table: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Gather rows of a table.

    Parameters
    ----------
    ids : Tensor
        ``[tokens]`` int32 or int64. An id outside the table gives a row of NaN: the device cannot raise, and a made-up
        row would go unnoticed.
    table : Tensor
        ``[vocab, hidden]``, float32, float16 or bfloat16, on a CUDA device, last dimension contiguous.
    out : Tensor, optional
        ``[tokens, hidden]`` of the table's type; memory that does not overlap the inputs.

    Returns
    -------
    Tensor
        ``out``, or a new contiguous tensor.

    Raises
    ------
    ValueError, TypeError, RuntimeError, ImportError
        As :func:`gated_activation`.
    """
    refuse_grad("embedding", table=table, out=out)
    if out is None:
        result: Tensor = _embedding_op(ids, table)
        return result
    _embedding_out_op(ids, table, out)
    return out
