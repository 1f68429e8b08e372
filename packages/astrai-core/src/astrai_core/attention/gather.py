"""Attention over gathered keys: which slots a step's queries can see, and SDPA over them (row A7)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from astrai_core.attention.backend import AttentionBackend, AttentionSpec

if TYPE_CHECKING:
    from astrai_core.attention.metadata import AttentionMetadata, KVCache


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


def gather(k_buffer: Tensor, v_buffer: Tensor, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Copy keys and values ``[len(slots), n_kv_heads, head_dim]`` out of the pool, as `dtype`."""
    return k_buffer.index_select(0, slots).to(dtype), v_buffer.index_select(0, slots).to(dtype)


@dataclass(frozen=True)
class Chunk:
    """One request of a ragged step: its queries are rows ``q_start .. q_end``; slots of the keys they can see."""

    q_start: int
    q_end: int
    slots: Tensor
    mask: Tensor | None
    """``[q, kv]`` bool, or None where plain causal masking (equal lengths) or no masking (one query) is right."""


@dataclass(frozen=True)
class StepPlan:
    """A step of one group of layers, by attention window."""

    decode: Mapping[int | None, Any]
    """What :meth:`ChunkedBackend.plan_decode` made of the leading requests with one query each."""
    chunks: Mapping[int | None, Sequence[Chunk]]
    """The requests behind them."""
    n_decode: int


class ChunkedBackend(AttentionBackend):
    """Computes the leading single-query requests of a step together, and each request behind them by gather and SDPA."""

    @abstractmethod
    def plan_decode(self, metadata: AttentionMetadata, spec: AttentionSpec, n_decode: int) -> Any:
        """Prepare the attention of the step's first `n_decode` requests, one query each, in layers like `spec`."""

    def plan(self, cache: KVCache, specs: Sequence[AttentionSpec]) -> None:
        """Build a :class:`StepPlan` for each group."""
        q_lens = cache.groups[0].q_lens_host
        n_decode = 0
        while n_decode < len(q_lens) and q_lens[n_decode] == 1:
            n_decode += 1
        for metadata, of_group in cache.specs_of_groups(specs):
            metadata.plan = StepPlan(
                decode={spec.window: self.plan_decode(metadata, spec, n_decode) for spec in of_group if n_decode},
                chunks={spec.window: plan_chunks(metadata, spec.window, n_decode) for spec in of_group},
                n_decode=n_decode,
            )

    def fwd_prefill(self, q: Tensor, spec: AttentionSpec, cache: KVCache) -> Tensor:
        """Attend with the leading single-query requests as a batch and with each chunk on its own."""
        k_buffer, v_buffer, metadata = cache.of(spec.layer)
        plan: StepPlan = metadata.plan
        parts = [self.fwd_decode(q[: plan.n_decode], spec, cache)] if plan.n_decode else []
        for chunk in plan.chunks[spec.window]:
            keys, values = gather(k_buffer, v_buffer, chunk.slots, q.dtype)
            n_queries = chunk.q_end - chunk.q_start
            out = F.scaled_dot_product_attention(
                q[chunk.q_start : chunk.q_end].transpose(0, 1).unsqueeze(0),
                keys.transpose(0, 1).unsqueeze(0),
                values.transpose(0, 1).unsqueeze(0),
                attn_mask=chunk.mask,
                is_causal=chunk.mask is None and n_queries > 1,
                scale=spec.scale,
                enable_gqa=spec.n_heads != spec.n_kv_heads,
            )
            parts.append(out.squeeze(0).transpose(0, 1))
        return torch.cat(parts) if len(parts) != 1 else parts[0]


def plan_chunks(metadata: AttentionMetadata, window: int | None, first: int) -> list[Chunk]:
    """Plan the step's requests from `first` on, each by itself."""
    if first == len(metadata.q_lens_host):
        return []
    keys = visible_keys(metadata, window, first)
    chunks, q_start = [], first
    for slots, q_len, kv_len in zip(keys.slots.split(keys.lens), metadata.q_lens_host[first:], keys.lens, strict=True):
        mask = None
        if q_len > 1 and (q_len != kv_len or (window is not None and kv_len > window)):
            mask = causal_mask(q_len, kv_len, window, slots.device)
        chunks.append(Chunk(q_start, q_start + q_len, slots, mask))
        q_start += q_len
    return chunks
