"""The pool: which request owns which pages, how long each is, and the view that a step binds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from astrai_core.attention.metadata import AttentionMetadata, KVCache
from astrai_infer.cache.allocator import PageAllocator
from astrai_infer.cache.storage import KVSpec, KVStorage, ReqToTokenPool

SCRATCH_PAGES = 1
"""Page 0 belongs to nobody: padded rows of a captured step write there."""


class PagePool:
    """Owns storage and table; a live request owns a row and pages, and the pool tracks its length (row C3).

    Parameters
    ----------
    n_pages
        Pages that requests can own.
    """

    def __init__(
        self, spec: KVSpec, n_pages: int, page_size: int, n_rows: int, max_seq_len: int, device: torch.device
    ) -> None:
        self.page_size = page_size
        self.max_seq_len = max_seq_len
        self.allocator = PageAllocator(n_pages, first=SCRATCH_PAGES)
        self.storage = KVStorage(spec, (n_pages + SCRATCH_PAGES) * page_size, device)
        self.req_to_token = ReqToTokenPool(n_rows, max_seq_len, device)
        self.device = device
        self._free_rows = list(range(n_rows - 1, -1, -1))
        self._pages: list[list[int]] = [[] for _ in range(n_rows)]
        self._lengths = [0] * n_rows

    @property
    def capacity(self) -> int:
        """Tokens that one request alone could hold."""
        return min(self.allocator.n_pages * self.page_size, self.max_seq_len)

    def pages_for(self, n_tokens: int) -> int:
        """Pages that `n_tokens` of one request occupy."""
        return -(-n_tokens // self.page_size)

    def can_admit(self, n_tokens: int) -> bool:
        """Whether a row and the pages for `n_tokens` are free."""
        return bool(self._free_rows) and self.allocator.can_alloc(self.pages_for(n_tokens))

    def acquire_row(self) -> int:
        """Take a free row; ask :meth:`can_admit` first."""
        return self._free_rows.pop()

    def length(self, row: int) -> int:
        """Tokens of the request in `row` that have slots."""
        return self._lengths[row]

    def extend(self, row: int, n_tokens: int) -> bool:
        """Give the request in `row` slots for its next `n_tokens`; return False, unchanged, if there is no room."""
        length, pages = self._lengths[row], self._pages[row]
        missing = self.pages_for(length + n_tokens) - len(pages)
        if missing > 0:
            new = self.allocator.alloc(missing)
            if new is None:
                return False
            start_pos = len(pages) * self.page_size
            pages.extend(new)
            locs = (np.array(new, dtype=np.int32)[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1)
            self.req_to_token.write(row, start_pos, locs[: self.max_seq_len - start_pos].astype(np.int32))
        self._lengths[row] = length + n_tokens
        return True

    def release(self, row: int) -> None:
        """Give the row and its pages back."""
        self.allocator.free(self._pages[row])
        self._pages[row] = []
        self._lengths[row] = 0
        self._free_rows.append(row)

    def bind_tasks(self, rows: Sequence[int], q_lens: Sequence[int]) -> KVCache:
        """Build the view of one step; call :meth:`extend` for each row first.

        Parameters
        ----------
        rows
            Rows of the step's requests, in the order of its tokens.
        q_lens
            New tokens of each; they are the last of the row's length.
        """
        lens = [self._lengths[row] for row in rows]
        host = self.req_to_token.host
        out_loc = np.concatenate([host[row, n - q : n] for row, n, q in zip(rows, lens, q_lens, strict=True)])
        kv_indptr = np.zeros(len(rows) + 1, dtype=np.int32)
        qo_indptr = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(lens, out=kv_indptr[1:])
        np.cumsum(q_lens, out=qo_indptr[1:])
        metadata = AttentionMetadata(
            phase="decode" if all(q == 1 for q in q_lens) else "prefill",
            req_to_token=self.req_to_token.table,
            req_indices=self._to_device(np.array(rows, dtype=np.int64)),
            seq_lens=self._to_device(np.array(lens, dtype=np.int32)),
            kv_indptr=self._to_device(kv_indptr),
            qo_indptr=self._to_device(qo_indptr),
            out_cache_loc=self._to_device(out_loc.astype(np.int64)),
            seq_lens_host=tuple(lens),
            q_lens_host=tuple(q_lens),
        )
        return KVCache(self.storage.k_buffer, self.storage.v_buffer, metadata)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)
