"""The pool: which request owns which pages, how long each is, and the view that a step binds."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from astrai_core.attention.metadata import AttentionMetadata, KVCache
from astrai_infer.cache.allocator import PageAllocator
from astrai_infer.cache.prefix import PrefixIndex
from astrai_infer.cache.storage import KVSpec, KVStorage, ReqToTokenPool
from astrai_infer.runtime.workspace import InferenceWorkspace

SCRATCH_SLOTS = 16
"""Slots behind the last page that belong to nobody: padded rows of a captured step write there."""


@dataclass
class _Row:
    """A live request's place in the pool."""

    pages: list[int] = field(default_factory=list)
    length: int = 0
    n_indexed: int = 0
    """Leading pages that the prefix index has seen."""
    parent: Hashable = None
    """Under which the index files the next page."""


@dataclass(frozen=True)
class BindState:
    """What the workspace holds since the last step (row S8)."""

    rows: list[int]
    lens: list[int]
    decode: bool

    def is_steady_increment(self, rows: Sequence[int], lens: Sequence[int], decode: bool) -> bool:
        """Whether the same requests decode again, each one token longer."""
        return (
            self.decode
            and decode
            and self.rows == list(rows)
            and all(n == m + 1 for n, m in zip(lens, self.lens, strict=True))
        )


