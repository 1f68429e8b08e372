"""Decode attention straight behind the QKV projection: qk-norm, rotary, KV write and attention in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import _checks as checks
from ._library import refuse_grad, register
from ._loader import extension
from .qkv import QkvInputs, check_inputs, row

if TYPE_CHECKING:
    from .attention import DecodePlan

_OP = "qkv_decode_attention"
HEAD_DIMS = (64, 128)
MAX_GROUP = 8
"""Query heads of a kv head at most."""
ROTARY_MULTIPLE = 16
"""What the rotated dimensions are a multiple of."""


def qkv_decode_attention(
    qkv: Tensor,
    position_ids: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    k_buffer: Tensor,
    v_buffer: Tensor,
    out_cache_loc: Tensor,
    plan: DecodePlan,
    *,
    req_to_token: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    scale: float | None = None,
    out: Tensor | None = None,
    overlap: bool = False,
) -> Tensor:
    """Norm and rotate one token a request, write its k and v into the KV pool, attend with its q; one launch.

    The same bits as :func:`~astrai_kernels.qkv_norm_rope_write` and :func:`~astrai_kernels.decode_attention` in sequence,
    for few requests: the launch between the projection and attention is saved, and each thread block that reads a part of
    a request's keys norms and rotates its queries again.

    Parameters
    ----------
    qkv : Tensor
        ``[batch, (n_heads + 2 * n_kv_heads) * head_dim]`` float16 or bfloat16, a row for each request of the plan; head_dim
        64 or 128, at most 8 heads a kv head, rows at multiples of 16 bytes.
    position_ids, cos, sin : Tensor or None
        As :func:`~astrai_kernels.apply_rotary` takes them, the rotated dimensions a multiple of 16; all None: no rotation.
    k_buffer, v_buffer : Tensor
        ``[size, n_kv_heads, head_dim]`` of qkv's type.
    out_cache_loc : Tensor
        ``[batch]`` int32 or int64: the slot that `req_to_token` has for each request's newest position. The k and v of a
        token whose slot lies outside the pool are not written; its request attends to them all the same.
    plan : DecodePlan
        Updated for this step's lengths, the new tokens included; of one query row a request.
    req_to_token : Tensor
        ``[rows, max_len]`` int32: slot of each position. No request may read the newest slot of another.
    q_norm, k_norm, eps, interleaved
        As :func:`~astrai_kernels.qkv_norm_rope_write` takes them.
    scale : float, optional
        Of the scores; ``head_dim ** -0.5`` by default.
    out : Tensor, optional
        ``[batch, n_heads, head_dim]`` of qkv's type, which overlaps no input.
    overlap : bool
        The caller's word that all keys and values but the newest, and `position_ids`, `out_cache_loc`, `cos` and `sin`,
        were written before a kernel that has started since and is neither :func:`~astrai_kernels.linear` nor a library's
        product: they are then read while the kernels ahead still run (csrc/include/astrai/common/pdl.cuh).

    Returns
    -------
    Tensor
        ``out``, or a new contiguous tensor ``[batch, n_heads, head_dim]``.

    Raises
    ------
    ValueError, TypeError
        Naming the argument whose device, shape, strides, value or type is not accepted.
    RuntimeError
        If an input requires a gradient while gradients are enabled, or CUDA refuses the launch.
    """
    refuse_grad(_OP, qkv=qkv, q_norm=q_norm, k_norm=k_norm, k_buffer=k_buffer, v_buffer=v_buffer, out=out)
    n_heads, _, head_dim, *_ = plan.shape
    if out is None:
        out = torch.empty((qkv.shape[0], n_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    _op(
        *(qkv, position_ids, cos, sin, k_buffer, v_buffer, out_cache_loc, q_norm, k_norm, eps, interleaved),
        *(req_to_token, out, plan.chunks, plan.partial_out, plan.partial_ml, plan.counters, list(plan.shape)),
        *(plan.max_chunks, head_dim**-0.5 if scale is None else scale, overlap),
    )
    return out


def _fake(
    qkv: Tensor, position_ids: Tensor | None, cos: Tensor | None, sin: Tensor | None, k_buffer: Tensor, v_buffer: Tensor,
    out_cache_loc: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, interleaved: bool,
    req_to_token: Tensor, out: Tensor, chunks: Tensor, partial_out: Tensor, partial_ml: Tensor, counters: Tensor,
    shape: list[int], max_chunks: int, scale: float, overlap: bool,
) -> None:  # fmt: skip
    n_heads, n_kv_heads, head_dim, q_len = shape[:4]
    checks.check_device(_OP, "qkv", qkv)
    checks.check_dtype(_OP, "qkv", qkv, torch.float16, torch.bfloat16)
    if head_dim not in HEAD_DIMS or n_heads > MAX_GROUP * n_kv_heads or q_len != 1:
        raise ValueError(
            f"{_OP}: plan is of {n_heads} heads, {n_kv_heads} kv heads, head_dim {head_dim} and q_len {q_len}, expected "
            f"head_dim 64 or 128, at most {MAX_GROUP} heads a kv head, and q_len 1"
        )
    inputs = QkvInputs(
        *(qkv, position_ids, cos, sin, k_buffer, v_buffer, out_cache_loc, n_heads, n_kv_heads, q_norm, k_norm, eps),
        *(interleaved, None, None, overlap),
    )
    check_inputs(_OP, inputs)
    if inputs.head_dim != head_dim:
        raise ValueError(f"{_OP}: head_dim is {inputs.head_dim} by qkv's shape, expected the plan's {head_dim}")
    if qkv.shape[0] > counters.shape[0]:
        raise ValueError(
            f"{_OP}: qkv has {qkv.shape[0]} rows, expected at most the plan's {counters.shape[0]} requests"
        )
    if cos is not None and 2 * cos.shape[1] % ROTARY_MULTIPLE:
        raise ValueError(f"{_OP}: cos has shape {tuple(cos.shape)}, expected rows of a multiple of 8 angles")
    for name, rows, elements in (("qkv", qkv, 8), ("cos", cos, 4), ("sin", sin, 4)):
        if rows is not None and rows.shape[0] > 1 and rows.stride(0) % elements:
            raise ValueError(f"{_OP}: {name} has strides {rows.stride()}, expected rows at multiples of 16 bytes")
    checks.check_device(_OP, "out", out, qkv.device)
    checks.check_dtype(_OP, "out", out, qkv.dtype)
    checks.check_shape(_OP, "out", out, (qkv.shape[0], n_heads, head_dim), "rows of qkv, the plan's heads and head_dim")
    checks.check_last_dim(_OP, "out", out)
    checks.check_distinct(_OP, "out", out)
    for name, heads in (("k_buffer", k_buffer), ("v_buffer", v_buffer), ("out", out)):
        if (heads.stride(0) % 8 or heads.stride(1) % 8) and heads.numel():
            raise ValueError(f"{_OP}: {name} has strides {heads.stride()}, expected multiples of 8 elements (16 bytes)")
    checks.check_device(_OP, "req_to_token", req_to_token, qkv.device)
    checks.check_dtype(_OP, "req_to_token", req_to_token, torch.int32)
    checks.check_last_dim(_OP, "req_to_token", req_to_token)


def _kernel(
    qkv: Tensor, position_ids: Tensor | None, cos: Tensor | None, sin: Tensor | None, k_buffer: Tensor, v_buffer: Tensor,
    out_cache_loc: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, interleaved: bool,
    req_to_token: Tensor, out: Tensor, chunks: Tensor, partial_out: Tensor, partial_ml: Tensor, counters: Tensor,
    shape: list[int], max_chunks: int, scale: float, overlap: bool,
) -> None:  # fmt: skip
    _fake(
        *(qkv, position_ids, cos, sin, k_buffer, v_buffer, out_cache_loc, q_norm, k_norm, eps, interleaved),
        *(req_to_token, out, chunks, partial_out, partial_ml, counters, shape, max_chunks, scale, overlap),
    )
    if qkv.shape[0] == 0:
        return
    aligned: dict[str, Tensor | None] = {"qkv": qkv, "q_norm": q_norm, "k_norm": k_norm, "cos": cos, "sin": sin}
    for name, tensor in aligned.items():
        if tensor is not None and tensor.data_ptr() % 16:
            raise ValueError(f"{_OP}: {name} starts {tensor.data_ptr() % 16} bytes past a multiple of 16, expected 0")
    extension().qkv_attention_decode(
        checks.DTYPE_NUMBERS[qkv.dtype],
        qkv.device.index,
        torch.cuda.current_stream(qkv.device).cuda_stream,
        row(qkv),
        (k_buffer.data_ptr(), k_buffer.stride(0), k_buffer.stride(1)),
        (v_buffer.data_ptr(), v_buffer.stride(0), v_buffer.stride(1)),
        0 if q_norm is None else q_norm.data_ptr(),
        0 if k_norm is None else k_norm.data_ptr(),
        row(cos),
        row(sin),
        0 if cos is None else cos.shape[0],
        row(position_ids),
        position_ids is not None and position_ids.dtype == torch.int64,
        row(out_cache_loc),
        out_cache_loc.dtype == torch.int64,
        k_buffer.shape[0],
        qkv.shape[0],
        0 if cos is None else 2 * cos.shape[1],
        eps,
        interleaved,
        overlap,
        (out.data_ptr(), out.stride(0), out.stride(1)),
        row(req_to_token),
        (shape[0], shape[1], shape[2], shape[3], shape[4]),
        scale,
        shape[5],
        (chunks.data_ptr(), partial_out.data_ptr(), partial_ml.data_ptr(), counters.data_ptr(), max_chunks),
    )


_op: Any = register(
    f"{_OP}_out(Tensor qkv, Tensor? position_ids, Tensor? cos, Tensor? sin, Tensor(a!) k_buffer, Tensor(b!) v_buffer, "
    "Tensor out_cache_loc, Tensor? q_norm, Tensor? k_norm, float eps, bool interleaved, Tensor req_to_token, "
    "Tensor(c!) out, Tensor chunks, Tensor(d!) partial_out, Tensor(e!) partial_ml, Tensor(f!) counters, int[] shape, "
    "int max_chunks, float scale, bool overlap) -> ()",
    _kernel,
    _fake,
)
