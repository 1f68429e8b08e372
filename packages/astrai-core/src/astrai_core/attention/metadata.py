"""What one step tells the attention layers: :class:`AttentionMetadata`, and the pool it points into: :class:`KVCache`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

if TYPE_CHECKING:
    from astrai_core.attention.backend import AttentionSpec

Phase = Literal["prefill", "decode"]


@dataclass
class AttentionMetadata:
    """Lengths and locations of one step, shared by the layers of a group.

    Lengths and prefix sums are the same tensors in every group; `req_to_token`, `out_cache_loc`, `window` and `plan`
    are the group's own. Requests stand in the order of the step's tokens. Host lengths (tuples) equal the device
    tensors; they let a backend size its work without reading the device.
    """

    phase: Phase
    """"decode": one new token per request; "prefill": ragged, any mix of chunks and single tokens."""
    req_to_token: Tensor
    """``[n_slots, max_seq_len]`` int32: physical slot of every position that `window` leaves to a live request."""
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
    window: int | None = None
    """Keys that the group's layers see and the pool keeps; what a query of this step cannot see may be gone from
    req_to_token. None: everything is kept, whatever window a layer has."""
    page_size: int = 1
    """Positions ``i * page_size ..`` of a request lie in consecutive slots, from a multiple of page_size on."""
    contiguous: bool = False
    """Identity allocation: the positions of row r of req_to_token lie in slots ``r * page_size ..``."""
    n_single: int | None = None
    """Requests at the front that are run as single queries, where that is fixed in advance: a captured step keeps its
    shape whatever the lengths of the chunks behind them. None: as many as have one query each."""
    reads_own_keys: bool = False
    """Whether a query reads keys that this very step writes, besides its own token's: so where several requests of the
    step are positions of one sequence."""
    plan: Any = None
    """What the backend's ``plan`` prepared for this step."""


@dataclass
class KVCache:
    """Per-step view of the pool: buffers and metadata. Plain data; the pool allocates, the backend writes and reads."""

    k_buffers: Sequence[Tensor]
    """Per layer of the model: ``[size, n_kv_heads, head_dim]``; `size` is the same within a group."""
    v_buffers: Sequence[Tensor]
    """The same for values."""
    group_of: Sequence[int]
    """Per layer: its index in `groups`."""
    groups: Sequence[AttentionMetadata]
    k_scales: Sequence[Tensor] | None = None
    """Of float8_e4m3fn buffers, per layer: ``[size, n_kv_heads]`` fp32; a key is its scale times what is stored."""
    v_scales: Sequence[Tensor] | None = None
    """The same for values."""

    @property
    def phase(self) -> Phase:
        """What the step is, for all groups."""
        return self.groups[0].phase

    def of(self, layer: int) -> tuple[Tensor, Tensor, AttentionMetadata]:
        """Return a layer's keys and values, ``[size, n_kv_heads, head_dim]`` each, and the metadata of its group."""
        return self.k_buffers[layer], self.v_buffers[layer], self.groups[self.group_of[layer]]

    def scales(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """Return a layer's scales of keys and values, ``[size, n_kv_heads]`` each; None unless they are float8_e4m3fn."""
        if self.k_scales is None or self.v_scales is None:
            return None, None
        return self.k_scales[layer], self.v_scales[layer]

    def specs_of_groups(
        self, specs: Sequence[AttentionSpec]
    ) -> Iterator[tuple[AttentionMetadata, tuple[AttentionSpec, ...]]]:
        """Pair each group with those of `specs`, one for each attention window of the model, that its layers have."""
        own = {metadata.window for metadata in self.groups if metadata.window is not None}
        for metadata in self.groups:
            if metadata.window is None:
                yield metadata, tuple(spec for spec in specs if spec.window not in own)
            else:
                yield metadata, tuple(spec for spec in specs if spec.window == metadata.window)
