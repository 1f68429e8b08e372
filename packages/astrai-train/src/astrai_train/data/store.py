"""Pre-tokenised data as memory-mapped ``.bin`` files under a JSON header (row DS1).

A store is a directory. ``store.json`` names its streams; shard k of stream s is ``s.00000k.bin`` (items, little-endian)
with ``s.00000k.offsets`` (int64, rows + 1). Streams of one row may share their offsets (ids and mask). What each train
type holds is in `STREAMS_OF_KIND`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from astrai_core.checkpoint.atomic import atomic_directory
from astrai_core.errors import DataError
from astrai_core.tokenizer.tokenizer import Tokenizer

HEADER = "store.json"
FORMAT, VERSION = "astrai-tokens", 1

Kind = Literal["text", "chat", "pairs", "prompts"]

STREAMS_OF_KIND: Mapping[str, tuple[tuple[str, str, str], ...]] = {
    "text": (("input_ids", "ids", "input_ids"),),
    "chat": (("input_ids", "ids", "input_ids"), ("mask", "flags", "input_ids")),
    "pairs": (("prompt", "ids", "prompt"), ("chosen", "ids", "chosen"), ("rejected", "ids", "rejected")),
    "prompts": (("prompt", "ids", "prompt"), ("columns", "bytes", "columns")),
}
"""Of each kind: (stream, what it holds, whose offsets it uses). ``flags`` are 0 or 1; ``bytes`` are UTF-8 JSON."""


@dataclasses.dataclass(frozen=True)
class Stream:
    """One sequence of every row."""

    name: str
    dtype: str
    """Of numpy, with byte order: ``|u1``, ``<u2`` or ``<u4``."""
    limit: int
    """Every item is below it."""
    offsets: str
    """The stream whose offsets it uses."""


def dtype_for(limit: int) -> str:
    """Return the smallest little-endian unsigned type that holds 0 to `limit` - 1.

    Raises
    ------
    DataError
        If the vocabulary is empty or needs more than 32 bits.
    """
    for dtype in ("|u1", "<u2", "<u4"):
        if 1 <= limit <= 2 ** (8 * np.dtype(dtype).itemsize):
            return dtype
    raise DataError(f"vocab_size {limit} does not fit a token store; it must be between 1 and 2**32")


def streams_of(kind: str, vocab_size: int) -> tuple[Stream, ...]:
    """Return the streams of a store of this kind."""
    limits = {"ids": vocab_size, "flags": 2, "bytes": 256}
    return tuple(
        Stream(name, dtype_for(limits[holds]), limits[holds], offsets) for name, holds, offsets in STREAMS_OF_KIND[kind]
    )


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """Return the sha256 of what decides a tokenizer's ids: its vocabulary and rules, and its chat templates."""
    digest = hashlib.sha256(tokenizer.backend.to_str().encode())
    templates = {} if tokenizer.chat_template is None else tokenizer.chat_template.templates
    digest.update(json.dumps(templates, sort_keys=True).encode())
    return digest.hexdigest()


