"""The tensors of the KV cache: keys and values, and the table from position to slot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from astrai_core.config.model import ModelConfig


@dataclass(frozen=True)
class KVSpec:
    """Shape of the keys and values of a group of layers."""

    n_layers: int
    n_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config: ModelConfig, dtype: torch.dtype) -> KVSpec:
        """Describe all layers of a model."""
        return cls(config.num_hidden_layers, config.num_key_value_heads, config.head_dim, dtype)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim * self.dtype.itemsize


class KVStorage:
    """Keys and values of `size` slots (row C1).

    Attributes
    ----------
    k_buffer, v_buffer
        ``[n_layers, size, n_kv_heads, head_dim]``; uninitialised: a slot is read only after it was written.
    """

    k_buffer: Tensor
    v_buffer: Tensor

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
        shape = (self.spec.n_layers, size, self.spec.n_kv_heads, self.spec.head_dim)
        self.k_buffer = torch.empty(shape, dtype=self.spec.dtype, device=self.device)
        self.v_buffer = torch.empty(shape, dtype=self.spec.dtype, device=self.device)


class ReqToTokenPool:
    """Row of a live request and position -> physical slot.

    The host copy is the truth; `table` follows it (on a CPU they are the same memory).
    """

    def __init__(self, n_rows: int, max_seq_len: int, device: torch.device) -> None:
        self.host = np.zeros((n_rows, max_seq_len), dtype=np.int32)
        mirror = torch.from_numpy(self.host)
        self._shared = device.type == "cpu"
        self.table: Tensor = mirror if self._shared else mirror.to(device)

    def write(self, row: int, start_pos: int, locs: np.ndarray) -> None:
        """Map positions ``start_pos ..`` of a row to the given slots (int32)."""
        end_pos = start_pos + len(locs)
        self.host[row, start_pos:end_pos] = locs
        if not self._shared:
            self.table[row, start_pos:end_pos].copy_(torch.from_numpy(locs), non_blocking=True)
