"""The pool: which request owns which pages, how long each is, and the view that a step binds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

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

    pages: list[list[int]]
    """Per group, in order; a window group's list lacks the leading pages that went back."""
    n_pages: int = 0
    """Pages that the positions with a slot span, the same in every group."""
    length: int = 0
    room: int = 0
    """Tokens that `n_pages` hold."""
    give_back_len: int = sys.maxsize
    """Computed length from which a window group has a page to give back."""
    n_indexed: int = 0
    """Leading pages that the prefix index has seen."""
    parent: Hashable = None
    """Under which the index files the next page."""


class PageGroup:
    """The storage, pages and table of the layers of one :class:`KVSpec`."""

    def __init__(
        self,
        spec: KVSpec,
        n_pages: int,
        page_size: int,
        n_rows: int,
        max_seq_len: int,
        device: torch.device,
        on_evict: Callable[[int], None],
    ) -> None:
        self.spec = spec
        self.page_size = page_size
        self.allocator = PageAllocator(n_pages, on_evict=on_evict)
        self.storage = KVStorage(spec, n_pages * page_size + SCRATCH_SLOTS, device)
        self.req_to_token = ReqToTokenPool(n_rows, max_seq_len, device, scratch_slot=n_pages * page_size)
        self._slots = np.arange(n_pages * page_size, dtype=np.int32).reshape(n_pages, page_size)

    def write_table(self, row: int, n_before: int, pages: list[int]) -> None:
        """Map the positions behind the first `n_before` pages of a row to `pages`."""
        start_pos = n_before * self.page_size
        locs = self._slots[pages].reshape(-1)
        self.req_to_token.write(row, start_pos, locs[: self.req_to_token.max_seq_len - start_pos])


@dataclass(frozen=True)
class BindState:
    """What the workspace holds since the last step (row S8)."""

    rows: list[int]
    lens: list[int]
    decode: bool

    def is_steady_increment(self, rows: list[int], lens: list[int], decode: bool) -> bool:
        """Whether the same requests decode again, each one token longer."""
        return self.decode and decode and self.rows == rows and [n + 1 for n in self.lens] == lens


