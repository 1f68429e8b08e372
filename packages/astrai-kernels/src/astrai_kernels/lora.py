"""LoRA (Hu et al. 2021, arXiv:2106.09685) for a batch whose rows have adapters of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _checks as checks
from ._library import refuse_grad, register
from ._loader import extension

MOST_RANK = 64

_OCTET = 8


def _check_rank(op: str, name: str, rank: int) -> None:
    if not (_OCTET <= rank <= MOST_RANK and rank % _OCTET == 0):
        raise ValueError(
            f"{op}: {name} has rank {rank}, expected a multiple of {_OCTET} up to {MOST_RANK}; pad smaller ranks with zeros"
        )


def _check_ids(op: str, adapter_ids: Tensor, rows: int, device: torch.device) -> None:
    checks.check_device(op, "adapter_ids", adapter_ids, device)
    checks.check_dtype(op, "adapter_ids", adapter_ids, torch.int32, torch.int64)
    checks.check_shape(op, "adapter_ids", adapter_ids, (rows,), "one for each row")


def _check_aligned(op: str, name: str, tensor: Tensor) -> None:
    """Check that rows start at multiples of 16 bytes: the kernels' loads have that size."""
    strides = [tensor.stride(i) for i in range(tensor.dim() - 1) if tensor.shape[i] > 1]
    if tensor.numel() and (tensor.data_ptr() % 16 or any(stride % _OCTET for stride in strides)):
        raise ValueError(
            f"{op}: {name} starts at {tensor.data_ptr():#x} with strides {tuple(tensor.stride())}, expected rows at "
            f"multiples of 16 bytes and of {_OCTET} elements; nothing is copied silently"
        )


def _stride(tensor: Tensor, dim: int) -> int:
    """Return the stride of a dimension, or 0 where it has one index: torch leaves that stride open."""
    return tensor.stride(dim) if tensor.shape[dim] > 1 else 0


def _check_shrink(x: Tensor, a: Tensor, adapter_ids: Tensor) -> tuple[int, int]:
    """Check the inputs and return the output's shape."""
    op = "lora_shrink"
    checks.check_device(op, "x", x)
    checks.check_dtype(op, "x", x, torch.float16, torch.bfloat16)
    if x.dim() != 2 or x.shape[1] < _OCTET or x.shape[1] % _OCTET:
        raise ValueError(
            f"{op}: x has shape {tuple(x.shape)}, expected [rows, in_features] with in_features a multiple of {_OCTET}"
        )
    checks.check_last_dim(op, "x", x)
    checks.check_device(op, "a", a, x.device)
    checks.check_dtype(op, "a", a, x.dtype)
    if a.dim() != 3 or a.shape[2] != x.shape[1]:
        raise ValueError(
            f"{op}: a has shape {tuple(a.shape)}, expected [adapters, rank, in_features] with in_features {x.shape[1]}"
        )
    _check_rank(op, "a", a.shape[1])
    checks.check_last_dim(op, "a", a)
    _check_ids(op, adapter_ids, x.shape[0], x.device)
    return x.shape[0], a.shape[1]


def _launch_shrink(x: Tensor, a: Tensor, adapter_ids: Tensor, out: Tensor) -> None:
    if x.shape[0] == 0:
        return
    _check_aligned("lora_shrink", "x", x)
    _check_aligned("lora_shrink", "a", a)
    extension().lora_shrink(
        checks.DTYPE_NUMBERS[x.dtype],
        x.device.index,
        torch.cuda.current_stream(x.device).cuda_stream,
        (x.data_ptr(), _stride(x, 0)),
        (a.data_ptr(), _stride(a, 0), _stride(a, 1)),
        (adapter_ids.data_ptr(), adapter_ids.stride(0), adapter_ids.dtype == torch.int64, a.shape[0]),
        (out.data_ptr(), out.stride(0)),
        x.shape[0],
        a.shape[1],
        x.shape[1],
    )


def _shrink_fake(x: Tensor, a: Tensor, adapter_ids: Tensor) -> Tensor:
    return torch.empty(_check_shrink(x, a, adapter_ids), dtype=torch.float32, device=x.device)


def _shrink(x: Tensor, a: Tensor, adapter_ids: Tensor) -> Tensor:
    out = _shrink_fake(x, a, adapter_ids)
    _launch_shrink(x, a, adapter_ids, out)
    return out


