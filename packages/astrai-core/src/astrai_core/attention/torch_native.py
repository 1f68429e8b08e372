"""Attention through torch's own scaled_dot_product_attention: runs everywhere, and is the twin of every other backend."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from astrai_core.attention.backend import AttentionBackend, AttentionSpec
from astrai_core.attention.metadata import AttentionMetadata, KVCache


@dataclass(frozen=True)
class _DecodePlan:
    """Gather of one window: slots ``[batch, longest]`` int64 and, unless all rows are full, a mask of the same shape."""

    slots: Tensor
    mask: Tensor | None


@dataclass(frozen=True)
class _PrefillPlan:
    """One request of a ragged step: its queries are rows ``q_start .. q_end``; slots of the keys they can see."""

    q_start: int
    q_end: int
    slots: Tensor
    mask: Tensor | None
    """``[q, kv]`` bool, or None where plain causal masking (equal lengths) or no masking (one query) is right."""


@dataclass(frozen=True)
class _Plan:
    decode: dict[int | None, _DecodePlan]
    prefill: dict[int | None, list[_PrefillPlan]]
    n_decode: int
    """Leading requests of the step with one query each; they are computed as one batch."""


class TorchNativeBackend(AttentionBackend):
    """Gathers each request's keys and values from the pool and calls SDPA.

    Lengths come from the host copies in the metadata, so nothing is read back from the device. Slots that no position
    maps to are never read: a padded row of a gather repeats the request's last slot and is masked.
    """

    @staticmethod
    def unavailable(device: torch.device, head_dim: int) -> str | None:
        """Return None: torch runs everywhere."""
        return None

    def plan(self, cache: KVCache, windows: tuple[int | None, ...]) -> None:
        """Build the gathers and masks of the step, one set per distinct window."""
        metadata = cache.metadata
        n_decode = 0
        while n_decode < len(metadata.q_lens_host) and metadata.q_lens_host[n_decode] == 1:
            n_decode += 1
        metadata.plan = _Plan(
            decode={window: _plan_decode(metadata, window, n_decode) for window in windows if n_decode},
            prefill={window: _plan_prefill(metadata, window, n_decode) for window in windows},
            n_decode=n_decode,
        )

    def fwd_decode(self, q: Tensor, spec: AttentionSpec, cache: KVCache) -> Tensor:
        """Attend with all single-query requests as one padded batch.

        The query heads of a kv head are the rows of one small matrix, so keys and values are read once per kv head.
        """
        plan = cache.metadata.plan.decode[spec.window]
        batch, longest = plan.slots.shape
        keys, values = gather(cache, spec.layer, plan.slots.view(-1))
        shape = (batch, longest, spec.n_kv_heads, spec.head_dim)
        out = F.scaled_dot_product_attention(
            q.reshape(batch, spec.n_kv_heads, spec.n_heads // spec.n_kv_heads, spec.head_dim),
            keys.view(shape).transpose(1, 2).to(q.dtype),
            values.view(shape).transpose(1, 2).to(q.dtype),
            attn_mask=None if plan.mask is None else plan.mask[:, None, None, :],
            scale=spec.scale,
        )
        return out.reshape(batch, spec.n_heads, spec.head_dim)

    def fwd_prefill(self, q: Tensor, spec: AttentionSpec, cache: KVCache) -> Tensor:
        """Attend with the leading single-query requests as a batch and with each chunk on its own."""
        plan: _Plan = cache.metadata.plan
        parts = [self.fwd_decode(q[: plan.n_decode], spec, cache)] if plan.n_decode else []
        for chunk in plan.prefill[spec.window]:
            keys, values = gather(cache, spec.layer, chunk.slots)
            n_queries = chunk.q_end - chunk.q_start
            out = F.scaled_dot_product_attention(
                q[chunk.q_start : chunk.q_end].transpose(0, 1).unsqueeze(0),
                keys.transpose(0, 1).unsqueeze(0).to(q.dtype),
                values.transpose(0, 1).unsqueeze(0).to(q.dtype),
                attn_mask=chunk.mask,
                is_causal=chunk.mask is None and n_queries > 1,
                scale=spec.scale,
                enable_gqa=spec.n_heads != spec.n_kv_heads,
            )
            parts.append(out.squeeze(0).transpose(0, 1))
        return torch.cat(parts) if len(parts) != 1 else parts[0]


def gather(cache: KVCache, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Copy keys and values of the given slots ``[n]`` out of the pool: two of ``[n, n_kv_heads, head_dim]``."""
    return cache.k_buffer[layer].index_select(0, slots), cache.v_buffer[layer].index_select(0, slots)


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


def _plan_prefill(metadata: AttentionMetadata, window: int | None, n_decode: int) -> list[_PrefillPlan]:
    chunks = []
    q_start = n_decode
    device = metadata.req_to_token.device
    for i in range(n_decode, len(metadata.q_lens_host)):
        q_len, kv_len = metadata.q_lens_host[i], metadata.seq_lens_host[i]
        first = 0 if window is None else max(0, kv_len - q_len - window + 1)
        slots = metadata.req_to_token[metadata.req_indices[i], first:kv_len].long()
        mask = None
        hidden_by_window = window is not None and kv_len - first > window
        if q_len > 1 and (q_len != kv_len - first or hidden_by_window):
            mask = causal_mask(q_len, kv_len - first, window, device)
        chunks.append(_PrefillPlan(q_start, q_start + q_len, slots, mask))
        q_start += q_len
    return chunks


def causal_mask(q_len: int, kv_len: int, window: int | None, device: torch.device) -> Tensor:
    """Return ``[q_len, kv_len]`` bool, True where query i (the last q_len positions) may see key j."""
    query = torch.arange(kv_len - q_len, kv_len, device=device).unsqueeze(1)
    key = torch.arange(kv_len, device=device).unsqueeze(0)
    mask = key <= query
    return mask if window is None else mask & (key > query - window)