class PagePool:
    """Owns storage and tables; a live request owns a row and pages, and the pool tracks its length (row C3).

    There is an allocator, a storage and a table per group of layers. A request has the same row in each, and its pages
    span the same positions, but a "window" group gives a page back as soon as no later query can see it.

    Parameters
    ----------
    specs
        Groups of layers, see :meth:`KVSpec.groups`.
    n_pages
        Pages that requests can own, per group.
    chunk_len
        Most tokens of one request that a step feeds; None if there is no limit.
    prefix_cache
        Keep the pages of finished requests, to be found by the tokens they hold. Needs every position of a request, so
        there is one "full" group then.
    contiguous
        Identity allocation (row C6): a page holds a whole sequence and row r owns page r, so that the keys of a
        request lie in one piece at ``r * page_size``. There is a page per row then, one "full" group and no prefix
        cache.
    """

    def __init__(
        self,
        specs: Sequence[KVSpec],
        n_pages: Sequence[int],
        page_size: int,
        n_rows: int,
        max_seq_len: int,
        device: torch.device,
        *,
        chunk_len: int | None = None,
        prefix_cache: bool = True,
        contiguous: bool = False,
    ) -> None:
        assert [spec.kind for spec in specs] == ["full"] or not (prefix_cache or contiguous), "they need one full group"
        assert not contiguous or (n_pages[0] == n_rows and page_size >= max_seq_len and not prefix_cache), (
            "one page a row"
        )
        self.contiguous = contiguous
        self.page_size = page_size
        self.max_seq_len = max_seq_len
        self.chunk_len = min(chunk_len or max_seq_len, max_seq_len)
        self.prefix = PrefixIndex(page_size) if prefix_cache else None
        self.groups = tuple(
            PageGroup(spec, n, page_size, n_rows, max_seq_len, device, self._forget)
            for spec, n in zip(specs, n_pages, strict=True)
        )
        self._gives_back = any(group.spec.kind == "window" for group in self.groups)
        self._windows = [(i, spec.window) for i, spec in enumerate(specs) if spec.window is not None]
        self._places = sorted(
            (layer, i, place) for i, spec in enumerate(specs) for place, layer in enumerate(spec.layers)
        )
        self._group_of = tuple(i for _, i, _ in self._places)
        self._view_layers()
        self.device = device
        self._free_rows = list(range(n_rows - 1, -1, -1))
        self._rows: dict[int, _Row] = {}
        self._bound = BindState([], [], False)

    @property
    def capacity(self) -> int:
        """Tokens that one request alone could hold."""
        held = [self.max_seq_len]
        for group in self.groups:
            n_pages = group.allocator.n_pages
            if group.spec.pages_for(self.max_seq_len, self.page_size, self.chunk_len) > n_pages:
                held.append(n_pages * self.page_size)
        return min(held)

    @property
    def n_pages(self) -> int:
        """Pages of all groups; ``n_free + n_cached + n_used``."""
        return sum(group.allocator.n_pages for group in self.groups)

    @property
    def n_free(self) -> int:
        """Pages of all groups without content worth keeping."""
        return sum(group.allocator.n_free for group in self.groups)

    @property
    def n_cached(self) -> int:
        """Pages of all groups that nobody uses and whose content is kept."""
        return sum(group.allocator.n_cached for group in self.groups)

    @property
    def n_used(self) -> int:
        """Pages of all groups that requests own."""
        return sum(group.allocator.n_used for group in self.groups)

    def pages_for(self, n_tokens: int) -> int:
        """Pages that `n_tokens` of one request span."""
        return -(-n_tokens // self.page_size)

    def length(self, row: int) -> int:
        """Tokens of the request in `row` that have slots."""
        return self._rows[row].length

    def admit(self, token_ids: Sequence[int], namespace: Hashable, *, match: bool = True) -> tuple[int, int] | None:
        """Take a row for a request if it and the pages for all of `token_ids` are there, in every group.

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
            pages = self.groups[0].allocator.alloc(1)
            assert pages is not None, "a free row has a free page"
            row = pages[0]
            self._free_rows.remove(row)
            self._rows[row] = _Row([pages], 1, room=self.page_size)
            self.groups[0].write_table(row, 0, pages)
            return row, 0
        found: list[int] = []
        parent = namespace
        if match and self.prefix is not None:
            found, parent = self.prefix.match(namespace, token_ids)
        for group in self.groups:  # `found` is empty where there are several
            n_revived = sum(group.allocator.is_cached(page) for page in found)
            n_needed = group.spec.pages_for(len(token_ids), self.page_size, self.chunk_len) - len(found)
            if n_needed > group.allocator.n_available - n_revived:
                return None
        row = self._free_rows.pop()
        state = self._rows[row] = _Row([[] for _ in self.groups], n_indexed=len(found), parent=parent)
        if self._windows:
            state.give_back_len = 0
        if found:
            for page in found:
                self.groups[0].allocator.share(page)
            self._append(row, state, [found])
            state.length = state.room
        return row, state.length

    def extend(self, row: int, n_tokens: int) -> bool:
        """Give the request in `row` slots for its next `n_tokens`; return False, unchanged, if there is no room.

        A group has room, or none gives anything.
        """
        state = self._rows[row]
        length = state.length + n_tokens
        if length > state.room:
            assert n_tokens <= self.chunk_len, "admission and capacity count on chunk_len"
            n_missing = self.pages_for(length) - state.n_pages
            if any(group.allocator.n_available < n_missing for group in self.groups):
                return False
            self._append(row, state, [group.allocator.alloc(n_missing) for group in self.groups])
        state.length = length
        return True

    def truncate(self, row: int, length: int) -> None:
        """Take back the slots of the request's positions from `length` on; its pages stay for what comes next."""
        state = self._rows[row]
        assert 0 < length <= state.length, "only what was extended is taken back"
        state.length = length

    def record(self, row: int, token_ids: Sequence[int], computed_len: int) -> int:
        """Take note that keys and values of `computed_len` tokens are written.

        The pages that are full now are indexed; pages whose keys no query from position `computed_len` on can see go
        back to their group.

        Returns
        -------
        The length from which on the next call has something to do.
        """
        state, size = self._rows[row], self.page_size
        if computed_len >= state.give_back_len:
            self._give_back(state, computed_len)
        if self.prefix is None:
            return computed_len + 1 if self._gives_back else sys.maxsize
        while (state.n_indexed + 1) * size <= computed_len:
            i = state.n_indexed
            state.parent = self.prefix.insert(state.parent, token_ids[i * size : (i + 1) * size], state.pages[0][i])
            state.n_indexed += 1
        return (state.n_indexed + 1) * size

    def release(self, row: int) -> None:
        """Give the row and its pages back; indexed pages stay cached until their place is needed."""
        prefix = self.prefix
        for group, pages in zip(self.groups, self._rows.pop(row).pages, strict=True):
            group.allocator.release(reversed(pages), keep=lambda page: prefix is not None and page in prefix)
        self._free_rows.append(row)

    def clear_prefix_cache(self) -> None:
        """Forget all pages that nobody uses."""
        for group in self.groups:
            group.allocator.drop_cached()

    def free(self) -> None:
        """Give the memory of the keys and values back; no step may run until :meth:`allocate`."""
        for group in self.groups:
            group.storage.free()
        self._view_layers()

    def allocate(self) -> bool:
        """Take the memory again after :meth:`free`; return False, having done nothing, if it is there."""
        gone = [group.storage for group in self.groups if group.storage.k_buffer.shape[1] == 0]
        for storage in gone:
            storage.allocate()
        self._view_layers()
        return bool(gone)

    def _view_layers(self) -> None:
        """Look each layer's buffers up once, not in every step. These views keep the memory alive."""
        storages = [group.storage for group in self.groups]
        self._k_buffers = tuple(storages[i].k_buffer[place] for _, i, place in self._places)
        self._v_buffers = tuple(storages[i].v_buffer[place] for _, i, place in self._places)
        self._k_scales = self._v_scales = None
        if storages[0].spec.has_scales:
            self._k_scales = tuple(storages[i].k_scale[place] for _, i, place in self._places)
            self._v_scales = tuple(storages[i].v_scale[place] for _, i, place in self._places)

    def _forget(self, page: int) -> None:
        assert self.prefix is not None, "only indexed pages are cached"
        self.prefix.remove(page)

    def _give_back(self, state: _Row, computed_len: int) -> None:
        """Release the pages of window groups that hold nothing but positions below ``computed_len - window + 1``."""
        state.give_back_len = sys.maxsize
        for i, window in self._windows:
            pages = state.pages[i]
            n_before = state.n_pages - len(pages)
            n_gone = max(0, (computed_len - window + 1) // self.page_size - n_before)
            self.groups[i].allocator.release(pages[:n_gone])
            del pages[:n_gone]
            next_len = (n_before + n_gone + 1) * self.page_size + window - 1
            state.give_back_len = min(state.give_back_len, next_len)

    def _append(self, row: int, state: _Row, pages: Sequence[list[int] | None]) -> None:
        """Give a row its next pages, as many in each group."""
        for group, own, new in zip(self.groups, state.pages, pages, strict=True):
            assert new is not None, "the caller made sure of the room"
            group.write_table(row, state.n_pages, new)
            own.extend(new)
        state.n_pages += len(pages[0] or ())
        state.room = state.n_pages * self.page_size

    def bind_tasks(self, rows: list[int], q_lens: list[int], workspace: InferenceWorkspace) -> KVCache:
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
        n = len(rows)
        hosts = [group.req_to_token.host for group in self.groups]
        decode = q_lens.count(1) == n
        if self._bound.is_steady_increment(rows, lens, decode):
            seq_lens, kv_indptr = workspace.advance(n)
            req_indices = workspace.req_indices.first(n)
            qo_indptr = workspace.qo_indptr.first(n + 1)
            last_pos, at = np.array(lens) - 1, workspace.req_indices.host[:n]
            out_locs = [host[at, last_pos] for host in hosts]
        else:
            seq_lens, req_indices = workspace.seq_lens.put(lens), workspace.req_indices.put(rows)
            for buffer, counts in ((workspace.kv_indptr, lens), (workspace.qo_indptr, q_lens)):
                np.cumsum(counts, out=buffer.host[1 : n + 1])
            kv_indptr, qo_indptr = workspace.kv_indptr.sync(n + 1), workspace.qo_indptr.sync(n + 1)
            ends = list(zip(rows, lens, q_lens, strict=True))
            out_locs = [np.concatenate([host[row, end - q : end] for row, end, q in ends]) for host in hosts]
        self._bound = BindState(rows.copy(), lens, decode)
        seq_lens_host, q_lens_host = tuple(lens), tuple(q_lens)
        metadata = [
            AttentionMetadata(
                phase="decode" if decode else "prefill",
                req_to_token=group.req_to_token.table,
                req_indices=req_indices,
                seq_lens=seq_lens,
                kv_indptr=kv_indptr,
                qo_indptr=qo_indptr,
                out_cache_loc=buffer.put(out_loc),
                seq_lens_host=seq_lens_host,
                q_lens_host=q_lens_host,
                window=group.spec.window,
                page_size=self.page_size,
                contiguous=self.contiguous,
            )
            for group, buffer, out_loc in zip(self.groups, workspace.out_cache_locs, out_locs, strict=True)
        ]
        return self.view(metadata)

    def view(self, groups: list[AttentionMetadata]) -> KVCache:
        """Put a step's metadata, one for each group of layers, beside the buffers."""
        return KVCache(self._k_buffers, self._v_buffers, self._group_of, groups, self._k_scales, self._v_scales)
