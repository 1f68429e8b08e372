"""Parts, in order, into the shards of one store."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from astrai_train.data.store import Kind, ShardWriter, Stream, header_of, streams_of, write_header

_ITEMS = 1 << 22
"""Items that are copied at once."""


def join_parts(
    parts: Sequence[Path],
    directory: Path,
    kind: Kind,
    vocab_size: int,
    tokenizer: Mapping[str, Any],
    shard_bytes: int,
    extra: Mapping[str, Any],
) -> None:
    """Write a store whose rows are those of the parts, one after another.

    Parameters
    ----------
    parts
        Directories with the files of one shard and ``shard.json``, its entry of a header.
    directory
        Made if it is not there.
    shard_bytes
        A shard takes no further part once its largest stream has this size.
    extra
        Further keys of the header.
    """
    directory.mkdir(exist_ok=True)
    streams = streams_of(kind, vocab_size)
    shards: list[dict[str, Any]] = []
    for group in _groups(parts, streams, shard_bytes):
        with ShardWriter(directory, len(shards), streams) as writer:
            for part, counts in group:
                _append(writer, part, counts, streams)
        shards.append(writer.describe())
    write_header(directory, {**header_of(kind, vocab_size, tokenizer, shards), **extra})


def _groups(
    parts: Sequence[Path], streams: Sequence[Stream], shard_bytes: int
) -> Iterator[list[tuple[Path, dict[str, Any]]]]:
    group: list[tuple[Path, dict[str, Any]]] = []
    size = 0
    for part in parts:
        counts = json.loads((part / "shard.json").read_text())
        group.append((part, counts))
        size += max(counts["n_items"][s.name] * np.dtype(s.dtype).itemsize for s in streams)
        if size >= shard_bytes:
            yield group
            group, size = [], 0
    if group:
        yield group


def _append(writer: ShardWriter, part: Path, counts: Mapping[str, Any], streams: Sequence[Stream]) -> None:
    for stream in streams:
        with (part / f"{stream.name}.000000.bin").open("rb") as file:
            while len(items := np.fromfile(file, stream.dtype, _ITEMS)):
                writer.append_items(stream.name, items)
        if stream.offsets == stream.name:
            writer.append_lengths(stream.name, np.diff(np.fromfile(part / f"{stream.name}.000000.offsets", "<i8")))
    writer.n_rows += counts["n_rows"]
