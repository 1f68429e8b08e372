"""What one step tells the attention layers: :class:`AttentionMetadata`, and the pool it points into: :class:`KVCache`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

Phase = Literal["prefill", "decode"]


@dataclass
class AttentionMetadata:
    """Lengths and locations of one step, shared by all layers.

    Requests stand in the order of the step's tokens. Host lengths (tuples) equal the device tensors; they let a
    backend size its work without reading the device.
    """

    phase: Phase
    """"decode": one new token per request; "prefill": ragged, any mix of chunks and single tokens."""
    req_to_token: Tensor
    """``[n_slots, max_seq_len]`` int32: physical slot of every position of every live request."""
    req_indices: Tensor
    """``[batch]`` int64: the requests' rows of req_to_token."""
    seq_lens: Tensor
    """``[batch]`` int32: keys each request has after this step's are written."""
    kv_indptr: Tensor
    """``[batch + 1]`` int32: prefix sum of seq_lens."""
    qo_indptr: Tensor
    """``[batch + 1]`` int32: prefix sum of the step's tokens per request."""
    out_cache_loc: Tensor
    """``[tokens]`` int64: slot into which each new token's key and value go."""
    seq_lens_host: tuple[int, ...]
    """seq_lens on the host."""
    q_lens_host: tuple[int, ...]
    """Tokens per request in this step, on the host."""
    plan: Any = None
    """What the backend's ``plan`` prepared for this step."""


@dataclass
class KVCache:
    """Per-step view of the pool: buffers and metadata. Plain data; the pool allocates, the backend writes and reads."""

    k_buffer: Tensor
    """``[n_layers, size, n_kv_heads, head_dim]``."""
    v_buffer: Tensor
    """``[n_layers, size, n_kv_heads, head_dim]``."""
    metadata: AttentionMetadata

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the step's keys and values.

        Parameters
        ----------
        k, v
            ``[tokens, n_kv_heads, head_dim]`` in the buffers' dtype.
        """
        loc = self.metadata.out_cache_loc
        self.k_buffer[layer].index_copy_(0, loc, k)
        self.v_buffer[layer].index_copy_(0, loc, v)
