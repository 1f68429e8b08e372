"""Every tensor that a step fills, at an address that never changes (row W1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


class Buffer:
    """A device tensor and the host array it is filled from; on a CPU they are the same memory."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        host = torch.zeros(size, dtype=dtype, pin_memory=device.type == "cuda")
        self.host: np.ndarray = host.numpy()
        self._staging = host
        self.device_tensor: Tensor = host if device.type == "cpu" else torch.zeros(size, dtype=dtype, device=device)
        self._views: dict[int, Tensor] = {}

    def first(self, n: int) -> Tensor:
        """Return the first `n` elements on the device; the same view each time, since the address never changes."""
        view = self._views.get(n)
        if view is None:
            view = self._views[n] = self.device_tensor[:n]
        return view

    def put(self, values: Sequence[int] | np.ndarray) -> Tensor:
        """Copy `values` to the front and return that part of the device tensor."""
        n = len(values)
        self.host[:n] = values
        return self.sync(n)

    def sync(self, n: int) -> Tensor:
        """Send the first `n` host values to the device and return them there."""
        view = self.first(n)
        if self.device_tensor is not self._staging:
            view.copy_(self._staging[:n], non_blocking=True)
        return view


@dataclass(frozen=True)
class BindState:
    """What the workspace holds since the last step (row S8)."""

    rows: list[int]
    lens: list[int]
    decode: bool

    def is_steady_increment(self, rows: list[int], lens: list[int], decode: bool) -> bool:
        """Whether the same requests decode again, each one token longer."""
        return self.decode and decode and self.rows == rows and [n + 1 for n in self.lens] == lens


class InferenceWorkspace:
    """The step's inputs and attention metadata; allocates once.

    Attributes
    ----------
    input_ids, position_ids
        ``[max_tokens]`` int64.
    out_cache_locs
        ``[max_tokens]`` int64, one for each group of layers.
    logit_rows
        ``[max_tokens]`` int64: which of the step's tokens need logits, where not all do.
    adapter_ids
        ``[max_tokens]`` int32: slot of each token's adapter, in an engine with adapters.
    req_indices, last_pos
        ``[max_rows]`` int64. last_pos: index within its sequence of the last token of each request that samples.
    seq_lens
        ``[max_rows]`` int32.
    kv_indptr, qo_indptr
        ``[max_rows + 1]`` int32.
    """

    def __init__(self, max_tokens: int, max_rows: int, device: torch.device, n_groups: int = 1) -> None:
        self.device = device
        self.bound = BindState([], [], False)
        self.input_ids, self.position_ids = (Buffer(max_tokens, torch.int64, device) for _ in range(2))
        self.out_cache_locs = tuple(Buffer(max_tokens, torch.int64, device) for _ in range(n_groups))
        self.logit_rows = Buffer(max_tokens, torch.int64, device)
        self.adapter_ids = Buffer(max_tokens, torch.int32, device)
        self.req_indices, self.last_pos = (Buffer(max_rows, torch.int64, device) for _ in range(2))
        self.seq_lens = Buffer(max_rows, torch.int32, device)
        self.kv_indptr, self.qo_indptr = (Buffer(max_rows + 1, torch.int32, device) for _ in range(2))
        self._increments = Buffer(max_rows + 1, torch.int32, device)
        self._increments.put(range(max_rows + 1))

    def advance(self, batch: int) -> tuple[Tensor, Tensor]:
        """Grow each of `batch` sequences by one token in place (rows C4, C5); return seq_lens and kv_indptr."""
        seq_lens, kv_indptr = self.seq_lens.first(batch), self.kv_indptr.first(batch + 1)
        seq_lens += 1
        kv_indptr += self._increments.first(batch + 1)
        return seq_lens, kv_indptr
