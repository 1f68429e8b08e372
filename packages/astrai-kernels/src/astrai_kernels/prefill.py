"""Prefill attention over a paged or contiguous KV cache (rows K1-K3): ragged queries, causal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._attention import HEAD_DIMS, check_operands, check_vector, key_strides, scale_strides
from ._checks import DTYPE_NUMBERS, check_device, check_dtype, check_shape
from ._library import refuse_grad, register
from ._loader import extension


def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qo_indptr: Tensor,
    seq_lens: Tensor,
    *,
    req_to_token: Tensor | None = None,
    req_indices: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Causal attention of ragged queries, each the last of its request's positions (FlashAttention-2, arXiv:2307.08691).

    The grid follows from the number of tokens and requests; lengths are read on the device, and nothing is allocated but
    the result.

    Parameters
    ----------
    q : Tensor
        ``[tokens, n_heads, head_dim]`` float16 or bfloat16.
    k, v : Tensor
        Paged: ``[size, n_kv_heads, head_dim]``, read through `req_to_token`. Contiguous: ``[batch, max_len, n_kv_heads,
        head_dim]``. Of q's type, or float8_e4m3fn with scales; strided views allowed.
    qo_indptr : Tensor
        ``[batch + 1]`` int32: prefix sum of the requests' query rows.
    seq_lens : Tensor
        ``[batch]`` int32: keys of each request, its query rows' own included.
    req_to_token : Tensor, optional
        ``[rows, max_len]`` int32: slot of each position; entries behind a request's last key are not read.
    req_indices : Tensor, optional
        ``[batch]`` int64: rows of `req_to_token`; 0, 1, 2, ... if it is not given.
    window : int, optional
        Keys a query sees, its own included.
    scale, softcap, sinks, k_scale, v_scale, out, lse
        As :func:`astrai_kernels.decode_attention` takes them.
    mask : Tensor, optional
        ``[tokens, max_len]`` bool, True where a key may be seen.

    Returns
    -------
    Tensor
        ``[tokens, n_heads, head_dim]``

    Raises
    ------
    ValueError, TypeError
        Naming the argument whose device, shape, strides, value or type is not accepted.
    RuntimeError
        If an input requires a gradient while gradients are enabled, or CUDA refuses the launch.
    """
    return _attend(
        _prefill_op, "prefill_attention", q, k, v, qo_indptr, seq_lens, req_to_token, req_indices, out, lse, mask, sinks,
        scale, window, softcap, k_scale, v_scale,
    )  # fmt: skip