class PagePool:
    """Owns storage and table; a live request owns a row and pages, and the pool tracks its length (row C3).

    Parameters
    ----------
    n_pages
        Pages that requests can own.
    prefix_cache
        Keep the pages of finished requests, to be found by the tokens they hold.
    contiguous
        Identity allocation (row C6): a page holds a whole sequence and row r owns page r, so that the keys of a
        request lie in one piece at ``r * page_size``. There is a page per row then, and no prefix cache.
    """

    def __init__(
        self,
        spec: KVSpec,
        n_pages: int,
        page_size: int,
        n_rows: int,
        max_seq_len: int,
        device: torch.device,
        *,
        prefix_cache: bool = True,
        contiguous: bool = False,
    ) -> None:
        assert not contiguous or (n_pages == n_rows and page_size >= max_seq_len and not prefix_cache), "one page a row"
        self.contiguous = contiguous
        self.page_size = page_size
        self.max_seq_len = max_seq_len
        self.prefix = PrefixIndex(page_size) if prefix_cache else None
        self.allocator = PageAllocator(n_pages, on_evict=self._forget)
        self.storage = KVStorage(spec, n_pages * page_size + SCRATCH_SLOTS, device)
        self.req_to_token = ReqToTokenPool(n_rows, max_seq_len, device)
        self.device = device
        self._free_rows = list(range(n_rows - 1, -1, -1))
        self._rows: dict[int, _Row] = {}
        self._bound = BindState([], [], False)

    @property
    def capacity(self) -> int:
        """Tokens that one request alone could hold."""
        return min(self.allocator.n_pages * self.page_size, self.max_seq_len)

    def pages_for(self, n_tokens: int) -> int:
        """Pages that `n_tokens` of one request occupy."""
        return -(-n_tokens // self.page_size)

    def length(self, row: int) -> int:
        """Tokens of the request in `row` that have slots."""
        return self._rows[row].length

    def admit(self, token_ids: Sequence[int], namespace: Hashable, *, match: bool = True) -> tuple[int, int] | None:
        """Take a row for a request if it and the pages for all of `token_ids` are there.

        Parameters
        ----------
        token_ids
            Everything the request has so far.
        namespace
            (weight version, adapter) under which its keys and values are computed.
        match
            Look for its prefix among the pages that are kept.

        Returns
        -------
        (row, tokens found in the prefix cache), or None if there is no room.
        """
        if not self._free_rows:
            return None
        if self.contiguous:
            pages = self.allocator.alloc(1)
            assert pages is not None, "a free row has a free page"
            row = pages[0]
            self._free_rows.remove(row)
            self._rows[row] = _Row([row])
            self._write_table(row, 0, [row])
            return row, 0
        found: list[int] = []
        parent = namespace
        if match and self.prefix is not None:
            found, parent = self.prefix.match(namespace, token_ids)
        revived = sum(self.allocator.is_cached(page) for page in found)
        if self.pages_for(len(token_ids)) - len(found) > self.allocator.n_available - revived:
            return None
        for page in found:
            self.allocator.share(page)
        row = self._free_rows.pop()
        self._rows[row] = _Row(found, len(found) * self.page_size, len(found), parent)
        self._write_table(row, 0, found)
        return row, len(found) * self.page_size

    def extend(self, row: int, n_tokens: int) -> bool:
        """Give the request in `row` slots for its next `n_tokens`; return False, unchanged, if there is no room."""
        state = self._rows[row]
        missing = self.pages_for(state.length + n_tokens) - len(state.pages)
        if missing > 0:
            new = self.allocator.alloc(missing)
            if new is None:
                return False
            self._write_table(row, len(state.pages), new)
            state.pages.extend(new)
        state.length += n_tokens
        return True

    def record(self, row: int, token_ids: Sequence[int], computed_len: int) -> None:
        """Index the pages that are full now that keys and values of `computed_len` tokens are written."""
        if self.prefix is None:
            return
        state, size = self._rows[row], self.page_size
        while (state.n_indexed + 1) * size <= computed_len:
            i = state.n_indexed
            state.parent = self.prefix.insert(state.parent, token_ids[i * size : (i + 1) * size], state.pages[i])
            state.n_indexed += 1

    def release(self, row: int) -> None:
        """Give the row and its pages back; indexed pages stay cached until their place is needed."""
        pages = self._rows.pop(row).pages
        prefix = self.prefix
        self.allocator.release(reversed(pages), keep=lambda page: prefix is not None and page in prefix)
        self._free_rows.append(row)

    def clear_prefix_cache(self) -> None:
        """Forget all pages that nobody uses."""
        self.allocator.drop_cached()

    def _forget(self, page: int) -> None:
        assert self.prefix is not None, "only indexed pages are cached"
        self.prefix.remove(page)

    def _write_table(self, row: int, n_before: int, pages: list[int]) -> None:
        start_pos = n_before * self.page_size
        first_locs = np.array(pages, dtype=np.int32)[:, None] * np.int32(self.page_size)
        locs = (first_locs + np.arange(self.page_size, dtype=np.int32)).reshape(-1)
        self.req_to_token.write(row, start_pos, locs[: self.max_seq_len - start_pos])

    def bind_tasks(self, rows: Sequence[int], q_lens: Sequence[int], workspace: InferenceWorkspace) -> KVCache:
        """Build the view of one step in the workspace; call :meth:`extend` for each row first.

        While the same requests decode, lengths and prefix sums are incremented in place (rows C2, C4, C5).

        Parameters
        ----------
        rows
            Rows of the step's requests, in the order of its tokens.
        q_lens
            New tokens of each; they are the last of the row's length.
        """
        lens = [self._rows[row].length for row in rows]
        n, host = len(rows), self.req_to_token.host
        decode = all(q == 1 for q in q_lens)
        if self._bound.is_steady_increment(rows, lens, decode):
            seq_lens, kv_indptr = workspace.advance(n)
            req_indices = workspace.req_indices.device_tensor[:n]
            qo_indptr = workspace.qo_indptr.device_tensor[: n + 1]
            out_loc = host[workspace.req_indices.host[:n], np.array(lens) - 1]
        else:
            seq_lens, req_indices = workspace.seq_lens.put(lens), workspace.req_indices.put(rows)
            for buffer, counts in ((workspace.kv_indptr, lens), (workspace.qo_indptr, q_lens)):
                np.cumsum(counts, out=buffer.host[1 : n + 1])
            kv_indptr, qo_indptr = workspace.kv_indptr.sync(n + 1), workspace.qo_indptr.sync(n + 1)
            out_loc = np.concatenate([host[row, end - q : end] for row, end, q in zip(rows, lens, q_lens, strict=True)])
        self._bound = BindState(list(rows), lens, decode)
        metadata = AttentionMetadata(
            phase="decode" if decode else "prefill",
            req_to_token=self.req_to_token.table,
            req_indices=req_indices,
            seq_lens=seq_lens,
            kv_indptr=kv_indptr,
            qo_indptr=qo_indptr,
            out_cache_loc=workspace.out_cache_loc.put(out_loc),
            seq_lens_host=tuple(lens),
            q_lens_host=tuple(q_lens),
        )
        return KVCache(self.storage.k_buffer, self.storage.v_buffer, metadata)
