"""Groups of layers that keep the same positions: their pages, table and storage, and what a model sees of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from astrai_core.attention.metadata import AttentionMetadata, KVCache
from astrai_infer.cache.allocator import PageAllocator
from astrai_infer.cache.storage import KVSpec, KVStorage, ReqToTokenPool

SCRATCH_SLOTS = 16
"""Slots behind the last page that belong to nobody: padded rows of a captured step write there."""


class PageGroup:
    """Pages and table of the layers with one attention window, and their storage: one for each model, for the same slots.

    Parameters
    ----------
    specs
        The group's layers of each model; all have the same window.
    """

    def __init__(
        self,
        specs: Sequence[KVSpec],
        n_pages: int,
        page_size: int,
        n_rows: int,
        max_seq_len: int,
        device: torch.device,
        on_evict: Callable[[int], None],
    ) -> None:
        self.spec = specs[0]
        self.page_size = page_size
        self.allocator = PageAllocator(n_pages, on_evict=on_evict)
        self.storages = tuple(KVStorage(spec, n_pages * page_size + SCRATCH_SLOTS, device) for spec in specs)
        self.req_to_token = ReqToTokenPool(n_rows, max_seq_len, device, scratch_slot=n_pages * page_size)
        self._slots = np.arange(n_pages * page_size, dtype=np.int32).reshape(n_pages, page_size)

    @property
    def storage(self) -> KVStorage:
        """Of the first model."""
        return self.storages[0]

    def write_table(self, row: int, n_before: int, pages: list[int]) -> None:
        """Map the positions behind the first `n_before` pages of a row to `pages`."""
        start_pos = n_before * self.page_size
        locs = self._slots[pages].reshape(-1)
        self.req_to_token.write(row, start_pos, locs[: self.req_to_token.max_seq_len - start_pos])


class LayerBuffers:
    """One model's buffers, layer by layer; looked up once, not in every step. The views keep the memory alive.

    Parameters
    ----------
    storages
        Of the model, one for each group.
    """

    def __init__(self, storages: Sequence[KVStorage]) -> None:
        places = sorted((layer, i, n) for i, s in enumerate(storages) for n, layer in enumerate(s.spec.layers))
        self._group_of = tuple(i for _, i, _ in places)
        self._k = tuple(storages[i].k_buffer[n] for _, i, n in places)
        self._v = tuple(storages[i].v_buffer[n] for _, i, n in places)
        self._k_scales = self._v_scales = None
        if storages[0].spec.has_scales:
            self._k_scales = tuple(storages[i].k_scale[n] for _, i, n in places)
            self._v_scales = tuple(storages[i].v_scale[n] for _, i, n in places)

    def view(self, groups: list[AttentionMetadata]) -> KVCache:
        """Put a step's metadata, one for each group, beside the buffers."""
        return KVCache(self._k, self._v, self._group_of, groups, self._k_scales, self._v_scales)
