"""From stores to batches: what a recipe's `DataConfig` asks for as a `BatchSource`."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, Sampler

from astrai_core.errors import ConfigError, DataError
from astrai_train.config.data import DataConfig, DataSource
from astrai_train.data.collate import PositionIds, Span, TrainBatch, collate, collate_pairs
from astrai_train.data.packing import Packing, pack
from astrai_train.data.sampler import NO_ROW, Draw, PassSampler, RowSampler
from astrai_train.data.store import TokenStore

Pair = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
"""Ids of prompt, chosen and rejected answer."""

_NO_IDS = np.zeros(0, np.int64)
_NO_PAIR: Pair = (_NO_IDS, _NO_IDS, _NO_IDS)


class PackedRows:
    """Documents of a ``text`` or ``chat`` store as rows.

    Raises
    ------
    DataError
        If the store is of another kind or no row is left.
    """

    def __init__(self, store: TokenStore, config: DataConfig) -> None:
        if store.kind not in ("text", "chat"):
            raise DataError(
                f"{store.path}: a store of kind {store.kind!r} has no documents to pack; use 'text' or 'chat'"
            )
        self.store = store
        self.packing: Packing = pack(store.lengths("input_ids"), config.seq_len, config.packing, config.overlong)
        if not len(self.packing):
            raise DataError(f"{store.path}: no row is left of {len(store)} documents; give data that is not empty")

    def __len__(self) -> int:
        return len(self.packing)

    def spans(self, row: int) -> list[Span]:
        """Return the documents of a row."""
        masked = self.store.kind == "chat"
        return [
            Span(
                self.store.read("input_ids", doc, start, stop),
                self.store.read("mask", doc, start, stop) if masked else None,
            )
            for doc, start, stop in self.packing.row(row)
        ]

    def describe(self) -> dict[str, Any]:
        """Return what a resumed run must find again, and what was cut or left out."""
        p = self.packing
        counts = {"split": p.n_split, "truncated": p.n_truncated, "dropped": p.n_dropped, "empty": p.n_empty}
        return {"documents": len(self.store), "rows": len(p), **counts, "tokens_lost": p.n_tokens_lost}


class PairRows:
    """Pairs of a ``pairs`` store, cut to fit (training rule 10).

    The prompt keeps its end, at most `max_prompt_len` tokens and no more than the longer answer leaves of `seq_len`
    (but one token, which predicts the answer's first); then both answers are cut to the room that is left. The prompt
    is cut once for both, so its ids stay a common prefix. Pairs with an empty prompt or answer are left out.

    Raises
    ------
    DataError
        If the store is of another kind or no pair is left.
    """

    def __init__(self, store: TokenStore, seq_len: int, max_prompt_len: int | None = None) -> None:
        if store.kind != "pairs":
            raise DataError(
                f"{store.path}: a store of kind {store.kind!r} holds no preference pairs; preprocess 'preference'"
            )
        self.store = store
        prompt, chosen, rejected = (store.lengths(name) for name in ("prompt", "chosen", "rejected"))
        self._rows = np.flatnonzero((prompt > 0) & (chosen > 0) & (rejected > 0))
        if not len(self._rows):
            raise DataError(f"{store.path}: no pair is left of {len(store)}; give pairs with a prompt and two answers")
        longest = np.maximum(chosen, rejected)
        room = np.maximum(seq_len - longest, 1)
        self._prompt_len = np.minimum(np.minimum(prompt, max_prompt_len or seq_len), room)[self._rows]
        self._full_prompt = prompt[self._rows]
        self._seq_len = seq_len
        self._n_cut = {
            "prompts_cut": int((self._prompt_len < self._full_prompt).sum()),
            "answers_cut": int((longest > seq_len - 1)[self._rows].sum()),
        }

    def __len__(self) -> int:
        return len(self._rows)

    def pair(self, row: int) -> Pair:
        """Return prompt, chosen and rejected answer."""
        at, keep, full = int(self._rows[row]), int(self._prompt_len[row]), int(self._full_prompt[row])
        prompt = self.store.read("prompt", at, full - keep)
        chosen, rejected = (self.store.read(name, at, 0, self._seq_len - keep) for name in ("chosen", "rejected"))
        return prompt, chosen, rejected

    def describe(self) -> dict[str, Any]:
        """Return what a resumed run must find again, and what was cut or left out."""
        n_empty = len(self.store) - len(self)
        return {"pairs": len(self.store), "rows": len(self), "empty": n_empty, **self._n_cut}


@dataclasses.dataclass(frozen=True)
class Batches(Dataset[TrainBatch]):
    """Batches by their draws; what worker processes run."""

    sources: Sequence[PackedRows] | Sequence[PairRows]
    pad_id: int
    position_ids: PositionIds
    seq_len: int | None
    """Fixed length of the rows; None takes the longest of the batch."""

    def __getitem__(self, draws: Sequence[Draw]) -> TrainBatch:
        """Read and lay out the rows; `NO_ROW` becomes a row, or a pair of rows, without a token."""
        if isinstance(self.sources[0], PairRows):
            pairs = [_NO_PAIR if draw == NO_ROW else self._pair(draw) for draw in draws]
            return collate_pairs(pairs, pad_id=self.pad_id, position_ids=self.position_ids)
        rows = [[] if draw == NO_ROW else self._spans(draw) for draw in draws]
        return collate(rows, pad_id=self.pad_id, position_ids=self.position_ids, seq_len=self.seq_len)

    def _pair(self, draw: Draw) -> Pair:
        source = self.sources[draw.source]
        assert isinstance(source, PairRows), "sources are all of one kind"
        return source.pair(draw.row)

    def _spans(self, draw: Draw) -> list[Span]:
        source = self.sources[draw.source]
        assert isinstance(source, PackedRows), "sources are all of one kind"
        return source.spans(draw.row)


class TrainSource:
    """A `BatchSource` without end, in the order of a `RowSampler`.

    Parameters
    ----------
    batches
        What lays out the rows.
    sampler
        Position and order.
    workers
        Processes that prepare batches; 0 prepares them in this one.
    """

    def __init__(self, batches: Batches, sampler: RowSampler, *, workers: int = 0) -> None:
        self._batches, self._sampler, self._workers = batches, sampler, workers

    def __len__(self) -> int:
        return len(self._sampler)

    @property
    def n_rows(self) -> int:
        """Rows of one pass over all ranks."""
        return self._sampler.n_rows

    def __iter__(self) -> Iterator[TrainBatch]:
        for batch in _loader(self._batches, _Draws(self._sampler.copy(), None), self._workers):
            self._sampler.next()
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was yielded."""
        return {"sampler": self._sampler.state_dict(), "rows": self.describe()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position; see `BatchSource`."""
        if state.get("rows") != self.describe():
            raise ConfigError(
                f"cannot resume: the data now gives {self.describe()}, the checkpoint was made with "
                f"{state.get('rows')}; resume with the data and packing of the run"
            )
        self._sampler.load_state_dict(state["sampler"])

    def describe(self) -> list[dict[str, Any]]:
        """Return of each store its rows and what was cut or left out, as plain JSON data."""
        return [rows.describe() for rows in self._batches.sources]

    def lines(self) -> list[str]:
        """Say of each store how many rows it became and what was cut or left out (training rules 4 and 10)."""
        return [
            f"{rows.store.path}: "
            + ", ".join(
                f"{name.replace('_', ' ')} {count}"
                for name, count in rows.describe().items()
                if count or name == "rows"
            )
            for rows in self._batches.sources
        ]


class ValidSource:
    """Every row once in each iteration, in the order of the files; the same number of batches on every rank.

    Where rows run out on a rank, rows without a token fill up: they supervise nothing.
    """

    def __init__(self, batches: Batches, sampler: PassSampler, *, workers: int = 0) -> None:
        self._batches, self._sampler, self._workers = batches, sampler, workers

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[TrainBatch]:
        yield from _loader(self._batches, _Draws(self._sampler.copy(), len(self)), self._workers)


def open_train_source(
    config: DataConfig,
    *,
    pairs: bool,
    pad_id: int,
    batch_size: int,
    micro_batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    max_prompt_len: int | None = None,
) -> TrainSource:
    """Open the training data of a recipe.

    Parameters
    ----------
    pairs
        Whether the strategy wants preference pairs.
    pad_id
        Any id of the vocabulary.
    batch_size
        Rows of an optimizer step; data smaller than that is refused.
    micro_batch_size, rank, world_size
        See `RowSampler`.
    max_prompt_len
        Of pairs; see `PairRows`.

    Raises
    ------
    DataError
        If a store is missing, damaged, of another kind or tokenizer, empty, or all together hold too little.
    """
    sources = _open(config.train, config, pairs, max_prompt_len)
    n_rows = [len(rows) for rows in sources]
    if sum(n_rows) < batch_size:
        raise DataError(
            f"{', '.join(member.path for member in config.train)}: {sum(n_rows)} rows are fewer than the {batch_size} "
            "of one step; lower batch_size or data.seq_len, or give more data"
        )
    sampler = RowSampler(
        n_rows,
        [member.weight for member in config.train],
        seed=config.shuffle_seed,
        micro_batch_size=micro_batch_size,
        rank=rank,
        world_size=world_size,
    )
    return TrainSource(_batches(sources, config, pairs, pad_id), sampler, workers=config.workers)


def open_valid_sources(
    config: DataConfig,
    *,
    pairs: bool,
    pad_id: int,
    micro_batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    max_prompt_len: int | None = None,
) -> list[tuple[DataSource, ValidSource]]:
    """Open each member of a recipe's validation set by itself; parameters and errors as `open_train_source`."""
    opened = []
    for member in config.valid:
        sources = _open([member], config, pairs, max_prompt_len)
        sampler = PassSampler(
            [len(rows) for rows in sources], micro_batch_size=micro_batch_size, rank=rank, world_size=world_size
        )
        batches = _batches(sources, config, pairs, pad_id)
        opened.append((member, ValidSource(batches, sampler, workers=config.workers)))
    return opened


def _open(
    members: Sequence[DataSource], config: DataConfig, pairs: bool, max_prompt_len: int | None
) -> Sequence[PackedRows] | Sequence[PairRows]:
    stores = [TokenStore(member.path) for member in members]
    for store in stores[1:]:
        if store.tokenizer_hash != stores[0].tokenizer_hash:
            raise DataError(
                f"{store.path}: made with another tokenizer than {stores[0].path}; preprocess both with the same"
            )
    if pairs:
        return [PairRows(store, config.seq_len, max_prompt_len) for store in stores]
    return [PackedRows(store, config) for store in stores]


def _batches(
    sources: Sequence[PackedRows] | Sequence[PairRows], config: DataConfig, pairs: bool, pad_id: int
) -> Batches:
    fixed = None if pairs or config.packing == "none" else config.seq_len
    return Batches(sources, pad_id, config.position_ids, fixed)


class _Draws(Sampler[list[Draw]]):
    """Feeds a DataLoader, which runs ahead of what is consumed."""

    def __init__(self, ahead: RowSampler | PassSampler, limit: int | None) -> None:
        self._ahead, self._limit = ahead, limit

    def __iter__(self) -> Iterator[list[Draw]]:
        n = 0
        while self._limit is None or n < self._limit:
            yield self._ahead.next()
            n += 1


def _loader(batches: Batches, draws: _Draws, workers: int) -> DataLoader[TrainBatch]:
    return DataLoader(
        batches,
        sampler=draws,
        batch_size=None,
        num_workers=workers,
        collate_fn=_unchanged,
        worker_init_fn=_leave_signals,
        # Without a generator of its own every iteration draws from torch's global stream, and resuming is not exact.
        generator=torch.Generator(),
    )


def _leave_signals(worker: int) -> None:
    """Let a worker outlast what asks all processes to stop: the training process finishes its step, and needs rows."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Obey the SIGTERM of the training process, by which it ends its workers, and of nobody else."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


def _unchanged(batch: Any) -> Any:
    return batch
