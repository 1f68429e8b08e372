"""Attention through torch's own scaled_dot_product_attention: runs everywhere, and is the twin of every other backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from astrai_core.attention.backend import AttentionSpec
from astrai_core.attention.gather import ChunkedBackend, gather

if TYPE_CHECKING:
    from astrai_core.attention.metadata import AttentionMetadata, KVCache


@dataclass(frozen=True)
class _DecodePlan:
    """Gather of one window: slots ``[batch, longest]`` int64 and, unless all rows are full, a mask of the same shape."""

    slots: Tensor
    mask: Tensor | None


class TorchNativeBackend(ChunkedBackend):
    """Gathers each request's keys and values from the pool and calls SDPA.

    Lengths come from the host copies in the metadata, so nothing is read back from the device. Slots that no position
    maps to are never read: a padded row of a gather repeats the request's last slot and is masked.
    """

    @staticmethod
    def unavailable(device: torch.device, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
        """Return None: torch runs everywhere."""
        return None

    def plan_decode(self, metadata: AttentionMetadata, spec: AttentionSpec, n_decode: int) -> _DecodePlan:
        """Build the gather and the mask of the requests, padded to the longest."""
        lens = metadata.seq_lens_host[:n_decode]
        visible = [length if spec.window is None else min(length, spec.window) for length in lens]
        longest = max(visible)
        device = metadata.req_to_token.device
        ends = torch.tensor(lens, device=device).unsqueeze(1)
        starts = ends - torch.tensor(visible, device=device).unsqueeze(1)
        positions = starts + torch.arange(longest, device=device)
        slots = metadata.req_to_token[metadata.req_indices[:n_decode].unsqueeze(1), positions.minimum(ends - 1)]
        mask = None if min(visible) == longest else positions < ends
        return _DecodePlan(slots.long(), mask)

    def fwd_decode(self, q: Tensor, spec: AttentionSpec, cache: KVCache) -> Tensor:
        """Attend with all single-query requests as one padded batch.

        The query heads of a kv head are the rows of one small matrix, so keys and values are read once per kv head.
        """
        k_buffer, v_buffer, metadata = cache.of(spec.layer)
        plan: _DecodePlan = metadata.plan.decode[spec.window]
        batch, longest = plan.slots.shape
        keys, values = gather(k_buffer, v_buffer, plan.slots.view(-1), q.dtype)
        shape = (batch, longest, spec.n_kv_heads, spec.head_dim)
        out = F.scaled_dot_product_attention(
            q.reshape(batch, spec.n_kv_heads, spec.n_heads // spec.n_kv_heads, spec.head_dim),
            keys.view(shape).transpose(1, 2),
            values.view(shape).transpose(1, 2),
            attn_mask=None if plan.mask is None else plan.mask[:, None, None, :],
            scale=spec.scale,
        )
        return out.reshape(batch, spec.n_heads, spec.head_dim)