def _shrink_out_fake(x: Tensor, a: Tensor, adapter_ids: Tensor, out: Tensor) -> None:
    shape = _check_shrink(x, a, adapter_ids)
    checks.check_device("lora_shrink", "out", out, x.device)
    checks.check_dtype("lora_shrink", "out", out, torch.float32)
    checks.check_shape("lora_shrink", "out", out, shape, "rows of x, rank of a")
    checks.check_last_dim("lora_shrink", "out", out)
    checks.check_distinct("lora_shrink", "out", out)


def _shrink_out(x: Tensor, a: Tensor, adapter_ids: Tensor, out: Tensor) -> None:
    _shrink_out_fake(x, a, adapter_ids, out)
    _launch_shrink(x, a, adapter_ids, out)


def _check_expand(base: Tensor, hidden: Tensor, b: Tensor, adapter_ids: Tensor, scaling: Tensor) -> None:
    op = "lora_expand"
    checks.check_device(op, "base", base)
    checks.check_dtype(op, "base", base, torch.float16, torch.bfloat16)
    if base.dim() != 2:
        raise ValueError(f"{op}: base has shape {tuple(base.shape)}, expected [rows, out_features]")
    checks.check_last_dim(op, "base", base)
    checks.check_device(op, "b", b, base.device)
    checks.check_dtype(op, "b", b, base.dtype)
    if b.dim() != 3 or b.shape[1] != base.shape[1]:
        raise ValueError(
            f"{op}: b has shape {tuple(b.shape)}, expected [adapters, out_features, rank] with out_features "
            f"{base.shape[1]}"
        )
    _check_rank(op, "b", b.shape[2])
    checks.check_last_dim(op, "b", b)
    checks.check_device(op, "hidden", hidden, base.device)
    checks.check_dtype(op, "hidden", hidden, torch.float32)
    checks.check_shape(op, "hidden", hidden, (base.shape[0], b.shape[2]), "rows of base, rank of b")
    checks.check_last_dim(op, "hidden", hidden)
    checks.check_device(op, "scaling", scaling, base.device)
    checks.check_dtype(op, "scaling", scaling, torch.float32)
    checks.check_shape(op, "scaling", scaling, (b.shape[0],), "one for each adapter of b")
    checks.check_last_dim(op, "scaling", scaling)
    _check_ids(op, adapter_ids, base.shape[0], base.device)


def _launch_expand(base: Tensor, hidden: Tensor, b: Tensor, adapter_ids: Tensor, scaling: Tensor, out: Tensor) -> None:
    if base.numel() == 0:
        return
    _check_aligned("lora_expand", "b", b)
    extension().lora_expand(
        checks.DTYPE_NUMBERS[base.dtype],
        base.device.index,
        torch.cuda.current_stream(base.device).cuda_stream,
        (base.data_ptr(), base.stride(0)),
        (hidden.data_ptr(), hidden.stride(0)),
        (b.data_ptr(), _stride(b, 0), _stride(b, 1)),
        (adapter_ids.data_ptr(), adapter_ids.stride(0), adapter_ids.dtype == torch.int64, b.shape[0]),
        scaling.data_ptr(),
        (out.data_ptr(), out.stride(0)),
        base.shape[0],
        b.shape[2],
        base.shape[1],
    )


def _expand_fake(base: Tensor, hidden: Tensor, b: Tensor, adapter_ids: Tensor, scaling: Tensor) -> Tensor:
    _check_expand(base, hidden, b, adapter_ids, scaling)
    return torch.empty(base.shape, dtype=base.dtype, device=base.device)


def _expand(base: Tensor, hidden: Tensor, b: Tensor, adapter_ids: Tensor, scaling: Tensor) -> Tensor:
    out = _expand_fake(base, hidden, b, adapter_ids, scaling)
    _launch_expand(base, hidden, b, adapter_ids, scaling, out)
    return out


def _expand_out_fake(
    base: Tensor, hidden: Tensor, b: Tensor, adapter_ids: Tensor, scaling: Tensor, out: Tensor
) -> None:
    _check_expand(base, hidden, b, adapter_ids, scaling)
    checks.check_output("lora_expand", "out", out, "base", base)


def _expand_out(base: Tensor, hidden: Tensor, b: Tensor, adapter_ids: Tensor, scaling: Tensor, out: Tensor) -> None:
    _expand_out_fake(base, hidden, b, adapter_ids, scaling, out)
    checks.check_in_place("lora_expand", "out", out, "base", base)
    _launch_expand(base, hidden, b, adapter_ids, scaling, out)


