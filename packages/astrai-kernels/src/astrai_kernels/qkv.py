"""Between the QKV projection and attention: qk-norm, rotary and KV write in one launch."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _checks as checks
from ._library import refuse_grad, register
from ._loader import extension

MAX_HEAD_DIM = 256
_OP = "qkv_norm_rope_write"


class QkvInputs(NamedTuple):
    """Arguments of :func:`qkv_norm_rope_write`, in the order of its schema."""

    qkv: Tensor
    position_ids: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    k_buffer: Tensor
    v_buffer: Tensor
    out_cache_loc: Tensor
    n_heads: int
    n_kv_heads: int
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    interleaved: bool
    k_scale: Tensor | None
    v_scale: Tensor | None
    overlap: bool

    @property
    def head_dim(self) -> int:
        return int(self.qkv.shape[1]) // (self.n_heads + 2 * self.n_kv_heads)

    @property
    def q_shape(self) -> tuple[int, int, int]:
        return (self.qkv.shape[0], self.n_heads, self.head_dim)


def check_inputs(op: str, i: QkvInputs) -> None:
    """Check the arguments of the op named `op`."""
    checks.check_device(op, "qkv", i.qkv)
    checks.check_float(op, "qkv", i.qkv)
    for name, count in (("n_heads", i.n_heads), ("n_kv_heads", i.n_kv_heads)):
        if count < 1:
            raise ValueError(f"{op}: {name} is {count}, expected at least 1")
    heads = i.n_heads + 2 * i.n_kv_heads
    if i.qkv.dim() != 2 or i.qkv.shape[1] < heads or i.qkv.shape[1] % heads:
        raise ValueError(
            f"{op}: qkv has shape {tuple(i.qkv.shape)}, expected [tokens, {heads} * head_dim] for n_heads "
            f"{i.n_heads} and n_kv_heads {i.n_kv_heads}"
        )
    if i.head_dim > MAX_HEAD_DIM:
        raise ValueError(f"{op}: head_dim is {i.head_dim} by qkv's shape, expected at most {MAX_HEAD_DIM}")
    checks.check_last_dim(op, "qkv", i.qkv)
    for name, weight in (("q_norm", i.q_norm), ("k_norm", i.k_norm)):
        if weight is not None:
            checks.check_device(op, name, weight, i.qkv.device)
            checks.check_dtype(op, name, weight, i.qkv.dtype)
            checks.check_shape(op, name, weight, (i.head_dim,), "head_dim by qkv's shape")
            checks.check_last_dim(op, name, weight)
    if not (math.isfinite(i.eps) and i.eps >= 0):
        raise ValueError(f"{op}: eps is {i.eps}, expected a finite number of at least 0")
    _check_index(op, "out_cache_loc", i.out_cache_loc, i)
    _check_rotary(op, i)
    _check_pools(op, i)


def _check_index(op: str, name: str, index: Tensor, i: QkvInputs) -> None:
    checks.check_device(op, name, index, i.qkv.device)
    checks.check_dtype(op, name, index, torch.int32, torch.int64)
    checks.check_shape(op, name, index, (i.qkv.shape[0],), "tokens of qkv")


def _check_rotary(op: str, i: QkvInputs) -> None:
    given = {"position_ids": i.position_ids, "cos": i.cos, "sin": i.sin}
    missing = [name for name, tensor in given.items() if tensor is None]
    if missing and len(missing) < len(given):
        raise ValueError(f"{op}: {missing[0]} is None, expected position_ids, cos and sin together or none of them")
    if i.cos is None or i.sin is None or i.position_ids is None:
        return
    for name, tensor in (("cos", i.cos), ("sin", i.sin)):
        checks.check_device(op, name, tensor, i.qkv.device)
        checks.check_dtype(op, name, tensor, torch.float32)
        if tensor.dim() != 2 or tensor.shape[0] < 1 or not 2 <= 2 * tensor.shape[1] <= i.head_dim:
            raise ValueError(
                f"{op}: {name} has shape {tuple(tensor.shape)}, expected [max_pos, rotary_dim / 2] with max_pos of at "
                f"least 1 and rotary_dim between 2 and head_dim ({i.head_dim})"
            )
        checks.check_last_dim(op, name, tensor)
    checks.check_shape(op, "sin", i.sin, tuple(i.cos.shape), "that of cos")
    _check_index(op, "position_ids", i.position_ids, i)


def _check_pools(op: str, i: QkvInputs) -> None:
    size = i.k_buffer.shape[0] if i.k_buffer.dim() == 3 else -1
    narrow = i.k_scale is not None or i.v_scale is not None
    if narrow and (i.k_scale is None or i.v_scale is None):
        raise ValueError(f"{op}: {'k_scale' if i.k_scale is None else 'v_scale'} is None, expected both scales or none")
    for name, buffer in (("k_buffer", i.k_buffer), ("v_buffer", i.v_buffer)):
        checks.check_device(op, name, buffer, i.qkv.device)
        if buffer.dtype == torch.float8_e4m3fn and not narrow:
            raise ValueError(f"{op}: {name} has dtype {buffer.dtype} but k_scale and v_scale are None")
        checks.check_dtype(op, name, buffer, torch.float8_e4m3fn if narrow else i.qkv.dtype)
        expected = (size, i.n_kv_heads, i.head_dim)
        if tuple(buffer.shape) != expected:
            wanted = f"[pool size, {i.n_kv_heads}, {i.head_dim}], the same size for both"
            raise ValueError(f"{op}: {name} has shape {tuple(buffer.shape)}, expected {wanted}")
        checks.check_last_dim(op, name, buffer)
    for name, scale in (("k_scale", i.k_scale), ("v_scale", i.v_scale)):
        if scale is not None:
            checks.check_device(op, name, scale, i.qkv.device)
            checks.check_dtype(op, name, scale, torch.float32)
            checks.check_shape(op, name, scale, (size, i.n_kv_heads), "size and heads of the pool")
            checks.check_last_dim(op, name, scale)


def row(tensor: Tensor | None) -> tuple[int, int]:
    """Address and stride of the first dimension; zeros if absent."""
    return (0, 0) if tensor is None else (tensor.data_ptr(), tensor.stride(0))


def _launch(i: QkvInputs, out: Tensor) -> None:
    if i.qkv.shape[0] == 0:
        return
    extension().qkv_norm_rope_write(
        checks.DTYPE_NUMBERS[i.qkv.dtype],
        i.qkv.device.index,
        torch.cuda.current_stream(i.qkv.device).cuda_stream,
        row(i.qkv),
        (out.data_ptr(), out.stride(0), out.stride(1)),
        (i.k_buffer.data_ptr(), i.k_buffer.stride(0), i.k_buffer.stride(1)),
        (i.v_buffer.data_ptr(), i.v_buffer.stride(0), i.v_buffer.stride(1)),
        row(i.k_scale),
        row(i.v_scale),
        0 if i.q_norm is None else i.q_norm.data_ptr(),
        0 if i.k_norm is None else i.k_norm.data_ptr(),
        row(i.cos),
        row(i.sin),
        0 if i.cos is None else i.cos.shape[0],
        row(i.position_ids),
        i.position_ids is not None and i.position_ids.dtype == torch.int64,
        row(i.out_cache_loc),
        i.out_cache_loc.dtype == torch.int64,
        i.k_buffer.shape[0],
        i.qkv.shape[0],
        i.n_heads,
        i.n_kv_heads,
        i.head_dim,
        0 if i.cos is None else 2 * i.cos.shape[1],
        i.eps,
        i.interleaved,
        i.overlap,
    )


def _fake(*arguments: Any) -> Tensor:
    inputs = QkvInputs(*arguments)
    check_inputs(_OP, inputs)
    return torch.empty(inputs.q_shape, dtype=inputs.qkv.dtype, device=inputs.qkv.device)


def _kernel(*arguments: Any) -> Tensor:
    out = _fake(*arguments)
    _launch(QkvInputs(*arguments), out)
    return out


def _out_fake(*arguments: Any) -> None:
    inputs = QkvInputs(*arguments[:-1])
    out: Tensor = arguments[-1]
    check_inputs(_OP, inputs)
    checks.check_shape(_OP, "out", out, inputs.q_shape, "tokens of qkv, n_heads, head_dim")
    q = inputs.qkv[:, : inputs.n_heads * inputs.head_dim].unflatten(1, (inputs.n_heads, inputs.head_dim))
    checks.check_output(_OP, "out", out, "q", q)


def _out_kernel(*arguments: Any) -> None:
    _out_fake(*arguments)
    inputs = QkvInputs(*arguments[:-1])
    out: Tensor = arguments[-1]
    q = inputs.qkv[:, : inputs.n_heads * inputs.head_dim].unflatten(1, (inputs.n_heads, inputs.head_dim))
    checks.check_in_place(_OP, "out", out, "qkv", q)
    _launch(inputs, out)


_SCHEMA = (
    "(Tensor qkv, Tensor? position_ids, Tensor? cos, Tensor? sin, Tensor(a!) k_buffer, Tensor(b!) v_buffer, "
    "Tensor out_cache_loc, int n_heads, int n_kv_heads, Tensor? q_norm, Tensor? k_norm, float eps, bool interleaved, "
    "Tensor(c!)? k_scale, Tensor(d!)? v_scale, bool overlap"
)
_op = register(f"{_OP}{_SCHEMA}) -> Tensor", _kernel, _fake)
_out_op = register(f"{_OP}_out{_SCHEMA}, Tensor(e!) out) -> ()", _out_kernel, _out_fake)


def qkv_norm_rope_write(
    qkv: Tensor,
    position_ids: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    k_buffer: Tensor,
    v_buffer: Tensor,
    out_cache_loc: Tensor,
    n_heads: int,
    n_kv_heads: int,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
    overlap: bool = False,
) -> Tensor:
    """Norm and rotate q and k of a fused projection, write k and v into the KV pool, return q; one launch.

    The same bits as :func:`~astrai_kernels.rms_norm` on each head, :func:`~astrai_kernels.apply_rotary` and two
    ``index_copy_`` in sequence.

    Parameters
    ----------
    qkv : Tensor
        ``[tokens, (n_heads + 2 * n_kv_heads) * head_dim]``, float32, float16 or bfloat16, on a CUDA device; rows may
        be strided. head_dim up to 256; multiples of 8 run fast.
    position_ids, cos, sin : Tensor or None
        As :func:`~astrai_kernels.apply_rotary` takes them; all None: no rotation.
    k_buffer, v_buffer : Tensor
        ``[size, n_kv_heads, head_dim]`` of qkv's type, or float8_e4m3fn with scales; last dimension contiguous.
    out_cache_loc : Tensor
        ``[tokens]`` int32 or int64, the slot of each token. The k and v of a token whose slot lies outside the pool
        (padded rows carry -1) are not written. Slots of different tokens must differ.
    n_heads, n_kv_heads : int
        Heads of q, and of k and v.
    q_norm, k_norm : Tensor, optional
        ``[head_dim]`` of qkv's type; None: not normed.
    eps : float
        Added to the mean square.
    interleaved : bool
        The layout of the rotary pairs.
    k_scale, v_scale : Tensor, optional
        ``[size, n_kv_heads]`` float32, for float8_e4m3fn pools: set to max|x| / 448 of each token and head, where the
        pool then holds x / scale.
    out : Tensor, optional
        ``[tokens, n_heads, head_dim]`` of qkv's type: the q part of qkv itself, or memory that overlaps no input.
    overlap : bool
        The caller's word that `position_ids`, `out_cache_loc`, `cos` and `sin` were written before a kernel that has
        started since and is neither :func:`~astrai_kernels.linear` nor a library's product: they are then read while
        the kernel directly ahead still runs (csrc/include/astrai/common/pdl.cuh).

    Returns
    -------
    Tensor
        q: ``out``, or a new contiguous tensor ``[tokens, n_heads, head_dim]``.

    Raises
    ------
    ValueError, TypeError
        Naming the argument whose device, shape, strides, value or type is not accepted.
    RuntimeError
        If an input requires a gradient while gradients are enabled, or CUDA refuses the launch.
    ImportError
        If the compiled module is missing.
    """
    refuse_grad(_OP, qkv=qkv, q_norm=q_norm, k_norm=k_norm, k_buffer=k_buffer, v_buffer=v_buffer, out=out)
    arguments = QkvInputs(
        *(qkv, position_ids, cos, sin, k_buffer, v_buffer, out_cache_loc, n_heads, n_kv_heads, q_norm, k_norm),
        *(eps, interleaved, k_scale, v_scale, overlap),
    )
    if out is None:
        result: Tensor = _op(*arguments)
        return result
    _out_op(*arguments, out)
    return out
