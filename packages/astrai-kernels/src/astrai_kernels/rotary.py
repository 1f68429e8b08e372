"""Rotary position embedding of q and k in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _checks as checks
from ._library import refuse_grad, register
from ._loader import extension

_ABSENT = (0, 0, 0, 0, 0, 0, 0)


def _check(op: str, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, position_ids: Tensor) -> None:
    checks.check_device(op, "q", q)
    for name, tensor in (("q", q), ("k", k)):
        if tensor is None:
            continue
        checks.check_device(op, name, tensor, q.device)
        checks.check_float(op, name, tensor)
        if tensor.dim() != 3:
            raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}, expected [tokens, heads, head_dim]")
        checks.check_last_dim(op, name, tensor)
    if k is not None:
        checks.check_dtype(op, "k", k, q.dtype)
        checks.check_shape(op, "k", k, (q.shape[0], k.shape[1], q.shape[2]), "tokens and head_dim of q")
    for name, tensor in (("cos", cos), ("sin", sin)):
        checks.check_device(op, name, tensor, q.device)
        checks.check_dtype(op, name, tensor, torch.float32)
        if tensor.dim() != 2 or tensor.shape[0] < 1 or not 2 <= 2 * tensor.shape[1] <= q.shape[2]:
            raise ValueError(
                f"{op}: {name} has shape {tuple(tensor.shape)}, expected [max_pos, rotary_dim / 2] with max_pos of at "
                f"least 1 and rotary_dim between 2 and head_dim ({q.shape[2]})"
            )
        checks.check_last_dim(op, name, tensor)
    checks.check_shape(op, "sin", sin, tuple(cos.shape), "that of cos")
    checks.check_device(op, "position_ids", position_ids, q.device)
    checks.check_dtype(op, "position_ids", position_ids, torch.int32, torch.int64)
    checks.check_shape(op, "position_ids", position_ids, (q.shape[0],), "tokens of q")


def _check_outputs(op: str, q: Tensor, k: Tensor | None, q_out: Tensor, k_out: Tensor | None) -> None:
    checks.check_output(op, "q_out", q_out, "q", q)
    if (k is None) != (k_out is None):
        given, missing = ("k", "k_out") if k_out is None else ("k_out", "k")
        raise ValueError(f"{op}: {given} is given but {missing} is None, expected both or neither")
    if k is not None and k_out is not None:
        checks.check_output(op, "k_out", k_out, "k", k)


def _heads(tensor: Tensor, out: Tensor) -> tuple[int, int, int, int, int, int, int]:
    return (
        tensor.data_ptr(),
        out.data_ptr(),
        tensor.stride(0),
        tensor.stride(1),
        out.stride(0),
        out.stride(1),
        tensor.shape[1],
    )


def _rotary_out_fake(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor,
    interleaved: bool,
    q_out: Tensor,
    k_out: Tensor | None,
) -> None:
    _check("apply_rotary", q, k, cos, sin, position_ids)
    _check_outputs("apply_rotary", q, k, q_out, k_out)


def _rotary_out(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor,
    interleaved: bool,
    q_out: Tensor,
    k_out: Tensor | None,
) -> None:
    _rotary_out_fake(q, k, cos, sin, position_ids, interleaved, q_out, k_out)
    checks.check_in_place("apply_rotary", "q_out", q_out, "q", q)
    if k is not None and k_out is not None:
        checks.check_in_place("apply_rotary", "k_out", k_out, "k", k)
    if q.shape[0] == 0:
        return
    extension().rotary(
        checks.DTYPE_NUMBERS[q.dtype],
        q.device.index,
        torch.cuda.current_stream(q.device).cuda_stream,
        _heads(q, q_out),
        _ABSENT if k is None or k_out is None else _heads(k, k_out),
        cos.data_ptr(),
        cos.stride(0),
        sin.data_ptr(),
        sin.stride(0),
        cos.shape[0],
        position_ids.data_ptr(),
        position_ids.stride(0),
        position_ids.dtype == torch.int64,
        q.shape[0],
        q.shape[2],
        2 * cos.shape[1],
        interleaved,
    )


def _rotary_in_place(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, position_ids: Tensor, interleaved: bool
) -> None:
    _rotary_out(q, k, cos, sin, position_ids, interleaved, q, k)


def _rotary_in_place_fake(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, position_ids: Tensor, interleaved: bool
) -> None:
    _rotary_out_fake(q, k, cos, sin, position_ids, interleaved, q, k)


_rotary_out_op = register(
    "rotary_out(Tensor q, Tensor? k, Tensor cos, Tensor sin, Tensor position_ids, bool interleaved, "
    "Tensor(a!) q_out, Tensor(b!)? k_out) -> ()",
    _rotary_out,
    _rotary_out_fake,
)
_rotary_in_place_op = register(
    "rotary_(Tensor(a!) q, Tensor(b!)? k, Tensor cos, Tensor sin, Tensor position_ids, bool interleaved) -> ()",
    _rotary_in_place,
    _rotary_in_place_fake,
)


def apply_rotary(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor,
    *,
    interleaved: bool = False,
    out: tuple[Tensor, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Rotate q and k by their positions (Su et al. 2021, arXiv:2104.09864, section 3.4.2).

    Pair ``i`` of a head, turned by the angle in column ``i`` of the tables, is ``(x[i], x[i + rotary_dim / 2])`` or,
    interleaved, ``(x[2i], x[2i + 1])``. fp32 arithmetic, one rounding. Elements from rotary_dim on are copied.

    Parameters
    ----------
    q : Tensor
        ``[tokens, n_heads, head_dim]``, float32, float16 or bfloat16, on a CUDA device; any strides with the last
        dimension contiguous, so that a view of a fused QKV projection will do.
    k : Tensor or None
        ``[tokens, n_kv_heads, head_dim]``, of q's type.
    cos, sin : Tensor
        ``[max_pos, rotary_dim / 2]`` float32, last dimension contiguous.
    position_ids : Tensor
        ``[tokens]`` int32 or int64, row of the tables for each token. A position outside the tables turns the rotated
        elements of its token into NaN: the device cannot raise, and a wrong angle would go unnoticed.
    interleaved : bool
        The layout of the pairs.
    out : (Tensor, Tensor or None), optional
        Where to write, of the inputs' shapes and type: the inputs themselves, or memory that overlaps no input.

    Returns
    -------
    q_out, k_out : Tensor, Tensor or None
        ``out``, or new contiguous tensors.

    Raises
    ------
    ValueError, TypeError
        Naming the argument whose device, shape, strides or type is not accepted.
    RuntimeError
        If an input requires a gradient while gradients are enabled (row K11), or CUDA refuses the launch.
    ImportError
        If the compiled module is missing.
    """
    if out is None:
        q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        k_out = None if k is None else torch.empty(k.shape, dtype=k.dtype, device=k.device)
    else:
        q_out, k_out = out
    refuse_grad("apply_rotary", q=q, k=k, cos=cos, sin=sin, q_out=q_out, k_out=k_out)
    _rotary_out_op(q, k, cos, sin, position_ids, interleaved, q_out, k_out)
    return q_out, k_out


def apply_rotary_(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, position_ids: Tensor, *, interleaved: bool = False
) -> None:
    """Rotate q and k in place; otherwise as :func:`apply_rotary`."""
    refuse_grad("apply_rotary_", q=q, k=k, cos=cos, sin=sin)
    _rotary_in_place_op(q, k, cos, sin, position_ids, interleaved)
