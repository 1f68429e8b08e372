"""All of a step's inputs as one piece of memory, which one copy brings to the device (rows W1, C5)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from astrai_infer.runtime.shapes import StepShape

T = TypeVar("T")
ALIGN = 16

N_FLOATS, N_INTS = 6, 2
"""Sampling parameters of a request, see :mod:`astrai_infer.sampling.rows`."""


@dataclass(frozen=True)
class Fields(Generic[T]):
    """What a step tells the device, as numpy arrays on the host or tensors there.

    Lengths refer to a :class:`~astrai_infer.runtime.shapes.StepShape`; the groups are those of the KV pool.
    """

    req_indices: T
    """``[requests]`` int64: row of each in the tables; the scratch row for padding."""
    sample_rows: T
    """``[requests]`` int64: the row that gets the request's new token; the scratch row if it wants none."""
    position_ids: T
    """``[tokens]`` int64."""
    out_cache_locs: T
    """``[groups, tokens]`` int64."""
    host_ids: T
    """``[chunk tokens]`` int64: ids of the tokens behind the decoding rows, whose own ids are on the device; of all tokens
    where the shape has the host name them."""
    logit_rows: T
    """``[logits]`` int64: tokens of the step whose logits are wanted; empty if it is all of them."""
    sample_at: T
    """``[requests]`` int64: the row of the logits that each samples from; empty if it is its own."""
    last_pos: T
    """``[requests]`` int64: position of each one's last token."""
    ints: T
    """``[requests, 2]`` int64: sampling parameters."""
    floats: T
    """``[requests, 6]`` fp32: the same."""
    seq_lens: T
    """``[requests]`` int32."""
    kv_indptr: T
    """``[requests + 1]`` int32."""
    qo_indptr: T
    """``[requests + 1]`` int32."""
    adapter_ids: T
    """``[tokens]`` int32: slot of each one's adapter, -1 for none; empty in an engine without adapters."""