class ShardWriter:
    """Writes the files of one shard; a context manager, at whose end the files are complete.

    Parameters
    ----------
    directory, index
        Where, and the number in the file names.
    streams
        Of the store.
    """

    def __init__(self, directory: Path, index: int, streams: Sequence[Stream]) -> None:
        self._streams = streams
        self._stack = ExitStack()
        self._files = {s.name: self._open(_file(directory, s.name, index)) for s in streams}
        self._offsets = {
            s.name: self._open(_file(directory, s.name, index, "offsets")) for s in streams if s.offsets == s.name
        }
        self.n_rows = 0
        self.n_items = {s.name: 0 for s in streams}
        self._n_in_rows = dict.fromkeys(self._offsets, 0)
        for file in self._offsets.values():
            file.write(np.zeros(1, "<i8").tobytes())

    def add_all(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows: of each, a sequence of integers for each stream.

        Raises
        ------
        DataError
            If an item is negative or not below its stream's limit.
        """
        if not rows:
            return
        for stream in self._streams:
            arrays = [np.asarray(row[stream.name], np.int64) for row in rows]
            items = np.concatenate(arrays)
            if items.size and (items.min() < 0 or items.max() >= stream.limit):
                raise DataError(
                    f"{stream.name} holds {items.min() if items.min() < 0 else items.max()}, outside 0 to "
                    f"{stream.limit - 1}; preprocess with the tokenizer that these ids come from"
                )
            self.append_items(stream.name, items.astype(stream.dtype))
            if stream.offsets == stream.name:
                self.append_lengths(stream.name, np.array([len(array) for array in arrays], np.int64))
        self.n_rows += len(rows)

    def append_items(self, name: str, items: NDArray[Any]) -> None:
        """Append items of a stream in its own dtype, without a check; `append_lengths` says how they make rows."""
        self._files[name].write(items.tobytes())
        self.n_items[name] += int(items.size)

    def append_lengths(self, name: str, lengths: NDArray[np.int64]) -> None:
        """Say how many items each of the next rows has."""
        ends = self._n_in_rows[name] + np.cumsum(lengths, dtype=np.int64)
        self._offsets[name].write(ends.astype("<i8").tobytes())
        self._n_in_rows[name] = int(ends[-1]) if len(ends) else self._n_in_rows[name]

    def _open(self, file: Path) -> BinaryIO:
        return self._stack.enter_context(file.open("wb"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def describe(self) -> dict[str, Any]:
        """Return the shard's entry of the header."""
        return {"n_rows": self.n_rows, "n_items": self.n_items}


class TokenStore:
    """A store opened for reading: memory-mapped, picklable (a copy opens the files anew).

    Parameters
    ----------
    path
        The store's directory.

    Raises
    ------
    DataError
        If a file is missing, of another size than the header says, or the header is no store's; the message names it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.header = _read_header(self.path / HEADER)
        try:
            self.kind: str = self.header["kind"]
            self.vocab_size: int = self.header["vocab_size"]
            self.tokenizer_hash: str = self.header["tokenizer"]["sha256"]
            self.streams = {s["name"]: Stream(**s) for s in self.header["streams"]}
            shards = [(shard["n_rows"], dict(shard["n_items"])) for shard in self.header["shards"]]
            valid = self.kind in get_args(Kind) and tuple(self.streams.values()) == streams_of(
                self.kind, self.vocab_size
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{self.path / HEADER}: damaged: {error!r}; preprocess the data again") from None
        if not valid:
            raise DataError(f"{self.path / HEADER}: its streams are not those of kind {self.kind!r}; preprocess again")
        self._first_row = np.concatenate([[0], np.cumsum([n for n, _ in shards], dtype=np.int64)])
        self._items: dict[str, list[NDArray[Any]]] = {name: [] for name in self.streams}
        self._offsets: dict[str, list[NDArray[np.int64]]] = {name: [] for name in self.streams}
        for index, (n_rows, n_items) in enumerate(shards):
            for name, stream in self.streams.items():
                self._items[name].append(_map(_file(self.path, name, index), stream.dtype, n_items[name]))
                if stream.offsets == name:
                    file = _file(self.path, name, index, "offsets")
                    offsets = _map(file, "<i8", n_rows + 1)
                    if offsets[0] != 0 or offsets[-1] != n_items[name] or (np.diff(offsets) < 0).any():
                        raise DataError(f"{file}: its offsets do not fit the items; preprocess the data again")
                    self._offsets[name].append(offsets)

    def __len__(self) -> int:
        return int(self._first_row[-1])

    def __reduce__(self) -> tuple[type[TokenStore], tuple[Path]]:
        return TokenStore, (self.path,)

    def lengths(self, name: str) -> NDArray[np.int64]:
        """Return the items of every row in a stream, ``[rows]`` int64."""
        parts = [np.diff(offsets) for offsets in self._offsets[self.streams[name].offsets]]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def read(self, name: str, row: int, start: int = 0, stop: int | None = None) -> NDArray[np.int64]:
        """Return items `start` to `stop` of a row, as int64.

        Raises
        ------
        DataError
            If an item is out of range: the file was damaged or written by something else.
        """
        shard = int(np.searchsorted(self._first_row, row, side="right")) - 1
        stream = self.streams[name]
        begin, end = self._offsets[stream.offsets][shard][row - self._first_row[shard] :][:2]
        end = end if stop is None else min(end, begin + stop)
        items = np.asarray(self._items[name][shard][begin + start : end], dtype=np.int64)
        if items.size and items.max() >= stream.limit:
            raise DataError(
                f"{_file(self.path, name, shard)}: row {row} holds {items.max()}, not below {stream.limit}; "
                "the file is damaged, preprocess the data again"
            )
        return items

    def verify(self) -> None:
        """Read every item once.

        Raises
        ------
        DataError
            Names the first file with an item out of range.
        """
        for name, stream in self.streams.items():
            for index, items in enumerate(self._items[name]):
                for start in range(0, len(items), 1 << 24):
                    if int(items[start : start + (1 << 24)].max()) >= stream.limit:
                        raise DataError(
                            f"{_file(self.path, name, index)}: an item is not below {stream.limit}; preprocess again"
                        )

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Refuse a tokenizer other than the one that made the store.

        Raises
        ------
        DataError
            If the vocabulary, the rules or the chat template differ.
        """
        if tokenizer_hash(tokenizer) != self.tokenizer_hash:
            raise DataError(
                f"{self.path}: made with another tokenizer or chat template "
                f"({self.header['tokenizer'].get('name')!r}); preprocess the data again with this one"
            )


def header_of(
    kind: str, vocab_size: int, tokenizer: Mapping[str, Any], shards: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return a store's header."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "kind": kind,
        "vocab_size": vocab_size,
        "tokenizer": dict(tokenizer),
        "streams": [dataclasses.asdict(stream) for stream in streams_of(kind, vocab_size)],
        "n_rows": sum(shard["n_rows"] for shard in shards),
        "shards": list(shards),
    }


def write_store(
    path: str | Path,
    kind: Kind,
    rows: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    *,
    name: str = "",
    overwrite: bool = False,
) -> None:
    """Write rows that are at hand as a store, which appears whole or not at all.

    Raises
    ------
    DataError, CheckpointError
        If an item is out of range, or the directory cannot be written.
    """
    with atomic_directory(path, overwrite=overwrite) as directory:
        with ShardWriter(directory, 0, streams_of(kind, tokenizer.vocab_size)) as writer:
            writer.add_all(rows)
        made_by = {"name": name, "sha256": tokenizer_hash(tokenizer)}
        write_header(directory, header_of(kind, tokenizer.vocab_size, made_by, [writer.describe()]))


def write_header(directory: Path, header: Mapping[str, Any]) -> None:
    """Write ``store.json``."""
    (directory / HEADER).write_text(json.dumps(header, indent=1) + "\n", encoding="utf-8")


def _file(directory: Path, name: str, index: int, suffix: str = "bin") -> Path:
    return directory / f"{name}.{index:06d}.{suffix}"


def _map(file: Path, dtype: str, n_items: int) -> NDArray[Any]:
    expected = n_items * np.dtype(dtype).itemsize
    try:
        found = file.stat().st_size
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}; preprocess the data again") from None
    if found != expected:
        raise DataError(f"{file}: {found} bytes, the header says {expected}; the file is damaged, preprocess again")
    return np.memmap(file, dtype, "r", shape=(n_items,)) if n_items else np.zeros(0, dtype)


def _read_header(file: Path) -> dict[str, Any]:
    try:
        header = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(
            f"{file.parent}: not a token store ({file.name} is missing); make one with `astrai preprocess`"
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read: {error}; preprocess the data again") from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise DataError(f"{file}: not the header of a token store; give a directory made by `astrai preprocess`")
    if header.get("version") != VERSION:
        raise DataError(
            f"{file}: format version {header.get('version')!r}, this astrai reads {VERSION}; "
            "preprocess the data again or upgrade astrai"
        )
    return header
