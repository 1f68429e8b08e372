"""One piece of the input into one part: a finished shard, its counts, and what became of the rows."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from astrai_core.tokenizer.tokenizer import Tokenizer
from astrai_train.data.preprocess import files
from astrai_train.data.preprocess.config import PreprocessConfig
from astrai_train.data.preprocess.encode import Encoder, Row
from astrai_train.data.preprocess.records import BadRow, DroppedRow, Sample, to_sample
from astrai_train.data.store import ShardWriter, streams_of

_BATCH_ROWS, _BATCH_BYTES = 512, 1 << 18
"""Encodings of 256 KiB of text take about 15 MiB; larger batches are not faster."""
_REPORTED = 20


@dataclass
class Summary:
    """What became of the rows."""

    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Rows left out, by reason."""
    bad: int = 0
    """Malformed rows that were skipped."""
    bad_rows: list[str] = field(default_factory=list)
    """The first of them, as ``file:line: reason``."""
    tokens: int = 0
    supervised: int = 0

    def add(self, other: Summary) -> None:
        """Count another part."""
        self.kept += other.kept
        self.dropped += other.dropped
        self.bad += other.bad
        self.bad_rows = (self.bad_rows + other.bad_rows)[:_REPORTED]
        self.tokens += other.tokens
        self.supervised += other.supervised

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON data."""
        return {**dataclasses.asdict(self), "dropped": dict(sorted(self.dropped.items()))}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Summary:
        """Read it back."""
        return cls(**{**data, "dropped": Counter(data["dropped"])})


@dataclass(frozen=True)
class Job:
    """What a worker needs besides the pieces."""

    config: PreprocessConfig
    tokenizer: Tokenizer
    parts: Path


def part_name(number: int) -> str:
    """Return the name of a part's directory."""
    return f"{number:08d}"


def finished(parts: Path, number: int) -> Summary | None:
    """Return the counts of a part, None if it is not there."""
    file = parts / part_name(number) / "summary.json"
    return Summary.from_dict(json.loads(file.read_text())) if file.is_file() else None


def allowed_bad_rows(config: PreprocessConfig) -> int:
    """Return how many bad rows a run bears."""
    return config.max_bad_rows if config.on_bad_row == "skip" else 0


def make_part(job: Job, encoder: Encoder, number: int, piece: files.Piece) -> Summary:
    """Turn one piece into a part, which appears under its number when it is whole.

    Bad rows beyond what the configuration bears end the part early; the run then stops, and the part is not kept.
    """
    scratch = job.parts / f"{part_name(number)}.tmp"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    summary, allowed = Summary(), allowed_bad_rows(job.config)
    with ShardWriter(scratch, 0, streams_of(job.config.kind, job.tokenizer.vocab_size)) as writer:
        for places, samples in _batches(job.config, piece, summary):
            kept: list[Row] = []
            for at, row in zip(places, encoder.encode(samples), strict=True):
                if isinstance(row, BadRow | DroppedRow):
                    _count_out(piece, summary, at, row)
                else:
                    kept.append(row)
            writer.add_all(kept)
            _count_kept(summary, kept)
            if summary.bad > allowed:
                return summary
    if summary.bad > allowed:
        return summary
    (scratch / "shard.json").write_text(json.dumps(writer.describe()))
    (scratch / "summary.json").write_text(json.dumps(summary.to_dict()))
    os.rename(scratch, job.parts / part_name(number))
    return summary


def _batches(
    config: PreprocessConfig, piece: files.Piece, summary: Summary
) -> Iterator[tuple[list[int], list[Sample]]]:
    """The piece's samples with their places, a bounded number at a time; what is no sample is counted."""
    places: list[int] = []
    samples: list[Sample] = []
    n_bytes = 0
    for record in files.read(piece, config.text_unit):
        try:
            if record.problem is not None:
                raise BadRow(record.problem)
            samples.append(to_sample(record.value, config.format, config.fields, config.roles))
        except (BadRow, DroppedRow) as error:
            _count_out(piece, summary, record.at, error)
            if summary.bad > allowed_bad_rows(config):
                break
            continue
        places.append(record.at)
        n_bytes += record.n_bytes
        if len(samples) >= _BATCH_ROWS or n_bytes >= _BATCH_BYTES:
            yield places, samples
            places, samples, n_bytes = [], [], 0
    if samples:
        yield places, samples


def _count_out(piece: files.Piece, summary: Summary, at: int, reason: BadRow | DroppedRow) -> None:
    if isinstance(reason, DroppedRow):
        summary.dropped[str(reason)] += 1
        return
    summary.bad += 1
    if len(summary.bad_rows) < _REPORTED:
        summary.bad_rows.append(f"{files.place(piece, at)}: {reason}")


def _count_kept(summary: Summary, rows: list[Row]) -> None:
    summary.kept += len(rows)
    for row in rows:
        summary.tokens += sum(len(items) for name, items in row.items() if name not in ("mask", "columns"))
        summary.supervised += _supervised(row)


def _supervised(row: Row) -> int:
    if "mask" in row:
        return int(np.count_nonzero(row["mask"]))
    return sum(len(items) for name, items in row.items() if name in ("input_ids", "chosen", "rejected"))
