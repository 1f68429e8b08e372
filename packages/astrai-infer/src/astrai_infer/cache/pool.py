"""The pool: which request owns which pages, how long each is, and the view that a step binds."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from astrai_core.attention.metadata import AttentionMetadata, KVCache
from astrai_infer.cache.groups import LayerBuffers, PageGroup
from astrai_infer.cache.prefix import PrefixIndex
from astrai_infer.cache.storage import KVSpec
from astrai_infer.runtime.workspace import BindState, InferenceWorkspace


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


class PagePool:
    """Owns storage and tables; a live request owns a row and pages, and the pool tracks its length (row C3).

    There is an allocator, a storage per model and a table per group of layers. A request has the same row in each, and
    its pages span the same positions, but a "window" group gives a page back as soon as no later query can see it.

    Parameters
    ----------
    specs
        Groups of layers, see :meth:`KVSpec.groups`.
    n_pages
        Pages that requests can own, per group.
    draft_specs
        The same groups of a second model, if there is one: it reads and writes the same slots of a storage of its own, so
        whatever holds for the pages of the first holds for its keys and values.
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
        draft_specs: Sequence[KVSpec] = (),
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
        self.n_rows = n_rows
        self.chunk_len = min(chunk_len or max_seq_len, max_seq_len)
        self.prefix = PrefixIndex(page_size) if prefix_cache else None
        models = [specs, draft_specs] if draft_specs else [specs]
        self.groups = tuple(
            PageGroup(of_models, n, page_size, n_rows, max_seq_len, device, self._forget)
            for of_models, n in zip(zip(*models, strict=True), n_pages, strict=True)
        )
        self._gives_back = any(group.spec.kind == "window" for group in self.groups)
        self._windows = [(i, spec.window) for i, spec in enumerate(specs) if spec.window is not None]
        self._view_layers()
        self.device = device
        self._free_rows = list(range(n_rows - 1, -1, -1))
        self._rows: dict[int, _Row] = {}

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
            for storage in group.storages:
                storage.free()
        self._view_layers()

    def allocate(self) -> bool:
        """Take the memory again after :meth:`free`; return False, having done nothing, if it is there."""
        storages = [storage for group in self.groups for storage in group.storages]
        gone = [storage for storage in storages if storage.k_buffer.shape[1] == 0]
        for storage in gone:
            storage.allocate()
        self._view_layers()
        return bool(gone)

    def _view_layers(self) -> None:
        of_models = zip(*(group.storages for group in self.groups), strict=True)
        self._buffers = tuple(LayerBuffers(storages) for storages in of_models)

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

    def bind_tasks(
        self,
        rows: list[int],
        q_lens: list[int],
        workspace: InferenceWorkspace,
        lens: list[int] | None = None,
        model: int = 0,
    ) -> KVCache:
        """Build the view of one step in the workspace; call :meth:`extend` for each row first.

        While the same requests decode, lengths and prefix sums are incremented in place (rows C2, C4, C5).

        Parameters
        ----------
        rows
            Rows of the step's requests, in the order of its tokens.
        q_lens
            New tokens of each; they are the last of its length.
        lens
            Length of each with its new tokens; None: all that it has slots for.
        model
            Whose storage is seen.
        """
        lens = [self._rows[row].length for row in rows] if lens is None else lens
        n = len(rows)
        hosts = [group.req_to_token.host for group in self.groups]
        decode = q_lens.count(1) == n
        if workspace.bound.is_steady_increment(rows, lens, decode):
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
        workspace.bound = BindState(rows.copy(), lens, decode)
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
        return self.view(metadata, model)

    def view(self, groups: list[AttentionMetadata], model: int = 0) -> KVCache:
        """Put a step's metadata, one for each group of layers, beside a model's buffers."""
        return self._buffers[model].view(groups)
