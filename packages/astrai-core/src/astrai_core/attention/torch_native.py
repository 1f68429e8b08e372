"""Attention through torch's own scaled_dot_product_attention: runs everywhere, and is the twin of every other backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from astrai_core.attention.backend import AttentionBackend, AttentionSpec
from astrai_core.attention.gather import causal_mask, gather, leading_decodes, visible_keys

if TYPE_CHECKING:
    from astrai_core.attention.metadata import AttentionMetadata, KVCache


@dataclass(frozen=True)
class _DecodePlan:
    """Gather of one window: slots ``[batch, longest]`` int64 and, unless all rows are full, a mask of the same shape."""

    slots: Tensor
    mask: Tensor | None


@dataclass(frozen=True)
class _Chunk:
    """One request of a ragged step: its queries are rows ``q_start .. q_end``; slots of the keys they can see."""

    q_start: int
    q_end: int
    slots: Tensor
    mask: Tensor | None
    """``[q, kv]`` bool, or None where plain causal masking (equal lengths) or no masking (one query) is right."""


@dataclass(frozen=True)
class _StepPlan:
    """A step of one group of layers, by attention window."""

    decode: Mapping[int | None, _DecodePlan]
    """Of the leading requests with one query each."""
    chunks: Mapping[int | None, Sequence[_Chunk]]
    """The requests behind them."""
    n_decode: int


class TorchNativeBackend(AttentionBackend):
    """Gathers each request's keys and values from the pool and calls SDPA.

    Lengths come from the host copies in the metadata, so nothing is read back from the device. Slots that no position
    maps to are never read: a padded row of a gather repeats the request's last slot and is masked.
    """

    @staticmethod
    def unavailable(device: torch.device, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
        """Return None: torch runs everywhere."""
        return None

    def plan(self, cache: KVCache, specs: Sequence[AttentionSpec], *, overlap: bool = False) -> None:
        """Look up the slots and build the masks of each group."""
        n_decode = leading_decodes(cache.groups[0])
        for metadata, of_group in cache.specs_of_groups(specs):
            windows = [spec.window for spec in of_group]
            metadata.plan = _StepPlan(
                decode={window: _plan_decode(metadata, window, n_decode) for window in windows if n_decode},
                chunks={window: _plan_chunks(metadata, window, n_decode) for window in windows},
                n_decode=n_decode,
            )

    def fwd_decode(self, q: Tensor, spec: AttentionSpec, cache: KVCache) -> Tensor:
        """Attend with all single-query requests as one padded batch.

        The query heads of a kv head are the rows of one small matrix, so keys and values are read once per kv head.
        """
        k_buffer, v_buffer, metadata = cache.of(spec.layer)
        plan: _DecodePlan = metadata.plan.decode[spec.window]
        batch, longest = plan.slots.shape
        keys, values = gather(k_buffer, v_buffer, plan.slots.view(-1), q.dtype, cache.scales(spec.layer))
        shape = (batch, longest, spec.n_kv_heads, spec.head_dim)
        out = F.scaled_dot_product_attention(
            q.reshape(batch, spec.n_kv_heads, spec.n_heads // spec.n_kv_heads, spec.head_dim),
            keys.view(shape).transpose(1, 2),
            values.view(shape).transpose(1, 2),
            attn_mask=None if plan.mask is None else plan.mask[:, None, None, :],
            scale=spec.scale,
        )
        return out.reshape(batch, spec.n_heads, spec.head_dim)

    def fwd_prefill(self, q: Tensor, spec: AttentionSpec, cache: KVCache) -> Tensor:
        """Attend with the leading single-query requests as a batch and with each chunk on its own."""
        k_buffer, v_buffer, metadata = cache.of(spec.layer)
        plan: _StepPlan = metadata.plan
        parts = [self.fwd_decode(q[: plan.n_decode], spec, cache)] if plan.n_decode else []
        for chunk in plan.chunks[spec.window]:
            keys, values = gather(k_buffer, v_buffer, chunk.slots, q.dtype, cache.scales(spec.layer))
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


def _plan_decode(metadata: AttentionMetadata, window: int | None, n_decode: int) -> _DecodePlan:
    lens = metadata.seq_lens_host[:n_decode]
    visible = [length if window is None else min(length, window) for length in lens]
    longest = max(visible)
    device = metadata.req_to_token.device
    ends = torch.tensor(lens, device=device).unsqueeze(1)
    starts = ends - torch.tensor(visible, device=device).unsqueeze(1)
    positions = starts + torch.arange(longest, device=device)
    slots = metadata.req_to_token[metadata.req_indices[:n_decode].unsqueeze(1), positions.minimum(ends - 1)]
    mask = None if min(visible) == longest else positions < ends
    return _DecodePlan(slots.long(), mask)


def _plan_chunks(metadata: AttentionMetadata, window: int | None, first: int) -> list[_Chunk]:
    if first == len(metadata.q_lens_host):
        return []
    keys = visible_keys(metadata, window, first)
    chunks, q_start = [], first
    for slots, q_len, kv_len in zip(keys.slots.split(keys.lens), metadata.q_lens_host[first:], keys.lens, strict=True):
        mask = None
        if q_len > 1 and (q_len != kv_len or (window is not None and kv_len > window)):
            mask = causal_mask(q_len, kv_len, window, slots.device)
        chunks.append(_Chunk(q_start, q_start + q_len, slots, mask))
        q_start += q_len
    return chunks
