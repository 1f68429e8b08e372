"""Attention in plain torch: the twins that the tests compare the kernels with. They run on any device."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .reference import qkv_norm_rope_write


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq_lens: Tensor,
    *,
    req_to_token: Tensor | None = None,
    req_indices: Tensor | None = None,
    q_len: int = 1,
    window: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Twin of :func:`astrai_kernels.decode_attention`, one request after the other.

    Parameters
    ----------
    q, k, v, req_to_token, scale, softcap, sinks, mask, k_scale, v_scale
        As the kernel takes them; any floating type. Keys and values with a scale are rounded to q's type.
    seq_lens : Tensor
        ``[batch]`` integers.
    req_indices : Tensor, optional
        ``[batch]`` rows of ``req_to_token``.
    q_len, window : int
        As :class:`astrai_kernels.DecodePlan` takes them.

    Returns
    -------
    out : Tensor
        Of q's shape and type; products in q's type, the softmax in fp32, as Hugging Face's eager attention has it.
    lse : Tensor
        ``[batch * q_len, n_heads]`` fp32.
    """
    n_heads, head_dim = q.shape[1:]
    n_kv_heads = k.shape[-2]
    group = n_heads // n_kv_heads
    scale = head_dim**-0.5 if scale is None else scale
    caches = ((k, k_scale), (v, v_scale))
    out = torch.zeros_like(q)
    lse = torch.full((q.shape[0], n_heads), -torch.inf, dtype=torch.float32, device=q.device)
    for b, seq_len in enumerate(seq_lens.tolist()):
        if req_to_token is None:
            keys, values = (_rows_of(x, scales, (b, slice(seq_len)), q.dtype) for x, scales in caches)
        else:
            slots = req_to_token[b if req_indices is None else int(req_indices[b]), :seq_len].long()
            low = max(0, seq_len - q_len + 1 - window) if window else 0
            slots[:low] = slots[low] if low < seq_len else 0  # what lies before every window may be anybody's
            keys, values = (_rows_of(x, scales, slots, q.dtype) for x, scales in caches)
        rows = slice(b * q_len, (b + 1) * q_len)
        queries = q[rows].transpose(0, 1).unflatten(0, (n_kv_heads, group))
        scores = (queries @ keys.permute(1, 2, 0).unsqueeze(1)).float() * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        query = torch.arange(seq_len - q_len, seq_len, device=q.device).unsqueeze(1)
        key = torch.arange(seq_len, device=q.device)
        visible = key <= query
        if window:
            visible &= key > query - window
        if mask is not None:
            visible &= mask[rows, :seq_len]
        scores = scores.masked_fill(~visible, -torch.inf)
        total = scores.logsumexp(-1)
        if sinks is not None:
            total = torch.logaddexp(total, sinks.view(n_kv_heads, group, 1))
        weights = (scores - total.unsqueeze(-1)).exp().nan_to_num(0.0).to(q.dtype)
        values = values.transpose(0, 1).unsqueeze(1)
        values = values.masked_fill(~visible.any(0).unsqueeze(-1), 0)
        out[rows] = (weights @ values).flatten(0, 1).transpose(0, 1)
        lse[rows] = total.flatten(0, 1).transpose(0, 1)
    return out, lse


def qkv_decode_attention(
    qkv: Tensor,
    position_ids: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    k_buffer: Tensor,
    v_buffer: Tensor,
    out_cache_loc: Tensor,
    seq_lens: Tensor,
    *,
    n_heads: int,
    req_to_token: Tensor,
    req_indices: Tensor | None = None,
    window: int | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Twin of :func:`astrai_kernels.qkv_decode_attention`; writes the pools in place, slots inside them only.

    Parameters
    ----------
    qkv, position_ids, cos, sin, k_buffer, v_buffer, out_cache_loc, req_to_token, q_norm, k_norm, eps, interleaved, scale
        As the kernel takes them; any floating type.
    seq_lens : Tensor
        ``[batch]`` integers.
    n_heads : int
        Of the queries.
    req_indices : Tensor, optional
        ``[batch]`` rows of ``req_to_token``.
    window : int, optional
        As :class:`astrai_kernels.DecodePlan` takes it.

    Returns
    -------
    Tensor
        ``[batch, n_heads, head_dim]``
    """
    q = qkv_norm_rope_write(
        *(qkv, position_ids, cos, sin, k_buffer, v_buffer, out_cache_loc, n_heads, k_buffer.shape[1]),
        q_norm=q_norm,
        k_norm=k_norm,
        eps=eps,
        interleaved=interleaved,
    )
    options: dict[str, Any] = {"req_to_token": req_to_token, "req_indices": req_indices, "window": window}
    return decode_attention(q, k_buffer, v_buffer, seq_lens, scale=scale, **options)[0]


def _rows_of(cache: Tensor, scales: Tensor | None, index: Any, dtype: torch.dtype) -> Tensor:
    """Rows of a cache; those of an e4m3 cache times their scales (row, head), rounded to `dtype`."""
    rows = cache[index]
    return rows if scales is None else (rows.float() * scales[index].unsqueeze(-1)).to(dtype)


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
) -> tuple[Tensor, Tensor]:
    """Twin of :func:`astrai_kernels.prefill_attention`: ragged queries, causal.

    Parameters
    ----------
    q, k, v, qo_indptr, seq_lens, req_to_token, req_indices, scale, window, softcap, sinks, mask, k_scale, v_scale
        As :func:`decode_attention` takes them.

    Returns
    -------
    out : Tensor
        Of q's shape and type.
    lse : Tensor
        ``[tokens, n_heads]`` fp32.
    """
    out = torch.zeros_like(q)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
    starts = qo_indptr.tolist()
    paged = req_to_token is not None
    for b, (start, end) in enumerate(pairwise(starts)):
        if start == end:
            continue
        row = b if req_indices is None else int(req_indices[b])
        out[start:end], lse[start:end] = decode_attention(
            q[start:end],
            k if paged else k[b : b + 1],
            v if paged else v[b : b + 1],
            seq_lens[b : b + 1],
            req_to_token=None if req_to_token is None else req_to_token[row : row + 1],
            q_len=end - start,
            window=window,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            mask=None if mask is None else mask[start:end],
            k_scale=k_scale if paged or k_scale is None else k_scale[b : b + 1],
            v_scale=v_scale if paged or v_scale is None else v_scale[b : b + 1],
        )
    return out, lse
