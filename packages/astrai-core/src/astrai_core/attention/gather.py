"""Gathered keys: which slots a step's queries can see, and copies of them (row A7)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from astrai_core.attention.metadata import AttentionMetadata


def causal_mask(q_len: int, kv_len: int, window: int | None, device: torch.device) -> Tensor:
    """Return ``[q_len, kv_len]`` bool, True where query i (the last q_len positions) may see key j."""
    query = torch.arange(kv_len - q_len, kv_len, device=device).unsqueeze(1)
    key = torch.arange(kv_len, device=device).unsqueeze(0)
    mask = key <= query
    return mask if window is None else mask & (key > query - window)


@dataclass(frozen=True)
class VisibleKeys:
    """The keys that the queries of a run of requests can see, request after request: the last of each request's."""

    slots: Tensor
    """``[sum(lens)]`` int64."""
    indptr: Tensor
    """``[requests + 1]`` int32: prefix sum of lens."""
    lens: tuple[int, ...]
    """Keys of each request, on the host."""


def visible_keys(metadata: AttentionMetadata, window: int | None, first: int = 0) -> VisibleKeys:
    """Look up the slots of the step's requests from `first` on; nothing outside the window is looked up.

    Parameters
    ----------
    window
        Keys a query sees, its own included; None for all.
    """
    ends, q_lens = metadata.seq_lens_host[first:], metadata.q_lens_host[first:]
    lens = tuple(n if window is None else min(n, q + window - 1) for n, q in zip(ends, q_lens, strict=True))
    device = metadata.req_to_token.device
    counts = torch.tensor((0, *lens), dtype=torch.int32).to(device, non_blocking=True)
    indptr = counts.cumsum(0, dtype=torch.int32)
    request = torch.arange(len(lens), device=device).repeat_interleave(counts[1:], output_size=sum(lens))
    past = metadata.seq_lens[first:] - indptr[1:]
    positions = torch.arange(sum(lens), device=device) + past[request]
    slots = metadata.req_to_token[metadata.req_indices[first:][request], positions]
    return VisibleKeys(slots.long(), indptr, lens)


def gather(
    k_buffer: Tensor,
    v_buffer: Tensor,
    slots: Tensor,
    dtype: torch.dtype,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor]:
    """Copy keys and values ``[len(slots), n_kv_heads, head_dim]`` out of the pool, as `dtype`.

    Parameters
    ----------
    scales
        Of float8_e4m3fn keys and values: ``[size, n_kv_heads]`` fp32.
    """
    return _rows(k_buffer, scales[0], slots, dtype), _rows(v_buffer, scales[1], slots, dtype)


def _rows(buffer: Tensor, scale: Tensor | None, slots: Tensor, dtype: torch.dtype) -> Tensor:
    if scale is None:
        return buffer.index_select(0, slots).to(dtype)
    narrow = buffer.view(torch.uint8).index_select(0, slots).view(buffer.dtype)
    return (narrow.float() * scale.index_select(0, slots).unsqueeze(-1)).to(dtype)


def leading_decodes(metadata: AttentionMetadata) -> int:
    """Count the requests at the front of the step that have one query each, or that are to be run so."""
    if metadata.n_single is not None:
        return metadata.n_single
    n_decode = 0
    while n_decode < len(metadata.q_lens_host) and metadata.q_lens_host[n_decode] == 1:
        n_decode += 1
    return n_decode
