"""Every tensor that a step fills, at an address that never changes (row W1)."""

from __future__ import annotations

from collections.abc import Sequence

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

    def put(self, values: Sequence[int] | np.ndarray) -> Tensor:
        """Copy `values` to the front and return that part of the device tensor."""
        n = len(values)
        self.host[:n] = values
        return self.sync(n)

    def sync(self, n: int) -> Tensor:
        """Send the first `n` host values to the device and return them there."""
        view = self.device_tensor[:n]
        if self.device_tensor is not self._staging:
            view.copy_(self._staging[:n], non_blocking=True)
        return view


class InferenceWorkspace:
    """The step's inputs and attention metadata; allocates once.

    Attributes
    ----------
    input_ids, position_ids, out_cache_loc
        ``[max_tokens]`` int64.
    req_indices
        ``[max_rows]`` int64.
    seq_lens
        ``[max_rows]`` int32.
    kv_indptr, qo_indptr
        ``[max_rows + 1]`` int32.
    """

    def __init__(self, max_tokens: int, max_rows: int, device: torch.device) -> None:
        self.device = device
        self.input_ids, self.position_ids, self.out_cache_loc = (
            Buffer(max_tokens, torch.int64, device) for _ in range(3)
        )
        self.req_indices = Buffer(max_rows, torch.int64, device)
        self.seq_lens = Buffer(max_rows, torch.int32, device)
        self.kv_indptr, self.qo_indptr = (Buffer(max_rows + 1, torch.int32, device) for _ in range(2))
        self._increments = torch.arange(max_rows + 1, dtype=torch.int32, device=device)

    def advance(self, batch: int) -> tuple[Tensor, Tensor]:
        """Grow each of `batch` sequences by one token in place (rows C4, C5); return seq_lens and kv_indptr."""
        seq_lens, kv_indptr = self.seq_lens.device_tensor[:batch], self.kv_indptr.device_tensor[: batch + 1]
        seq_lens += 1
        kv_indptr += self._increments[: batch + 1]
        return seq_lens, kv_indptr
