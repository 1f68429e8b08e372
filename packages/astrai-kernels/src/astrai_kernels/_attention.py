"""What the attention ops share: argument checks, and how their operands are handed to the extension."""

from __future__ import annotations

import torch
from torch import Tensor

from ._checks import check_device, check_dtype, check_last_dim, check_output, check_shape

HEAD_DIMS = (64, 80, 96, 128, 192, 256)


def check_vector(op: str, name: str, tensor: Tensor) -> None:
    """Check for a contiguous vector."""
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{op}: {name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}, expected a contiguous [batch]"
        )


def check_operands(
    op: str, q: Tensor, k: Tensor, v: Tensor, batch: int | None, n_kv_heads: int, out: Tensor, lse: Tensor | None,
    table: Tensor | None, mask: Tensor | None, sinks: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None,
) -> None:  # fmt: skip
    """Check what decode and prefill share; `batch` is None for a paged cache."""
    tokens, n_heads, head_dim = q.shape
    check_dtype(op, "q", q, torch.float16, torch.bfloat16)
    narrow = k_scale is not None and v_scale is not None
    if not narrow and (k_scale is not None or v_scale is not None):
        raise ValueError(f"{op}: {'k_scale' if k_scale is None else 'v_scale'} is None, expected both scales or none")
    for name, tensor in (("k", k), ("v", v)):
        check_device(op, name, tensor, q.device)
        if tensor.dtype == torch.float8_e4m3fn and not narrow:
            raise ValueError(f"{op}: {name} has dtype {tensor.dtype} but k_scale and v_scale are None")
        check_dtype(op, name, tensor, torch.float8_e4m3fn if narrow else q.dtype)
        leading = (tensor.shape[0],) if batch is None else (batch, *tensor.shape[1:2])
        check_shape(op, name, tensor, (*leading, n_kv_heads, head_dim), "slots or batch and length, heads, head_dim")
    for name, scale, tensor in (("k_scale", k_scale, k), ("v_scale", v_scale, v)):
        if scale is not None:
            check_device(op, name, scale, q.device)
            check_dtype(op, name, scale, torch.float32)
            check_shape(op, name, scale, tuple(tensor.shape[:-1]), f"one per head of {name[0]}")
            check_last_dim(op, name, scale)
    check_output(op, "out", out, "q", q)
    for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out)):
        check_last_dim(op, name, tensor)
        unit = 16 // tensor.element_size()
        if tensor.numel() and any(stride % unit for stride in tensor.stride()[:-1]):
            raise ValueError(
                f"{op}: {name} has strides {tensor.stride()}, expected multiples of {unit} elements (16 bytes)"
            )
    for name, optional, dtype in (
        ("req_to_token", table, torch.int32),
        ("lse", lse, torch.float32),
        ("mask", mask, torch.bool),
        ("sinks", sinks, torch.float32),
    ):
        if optional is not None:
            check_device(op, name, optional, q.device)
            check_dtype(op, name, optional, dtype)
            check_last_dim(op, name, optional)
    if lse is not None:
        check_shape(op, "lse", lse, (tokens, n_heads), "a row per query and head")
        if not lse.is_contiguous():
            raise ValueError(f"{op}: lse has strides {lse.stride()}, expected a contiguous tensor")
    if sinks is not None:
        check_shape(op, "sinks", sinks, (n_heads,), "one per head")


def key_strides(tensor: Tensor) -> tuple[int, int, int, int]:
    """Address of a paged or contiguous buffer, and its slot, head and batch strides in elements."""
    if tensor.dim() == 3:
        return tensor.data_ptr(), tensor.stride(0), tensor.stride(1), 0
    return tensor.data_ptr(), tensor.stride(1), tensor.stride(2), tensor.stride(0)


def scale_strides(scale: Tensor | None) -> tuple[int, int, int]:
    """Address of the scales of a cache (0: none), and their slot and batch strides."""
    if scale is None:
        return 0, 0, 0
    return scale.data_ptr(), scale.stride(-2), scale.stride(0) if scale.dim() == 3 else 0
