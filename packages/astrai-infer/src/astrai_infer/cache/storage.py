"""The tensors of the KV cache: keys and values, and the table from position to slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from astrai_core.config.model import ModelConfig

KVKind = Literal["full", "window"]
""""full" keeps every position, "window" only those that a later query can see."""

SCALE_BYTES = 4
"""Of a token and head, for keys and for values, where they are float8_e4m3fn."""


@dataclass(frozen=True)
class KVSpec:
    """Shape of the keys and values of a group of layers, and how long they are kept."""

    kind: KVKind
    layers: tuple[int, ...]
    """Layers of the model, ascending."""
    n_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    window: int | None = None
    """Keys that a query of a "window" group sees, its own included; None for "full"."""

    @classmethod
    def groups(
        cls, config: ModelConfig, dtype: torch.dtype, *, whole: bool = False, windows: Sequence[int | None] = ()
    ) -> tuple[KVSpec, ...]:
        """Describe all layers of a model; those with the same attention window share a group.

        Parameters
        ----------
        whole
            Keep every position in one "full" group, whatever windows the layers have.
        windows
            There is a group for each of them, in this order, be it without layers; other windows come behind.
        """
        layers: dict[int | None, list[int]] = {window: [] for window in windows}
        for layer in range(config.num_hidden_layers):
            layers.setdefault(None if whole else config.window(layer), []).append(layer)
        return tuple(
            cls(
                "full" if window is None else "window",
                tuple(group),
                config.num_key_value_heads,
                config.head_dim,
                dtype,
                window,
            )
            for window, group in layers.items()
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values over the group's layers."""
        head_bytes = self.head_dim * self.dtype.itemsize + (SCALE_BYTES if self.has_scales else 0)
        return 2 * len(self.layers) * self.n_kv_heads * head_bytes

    @property
    def has_scales(self) -> bool:
        """Whether each token and head has a scale."""
        return self.dtype == torch.float8_e4m3fn

    def pages_for(self, n_tokens: int, page_size: int, chunk_len: int) -> int:
        """Most pages that a request of `n_tokens` holds at once if a step feeds at most `chunk_len` of its tokens."""
        pages = -(-n_tokens // page_size)
        if self.window is None:
            return pages
        # A chunk and the window - 1 keys before it, on pages that need not begin where these keys do.
        return min(pages, (self.window + chunk_len - 3 + page_size) // page_size + 1)

    def pages_for_all(self, n_seqs: int, n_tokens: int, page_size: int, batch_len: int) -> int:
        """Most pages that `n_seqs` requests of `n_tokens` hold at once if a step feeds `batch_len` tokens in all."""
        # A decoding request needs pages_for(.., 1); q tokens instead of one need at most 1 + (q - 1) // page_size more.
        of_batch = n_seqs * (self.pages_for(n_tokens, page_size, 1) + 1) + batch_len // page_size
        return min(n_seqs * self.pages_for(n_tokens, page_size, batch_len), of_batch)


class KVStorage:
    """Keys and values of a group of layers in `size` slots (row C1).

    Attributes
    ----------
    k_buffer, v_buffer
        ``[len(spec.layers), size, n_kv_heads, head_dim]``; uninitialised: a slot is read only after it was written.
    k_scale, v_scale
        ``[len(spec.layers), size, n_kv_heads]`` fp32; without elements unless ``spec.has_scales``.
    """

    k_buffer: Tensor
    v_buffer: Tensor
    k_scale: Tensor
    v_scale: Tensor

    def __init__(self, spec: KVSpec, size: int, device: torch.device) -> None:
        self.spec = spec
        self.size = size
        self.device = device
        self.allocate()

    def allocate(self) -> None:
        """Take the memory (again)."""
        self._buffers(self.size)

    def free(self) -> None:
        """Give the memory back; nothing may be stored until :meth:`allocate`."""
        self._buffers(0)

    def _buffers(self, size: int) -> None:
        shape = (len(self.spec.layers), size, self.spec.n_kv_heads, self.spec.head_dim)
        self.k_buffer = torch.empty(shape, dtype=self.spec.dtype, device=self.device)
        self.v_buffer = torch.empty(shape, dtype=self.spec.dtype, device=self.device)
        scales = shape[:-1] if self.spec.has_scales else (len(self.spec.layers), 0, self.spec.n_kv_heads)
        self.k_scale = torch.empty(scales, dtype=torch.float32, device=self.device)
        self.v_scale = torch.empty(scales, dtype=torch.float32, device=self.device)


class ReqToTokenPool:
    """Row of a live request and position -> physical slot.

    The host copy is the truth; `table` follows it (on a CPU they are the same memory). One row more than there are
    requests belongs to nobody: padded rows of a step use it, and all its positions are the scratch slot.

    Attributes
    ----------
    pending
        None: `table` follows at once. A list: what changed since it was last emptied, as (row, first, end position);
        whoever runs the steps takes it along with the step's other inputs.
    """

    def __init__(self, n_rows: int, max_seq_len: int, device: torch.device, scratch_slot: int = 0) -> None:
        self.max_seq_len = max_seq_len
        self.host = np.zeros((n_rows + 1, max_seq_len), dtype=np.int32)
        self.host[n_rows] = scratch_slot
        self.scratch_slot = scratch_slot
        mirror = torch.from_numpy(self.host)
        self._shared = device.type == "cpu"
        self.table: Tensor = mirror if self._shared else mirror.to(device)
        self.pending: list[tuple[int, int, int]] | None = None

    def write(self, row: int, start_pos: int, locs: np.ndarray) -> None:
        """Map positions ``start_pos ..`` of a row to the given slots (int32)."""
        end_pos = start_pos + len(locs)
        self.host[row, start_pos:end_pos] = locs
        if self.pending is not None:
            self.pending.append((row, start_pos, end_pos))
        elif not self._shared:
            self.table[row, start_pos:end_pos].copy_(torch.from_numpy(locs), non_blocking=True)
