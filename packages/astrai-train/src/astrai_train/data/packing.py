"""Documents into rows of a fixed length (training rule 4).

A row is a list of spans ``(document, start, stop)``. Nothing is copied: a packing is a plan over document lengths.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Method = Literal["none", "simple", "bfd", "bfd_split"]
Overlong = Literal["truncate", "drop"]
Ints = NDArray[np.int64]


@dataclasses.dataclass(frozen=True, eq=False)
class Packing:
    """Which spans of which documents each row holds, and what was left out."""

    row_indptr: Ints
    """[rows + 1]: spans ``row_indptr[r]`` to ``row_indptr[r + 1]`` make row r."""

    doc: Ints
    """[spans] document."""

    start: Ints
    """[spans] first token of the span in its document."""

    stop: Ints
    """[spans] token behind the span's last."""

    n_split: int
    """Documents that lie in several spans."""

    n_truncated: int
    """Documents that lost their end."""

    n_dropped: int
    """Documents left out because they are longer than a row."""

    n_empty: int
    """Documents without a token."""

    n_tokens_lost: int
    """Tokens of documents that were truncated or dropped."""

    def __len__(self) -> int:
        return len(self.row_indptr) - 1

    def row(self, row: int) -> list[tuple[int, int, int]]:
        """Return the spans of a row as (document, start, stop)."""
        spans = slice(self.row_indptr[row], self.row_indptr[row + 1])
        return list(zip(self.doc[spans].tolist(), self.start[spans].tolist(), self.stop[spans].tolist(), strict=True))


def pack(lengths: Ints, seq_len: int, method: Method = "none", overlong: Overlong = "truncate") -> Packing:
    """Plan the rows.

    Parameters
    ----------
    lengths
        ``[documents]`` int64, tokens.
    seq_len
        Tokens of a row.
    method
        ``none``: one document a row. ``simple``: documents end to end, cut every `seq_len` tokens. ``bfd``: whole
        documents, longest first, each into the fullest row that still takes it (best-fit decreasing). ``bfd_split``:
        the same after cutting longer documents every `seq_len` tokens.
    overlong
        What becomes of a document longer than a row under ``none`` and ``bfd``; the other two lose nothing.
    """
    lengths = np.asarray(lengths, np.int64)
    full = np.flatnonzero(lengths)
    n_empty = len(lengths) - len(full)
    long = lengths > seq_len
    n_split = n_truncated = n_dropped = lost = 0
    if method == "simple":
        ends = np.cumsum(lengths[full])
        row_indptr, doc, start, stop = _end_to_end(full, ends, seq_len)
        n_split = len(np.unique(doc[1:][doc[1:] == doc[:-1]]))
        return Packing(row_indptr, doc, start, stop, n_split, 0, 0, n_empty, 0)
    if method == "bfd_split":
        pieces = -(-lengths[full] // seq_len)
        doc = np.repeat(full, pieces)
        start = (np.arange(len(doc)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * seq_len
        n_split = int(long.sum())
    else:
        kept = full[~long[full]] if overlong == "drop" else full
        doc, start = kept, np.zeros(len(kept), np.int64)
        if overlong == "drop":
            n_dropped, lost = int(long.sum()), int(lengths[long].sum())
        else:
            n_truncated, lost = int(long.sum()), int((lengths[long] - seq_len).sum())
    stop = np.minimum(start + seq_len, lengths[doc])
    if method == "none":
        row_indptr, order = np.arange(len(doc) + 1, dtype=np.int64), slice(None)
    else:
        row_indptr, order = _best_fit_decreasing(stop - start, seq_len)  # type: ignore[assignment]
    return Packing(row_indptr, doc[order], start[order], stop[order], n_split, n_truncated, n_dropped, n_empty, lost)


def _end_to_end(docs: Ints, ends: Ints, seq_len: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Cut the documents' stream at its documents' ends and at every multiple of `seq_len`."""
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.union1d(ends, np.append(np.arange(seq_len, total, seq_len, dtype=np.int64), total)) if total else ends
    begins = np.concatenate([[0], cuts[:-1]]).astype(np.int64) if total else cuts
    owner = np.searchsorted(ends, begins, side="right")
    base = np.concatenate([[0], ends[:-1]]).astype(np.int64)[owner] if total else begins
    n_rows = -(-total // seq_len)
    row_indptr = np.searchsorted(begins, np.arange(n_rows + 1, dtype=np.int64) * seq_len).astype(np.int64)
    return row_indptr, docs[owner], begins - base, cuts - base


class _Capacities:
    """The rows that are still open, by how many tokens they take: a segment tree over 0 to `seq_len`."""

    def __init__(self, seq_len: int) -> None:
        self._size = 1 << seq_len.bit_length()
        self._count = [0] * (2 * self._size)
        self._rows: list[deque[int]] = [deque() for _ in range(seq_len + 1)]

    def add(self, capacity: int, row: int) -> None:
        self._rows[capacity].append(row)
        self._change(capacity, 1)

    def pop(self, capacity: int) -> int:
        self._change(capacity, -1)
        return self._rows[capacity].popleft()

    def smallest_from(self, length: int) -> int | None:
        """The smallest capacity that is at least `length`; None if no open row takes it."""
        count, node = self._count, length + self._size
        while not count[node]:
            while node & 1:  # a right child: what is larger lies right of the parent
                node >>= 1
            if node == 0:
                return None
            node += 1
        while node < self._size:
            node = 2 * node if count[2 * node] else 2 * node + 1
        return node - self._size

    def _change(self, capacity: int, by: int) -> None:
        node = capacity + self._size
        while node:
            self._count[node] += by
            node >>= 1


def _best_fit_decreasing(lengths: Ints, seq_len: int) -> tuple[Ints, Ints]:
    """Return ``row_indptr`` and the order of the spans; O(n log n) for the sort and O(n log seq_len) for the fits."""
    order = np.argsort(-lengths, kind="stable")
    open_rows = _Capacities(seq_len)
    rows: list[list[int]] = []
    for span, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        capacity = open_rows.smallest_from(length)
        if capacity is None:
            row, capacity = len(rows), seq_len
            rows.append([span])
        else:
            row = open_rows.pop(capacity)
            rows[row].append(span)
        if capacity > length:
            open_rows.add(capacity - length, row)
    row_indptr = np.concatenate([[0], np.cumsum([len(row) for row in rows], dtype=np.int64)]).astype(np.int64)
    return row_indptr, np.fromiter(_flat(rows), np.int64, len(lengths))


def _flat(rows: Iterable[list[int]]) -> Iterable[int]:
    for row in rows:
        yield from row
