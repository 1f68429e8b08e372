"""Argument checks shared by the ops. Each message names the argument, its value and what is accepted."""

from __future__ import annotations

import torch
from torch import Tensor

# Numbers of csrc/include/astrai/common/dtype.h.
DTYPE_NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def check_device(op: str, name: str, tensor: Tensor, expected: torch.device | None = None) -> None:
    """Check for a CUDA (or meta) tensor, on the device ``expected`` if that is given."""
    if expected is None:
        if tensor.device.type not in ("cuda", "meta"):
            raise ValueError(
                f"{op}: {name} is on {tensor.device}, expected a CUDA device; for others there is "
                f"astrai_kernels.reference.{op}"
            )
    elif tensor.device != expected:
        raise ValueError(f"{op}: {name} is on {tensor.device}, expected {expected} like the other tensors")


def check_float(op: str, name: str, tensor: Tensor) -> None:
    """Check that the kernels know the tensor's type."""
    if tensor.dtype not in DTYPE_NUMBERS:
        raise TypeError(f"{op}: {name} has dtype {tensor.dtype}, expected float32, float16 or bfloat16")


def check_dtype(op: str, name: str, tensor: Tensor, *accepted: torch.dtype) -> None:
    """Check the tensor's type against a list."""
    if tensor.dtype not in accepted:
        raise TypeError(f"{op}: {name} has dtype {tensor.dtype}, expected {' or '.join(map(str, accepted))}")


def check_shape(op: str, name: str, tensor: Tensor, expected: tuple[int, ...], meaning: str) -> None:
    """Check the tensor's shape; ``meaning`` says where the expected one comes from."""
    if tensor.shape != expected:
        raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}, expected {tuple(expected)} ({meaning})")


def check_last_dim(op: str, name: str, tensor: Tensor) -> None:
    """Check that the last dimension is contiguous."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(
            f"{op}: {name} has stride {tensor.stride(-1)} in its last dimension, expected 1 (contiguous); nothing is "
            "copied silently"
        )


def check_output(op: str, name: str, out: Tensor, like_name: str, like: Tensor) -> None:
    """Check an output's device, type, shape and strides against the input it belongs to."""
    check_device(op, name, out, like.device)
    check_dtype(op, name, out, like.dtype)
    check_shape(op, name, out, tuple(like.shape), f"that of {like_name}")
    check_last_dim(op, name, out)
    check_distinct(op, name, out)


def check_distinct(op: str, name: str, out: Tensor) -> None:
    """Check that an output's elements do not overlap."""
    if out.is_contiguous():
        return
    extent = 1
    for stride, size in sorted((out.stride(i), out.shape[i]) for i in range(out.dim()) if out.shape[i] > 1):
        if stride < extent:
            raise ValueError(
                f"{op}: {name} has strides {tuple(out.stride())} for shape {tuple(out.shape)}: its elements overlap, "
                "expected memory of its own for each"
            )
        extent = stride * size


def check_in_place(op: str, name: str, out: Tensor, like_name: str, like: Tensor) -> None:
    """Check that an output at its input's address has its strides too: each element must replace itself."""
    if out.numel() == 0 or out.data_ptr() != like.data_ptr():
        return
    if any(out.stride(i) != like.stride(i) for i in range(out.dim()) if out.shape[i] > 1):
        raise ValueError(
            f"{op}: {name} starts where {like_name} does but has strides {tuple(out.stride())}, expected "
            f"{tuple(like.stride())} (in place) or other memory"
        )


def row_strides(op: str, **tensors: Tensor) -> tuple[int, int, list[tuple[int, int]]]:
    """Read the leading dimensions of tensors of one shape as rows of an ``[outer, inner]`` grid.

    Returns
    -------
    rows : int
        Number of rows, the product of all dimensions but the last.
    inner : int
        Rows per outer index.
    strides : list of (int, int)
        Outer and inner stride of each tensor, in elements.

    Raises
    ------
    ValueError
        If some tensor needs more than two strides; no copy is made on the caller's behalf.
    """
    first = next(iter(tensors.values()))
    rows = first.numel() // first.shape[-1]
    if all(tensor.is_contiguous() for tensor in tensors.values()):
        return rows, 1, [(first.shape[-1], 0)] * len(tensors)
    # Merge each dimension into the one before it wherever that works in every tensor.
    sizes: list[int] = []
    strides: list[list[int]] = []
    for dim in range(first.dim() - 1):
        size = first.shape[dim]
        if size == 1:
            continue
        here = [tensor.stride(dim) for tensor in tensors.values()]
        if sizes and all(outer == inner * size for outer, inner in zip(strides[-1], here, strict=True)):
            sizes[-1] *= size
            strides[-1] = here
        else:
            sizes.append(size)
            strides.append(here)
    if len(sizes) > 2:
        name, tensor = next((n, t) for n, t in tensors.items() if not t.is_contiguous())
        raise ValueError(
            f"{op}: {name} has strides {tuple(tensor.stride())} for shape {tuple(tensor.shape)}: with the other "
            "tensors its leading dimensions need more than two strides, expected views that collapse to "
            "[outer, inner, hidden]"
        )
    while len(sizes) < 2:
        # A missing dimension is an inner one of size 1; with no dimension at all there is a single row.
        sizes.append(1)
        strides.append([0] * len(tensors))
    return rows, sizes[1], list(zip(strides[0], strides[1], strict=True))


def check_epilogue(bias: Tensor | None, residual: Tensor | None, activation: str | None) -> None:
    """Check that linear knows the activation, and that it comes alone."""
    if activation not in (None, "swiglu"):
        raise ValueError(f"linear: activation is {activation!r}, expected None or 'swiglu'")
    for name, tensor in (("bias", bias), ("residual", residual)):
        if activation is not None and tensor is not None:
            raise ValueError(f"linear: {name} is given with activation {activation!r}, expected None")