_SHRINK = "Tensor x, Tensor a, Tensor adapter_ids"
_EXPAND = "Tensor base, Tensor hidden, Tensor b, Tensor adapter_ids, Tensor scaling"
_shrink_op = register(f"lora_shrink({_SHRINK}) -> Tensor", _shrink, _shrink_fake)
_shrink_out_op = register(f"lora_shrink_out({_SHRINK}, Tensor(a!) out) -> ()", _shrink_out, _shrink_out_fake)
_expand_op = register(f"lora_expand({_EXPAND}) -> Tensor", _expand, _expand_fake)
_expand_out_op = register(f"lora_expand_out({_EXPAND}, Tensor(a!) out) -> ()", _expand_out, _expand_out_fake)


def lora_shrink(x: Tensor, a: Tensor, adapter_ids: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Multiply each row by the first matrix of its adapter, ``x[row] @ a[adapter_ids[row]].T``, in one launch for all.

    fp32 accumulation, no rounding. A row's bits depend on that row and its adapter alone.

    Parameters
    ----------
    x : Tensor
        ``[rows, in_features]``, float16 or bfloat16, on a CUDA device; in_features a multiple of 8, rows at multiples of
        16 bytes.
    a : Tensor
        ``[adapters, rank, in_features]``, of x's type, rows at multiples of 16 bytes; rank a multiple of 8 up to 64.
        Adapters of smaller ranks are padded with rows of zeros.
    adapter_ids : Tensor
        ``[rows]`` int32 or int64, read on the device: the adapter of each row. Negative: none, the row becomes zeros.
        An index that ``a`` does not have makes the row NaN.
    out : Tensor, optional
        Where to write, ``[rows, rank]`` float32.

    Returns
    -------
    Tensor
        ``out``, or a new tensor.

    Raises
    ------
    ValueError, TypeError
        Naming the argument whose device, shape, strides, alignment or type is not accepted.
    RuntimeError
        If an input requires a gradient while gradients are enabled, or CUDA refuses the launch.
    ImportError
        If the compiled module is missing.
    """
    refuse_grad("lora_shrink", x=x, a=a, out=out)
    if out is None:
        result: Tensor = _shrink_op(x, a, adapter_ids)
        return result
    _shrink_out_op(x, a, adapter_ids, out)
    return out


def lora_expand(
    base: Tensor, hidden: Tensor, b: Tensor, adapter_ids: Tensor, scaling: Tensor, *, out: Tensor | None = None
) -> Tensor:
    """Add each row's adapter to a projection: ``base[row] + scaling[i] * (b[i] @ hidden[row])``, i = adapter_ids[row].

    fp32 arithmetic and one rounding. A row's bits depend on that row and its adapter alone.

    Parameters
    ----------
    base : Tensor
        ``[rows, out_features]``, float16 or bfloat16, on a CUDA device: the projection's own output, or some of its
        columns where the parts of a fused projection have adapters of their own.
    hidden : Tensor
        ``[rows, rank]`` float32: what :func:`lora_shrink` wrote.
    b : Tensor
        ``[adapters, out_features, rank]``, of base's type, rows at multiples of 16 bytes; rank a multiple of 8 up to 64.
        Adapters of smaller ranks are padded with columns of zeros.
    adapter_ids : Tensor
        ``[rows]`` int32 or int64, read on the device. Negative: none, the row is that of ``base``. An index that ``b``
        does not have makes the row NaN.
    scaling : Tensor
        ``[adapters]`` float32: alpha / rank of each adapter.
    out : Tensor, optional
        Where to write, ``[rows, out_features]``; may be ``base`` itself.

    Returns
    -------
    Tensor
        ``out``, or a new contiguous tensor.

    Raises
    ------
    ValueError, TypeError
        Naming the argument whose device, shape, strides, alignment or type is not accepted.
    RuntimeError
        If an input requires a gradient while gradients are enabled, or CUDA refuses the launch.
    ImportError
        If the compiled module is missing.
    """
    refuse_grad("lora_expand", base=base, hidden=hidden, b=b, scaling=scaling, out=out)
    if out is None:
        result: Tensor = _expand_op(base, hidden, b, adapter_ids, scaling)
        return result
    _expand_out_op(base, hidden, b, adapter_ids, scaling, out)
    return out