def scalar_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qo_indptr: Tensor,
    seq_lens: Tensor,
    *,
    req_to_token: Tensor | None = None,
    req_indices: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Readable twin of :func:`prefill_attention` and :func:`decode_attention` on the GPU: one warp a query row and head,
    one key after the other, in fp32. Slow; a second opinion.

    Parameters
    ----------
    q, k, v, qo_indptr, seq_lens, req_to_token, req_indices, scale, window, softcap, sinks, mask, k_scale, v_scale, out, lse
        As :func:`prefill_attention` takes them. Decoding is prefill of requests with one query row each.

    Returns
    -------
    Tensor
        ``[tokens, n_heads, head_dim]``

    Raises
    ------
    ValueError, TypeError
        Naming the argument whose device, shape, strides, value or type is not accepted.
    RuntimeError
        If an input requires a gradient while gradients are enabled, or CUDA refuses the launch.
    """
    return _attend(
        _scalar_op, "scalar_attention", q, k, v, qo_indptr, seq_lens, req_to_token, req_indices, out, lse, mask, sinks,
        scale, window, softcap, k_scale, v_scale,
    )  # fmt: skip


def _attend(
    op: Callable[..., None], name: str, q: Tensor, k: Tensor, v: Tensor, qo_indptr: Tensor, seq_lens: Tensor,
    table: Tensor | None, rows: Tensor | None, out: Tensor | None, lse: Tensor | None, mask: Tensor | None,
    sinks: Tensor | None, scale: float | None, window: int | None, softcap: float, k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> Tensor:  # fmt: skip
    refuse_grad(name, q=q, k=k, v=v, out=out)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    op(
        q, k, v, qo_indptr, seq_lens, table, rows, out, lse, mask, sinks, scale, window or 0, softcap, k_scale, v_scale,
    )  # fmt: skip
    return out


def _check(
    q: Tensor, k: Tensor, v: Tensor, qo_indptr: Tensor, seq_lens: Tensor, table: Tensor | None, rows: Tensor | None,
    out: Tensor, lse: Tensor | None, mask: Tensor | None, sinks: Tensor | None, scale: float, window: int,
    softcap: float, k_scale: Tensor | None = None, v_scale: Tensor | None = None, *, op: str = "prefill_attention",
) -> None:  # fmt: skip
    check_device(op, "q", q)
    if q.dim() != 3 or q.shape[2] not in HEAD_DIMS:
        raise ValueError(
            f"{op}: q has shape {tuple(q.shape)}, expected [tokens, n_heads, head_dim] with a head_dim of "
            f"{', '.join(map(str, HEAD_DIMS))}"
        )
    n_heads, n_kv_heads = q.shape[1], k.shape[-2]
    if n_kv_heads < 1 or n_heads % n_kv_heads:
        raise ValueError(f"{op}: k has {n_kv_heads} heads, expected a divisor of q's {n_heads}")
    for name, tensor, dtype in (
        ("qo_indptr", qo_indptr, torch.int32),
        ("seq_lens", seq_lens, torch.int32),
        ("req_indices", rows, torch.int64),
    ):
        if tensor is not None:
            check_device(op, name, tensor, q.device)
            check_dtype(op, name, tensor, dtype)
            check_vector(op, name, tensor)
    batch = seq_lens.shape[0]
    check_shape(op, "qo_indptr", qo_indptr, (batch + 1,), "one more than seq_lens")
    if rows is not None:
        check_shape(op, "req_indices", rows, (batch,), "one per request")
    check_operands(
        op, q, k, v, None if table is not None else batch, n_kv_heads, out, lse, table, mask, sinks, k_scale, v_scale
    )
    if scale <= 0:
        raise ValueError(f"{op}: scale is {scale}, expected a positive number")
    if window < 0:
        raise ValueError(f"{op}: window is {window}, expected at least 1, or None")
    if softcap < 0:
        raise ValueError(f"{op}: softcap is {softcap}, expected at least 0")


def _prefill(*arguments: Any) -> None:
    _check(*arguments)
    _launch(extension().attention_prefill, *arguments)


def _scalar(*arguments: Any) -> None:
    _check_scalar(*arguments)
    _launch(extension().attention_scalar, *arguments)


def _check_scalar(*arguments: Any) -> None:
    _check(*arguments, op="scalar_attention")


def _launch(
    launcher: Callable[..., None], q: Tensor, k: Tensor, v: Tensor, qo_indptr: Tensor, seq_lens: Tensor,
    req_to_token: Tensor | None, req_indices: Tensor | None, out: Tensor, lse: Tensor | None, mask: Tensor | None,
    sinks: Tensor | None, scale: float, window: int, softcap: float, k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:  # fmt: skip
    if q.numel() == 0:
        return
    launcher(
        DTYPE_NUMBERS[q.dtype],
        q.device.index,
        torch.cuda.current_stream(q.device).cuda_stream,
        (q.data_ptr(), q.stride(0), q.stride(1)),
        (out.data_ptr(), out.stride(0), out.stride(1)),
        0 if lse is None else lse.data_ptr(),
        key_strides(k),
        key_strides(v),
        scale_strides(k_scale),
        scale_strides(v_scale),
        (0, 0) if req_to_token is None else (req_to_token.data_ptr(), req_to_token.stride(0)),
        (0, 0) if mask is None else (mask.data_ptr(), mask.stride(0)),
        0 if sinks is None else sinks.data_ptr(),
        (q.shape[1], k.shape[-2], q.shape[2], 1, window),
        scale,
        softcap,
        (
            qo_indptr.data_ptr(),
            seq_lens.data_ptr(),
            0 if req_indices is None else req_indices.data_ptr(),
            seq_lens.shape[0],
        ),
        q.shape[0],
    )


_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor qo_indptr, Tensor seq_lens, Tensor? req_to_token, Tensor? req_indices, "
    "Tensor(a!) out, Tensor(b!)? lse, Tensor? mask, Tensor? sinks, float scale, int window, float softcap, "
    "Tensor? k_scale=None, Tensor? v_scale=None) -> ()"
)
_prefill_op = register(f"attention_prefill_out{_SCHEMA}", _prefill, _check)
_scalar_op = register(f"attention_scalar_out{_SCHEMA}", _scalar, _check_scalar)