@dataclass(frozen=True)
class Layout:
    """Where the fields of a shape lie."""

    sections: tuple[tuple[int, int, Any, tuple[int, ...]], ...]
    """(offset in bytes, bytes, numpy type, shape), in the order of :class:`Fields`."""
    n_bytes: int

    @classmethod
    def of(cls, shape: StepShape, n_groups: int, has_adapters: bool = False) -> Layout:
        """Lay the fields of `shape` out one after the other."""
        requests, tokens, chunk_tokens = shape.n_requests, shape.n_tokens, shape.n_chunk_tokens
        n_logits = 0 if chunk_tokens == 0 else requests if shape.n_logits is None else shape.n_logits
        long, single, short = np.int64, np.float32, np.int32
        fields: tuple[tuple[Any, tuple[int, ...]], ...] = (
            (long, (requests,)),
            (long, (requests,)),
            (long, (tokens,)),
            (long, (n_groups, tokens)),
            (long, (tokens if shape.verifies else chunk_tokens,)),
            (long, (n_logits,)),
            (long, (0 if shape.n_logits is None else requests,)),
            (long, (requests,)),
            (long, (requests, N_INTS)),
            (single, (requests, N_FLOATS)),
            (short, (requests,)),
            (short, (requests + 1,)),
            (short, (requests + 1,)),
            (short, (tokens if has_adapters else 0,)),
        )
        sections, offset = [], 0
        for dtype, size in fields:
            n_bytes = math.prod(size) * np.dtype(dtype).itemsize
            sections.append((offset, n_bytes, dtype, size))
            offset += -(-n_bytes // ALIGN) * ALIGN
        return cls(tuple(sections), offset)

    def on_host(self, memory: np.ndarray) -> Fields[np.ndarray]:
        """View the fields in a staging buffer (uint8)."""
        return self._view(lambda start, stop, dtype: memory[start:stop].view(dtype))

    def on_device(self, memory: Tensor) -> Fields[Tensor]:
        """View the fields in the device's buffer (uint8)."""
        types = {np.int64: torch.int64, np.int32: torch.int32, np.float32: torch.float32}
        return self._view(lambda start, stop, dtype: memory[start:stop].view(types[dtype]))

    def _view(self, cut: Callable[[int, int, Any], Any]) -> Fields[Any]:
        views = []
        for offset, n_bytes, dtype, size in self.sections:
            view = cut(offset, offset + n_bytes, dtype)
            views.append(view.reshape(size))
        return Fields(*views)


class Staging:
    """A piece of host memory that one step fills; it is free again when that step has ended on the device."""

    def __init__(self, n_bytes: int, n_rows: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.memory = torch.zeros(n_bytes, dtype=torch.uint8, pin_memory=pinned)
        self.bytes: np.ndarray = self.memory.numpy()
        self.tokens = torch.zeros(n_rows, dtype=torch.int64, pin_memory=pinned)
        """Receives the step's sampled tokens."""
        self.done = torch.cuda.Event() if pinned else None
        self.filled: tuple[StepShape, int] | None = None
        """What its unchanging part holds: shape and number of the batch."""
        self._fields: dict[StepShape, Fields[np.ndarray]] = {}

    def fields(self, shape: StepShape, layout: Layout) -> Fields[np.ndarray]:
        """View the fields of a shape."""
        fields = self._fields.get(shape)
        if fields is None:
            fields = layout.on_host(self.bytes)
            if shape.is_bucket:
                self._fields[shape] = fields
        return fields

    def record(self) -> None:
        """Mark the end of the step in the device's queue."""
        if self.done is not None:
            self.done.record()

    def wait(self) -> None:
        """Wait for that mark; returns at once if there is none."""
        if self.done is not None:
            self.done.synchronize()


class Packed:
    """The device's buffer and pieces of staging, filled in turn: one step runs while the next is prepared.

    Parameters
    ----------
    n_bytes
        Of the largest step's fields.
    n_deltas
        Entries of the tables' changes that fit behind them.
    has_adapters
        Whether tokens have adapters.
    n_steps
        Steps that can be in the device's queue at once.
    """

    def __init__(
        self,
        n_bytes: int,
        n_deltas: int,
        n_rows: int,
        n_groups: int,
        device: torch.device,
        *,
        has_adapters: bool = False,
        n_steps: int = 2,
    ) -> None:
        self.n_groups = n_groups
        self.has_adapters = has_adapters
        self.n_deltas = n_deltas
        n_bytes += ALIGN + 12 * n_deltas
        self.memory = torch.zeros(n_bytes, dtype=torch.uint8, device=device)
        self._ring = deque(Staging(n_bytes, n_rows, device) for _ in range(n_steps))
        self._layouts: dict[StepShape, tuple[Layout, Fields[Tensor]]] = {}

    def next(self) -> Staging:
        """Take the staging whose step is the oldest, when that step has ended."""
        self._ring.rotate()
        staging = self._ring[0]
        staging.wait()
        return staging

    def layout(self, shape: StepShape) -> tuple[Layout, Fields[Tensor]]:
        """Return where a shape's fields lie, and the fields on the device."""
        found = self._layouts.get(shape)
        if found is None:
            layout = Layout.of(shape, self.n_groups, self.has_adapters)
            found = layout, layout.on_device(self.memory)
            if shape.is_bucket:
                self._layouts[shape] = found
        return found

    def send(self, staging: Staging, layout: Layout, deltas: list[tuple[np.ndarray, np.ndarray]]) -> list[Tensor]:
        """Copy a filled step to the device.

        Parameters
        ----------
        deltas
            For each table that changed: flat indices (int64) and the values there (int32); at most `n_deltas` in all.

        Returns
        -------
        The same on the device: indices, values, indices, values, ...
        """
        end, spans = layout.n_bytes, []
        for array in (part for delta in deltas for part in delta):
            staging.bytes[end : end + array.nbytes] = array.view(np.uint8)
            spans.append((end, array.nbytes, torch.int64 if array.dtype == np.int64 else torch.int32))
            end += -(-array.nbytes // 8) * 8
        self.memory[:end].copy_(staging.memory[:end], non_blocking=True)
        staging.record()  # a step that fails from here on leaves a copy in the queue that reads this memory
        return [self.memory[start : start + n_bytes].view(dtype) for start, n_bytes, dtype in spans]
