"""Preprocessing: many workers, bounded memory, an order that depends on the files alone, resumable.

Every piece of the input becomes a part in ``DIR.partial``: one finished shard and its counts, under its number. When
all parts are there they are joined in order into the stores, which appear at once. A run that was stopped finds its
finished parts again, unless configuration, tokenizer or files have changed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import multiprocessing
import os
import shutil
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from astrai_core.checkpoint.atomic import atomic_directory
from astrai_core.errors import ConfigError, DataError
from astrai_core.tokenizer.tokenizer import Tokenizer
from astrai_train.data.preprocess import files
from astrai_train.data.preprocess.config import PreprocessConfig
from astrai_train.data.preprocess.encode import Encoder, Row
from astrai_train.data.preprocess.join import join_parts
from astrai_train.data.preprocess.records import BadRow, DroppedRow, Sample, to_sample
from astrai_train.data.store import ShardWriter, streams_of, tokenizer_hash

_LOG = logging.getLogger(__name__)
_BATCH_ROWS, _BATCH_CHARACTERS = 512, 1 << 20
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
    """What a worker needs besides the number of the piece."""

    config: PreprocessConfig
    tokenizer: Tokenizer
    pieces: tuple[files.Piece, ...]
    parts: Path


def preprocess(
    config: PreprocessConfig,
    output: str | os.PathLike[str],
    tokenizer: Tokenizer,
    *,
    overwrite: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Summary]:
    """Turn files into stores: one in `output`, or one for each domain below it.

    Parameters
    ----------
    config
        What to read and how.
    output
        Appears whole or not at all; ``output.partial`` beside it holds what is finished while this runs.
    tokenizer
        That of ``config.tokenizer``.
    overwrite
        Replace an existing output.
    progress
        Called with the bytes done and those of all input.

    Returns
    -------
    dict of str to Summary
        By domain; the only key is ``""`` where there are none.

    Raises
    ------
    DataError
        For a bad row (``file:line: reason``), a file that is no such file, or when no row is left.
    CheckpointError
        If the output exists, or cannot be written.
    ConfigError
        If some inputs have a domain and others none.
    """
    output = Path(output)
    if output.is_dir() and any(output.iterdir()) and not overwrite:
        raise DataError(f"{output}: directory is not empty; choose another one or overwrite it")
    domains = _domains(config)
    pieces, of_domain = _pieces(config)
    Encoder(config, tokenizer)
    job = Job(config, tokenizer, pieces, output.with_name(output.name + ".partial"))
    _prepare(job)
    _run(job, progress)
    summaries = {}
    made_by = {"name": config.tokenizer, "sha256": tokenizer_hash(tokenizer)}
    with atomic_directory(output, overwrite=overwrite) as scratch:
        for domain in domains:
            numbers = [i for i, name in enumerate(of_domain) if name == domain]
            summary = Summary()
            for i in numbers:
                summary.add(_finished(job.parts, i) or Summary())
            if summary.kept == 0:
                raise DataError(f"domain {domain!r} has no rows; remove it or correct its paths")
            summaries[domain] = summary
            extra = {"summary": summary.to_dict(), "config": config.to_dict()}
            join_parts(
                [job.parts / _name(i) for i in numbers],
                scratch / domain if domain else scratch,
                config.kind,
                tokenizer.vocab_size,
                made_by,
                config.shard_bytes,
                extra,
            )
    shutil.rmtree(job.parts)
    return summaries


def _domains(config: PreprocessConfig) -> list[str]:
    names = [entry.domain for entry in config.inputs]
    if any(names) and not all(names):
        raise ConfigError("field 'inputs': some have a domain and others none; name a domain for each, or for none")
    return list(dict.fromkeys(name or "" for name in names))


def _pieces(config: PreprocessConfig) -> tuple[tuple[files.Piece, ...], list[str]]:
    pieces: list[files.Piece] = []
    domains: list[str] = []
    for entry in config.inputs:
        for file in files.find_files(entry.paths):
            found = files.cut(file, entry.type, config.chunk_bytes)
            if any(piece.type == "text" for piece in found) and config.format != "text":
                raise DataError(f"{file}: a text file has no fields for format {config.format!r}; set inputs.type")
            pieces += found
            domains += [entry.domain or ""] * len(found)
    if not pieces:
        raise DataError(f"{', '.join(config.inputs[0].paths)}: the files are empty; give data")
    return tuple(pieces), domains


def _fingerprint(job: Job) -> str:
    """Tells whether finished parts are still right; not how many workers made them."""
    config = {key: value for key, value in job.config.to_dict().items() if key not in ("workers", "shard_bytes")}
    stamps = [files.stamp(file) for file in dict.fromkeys(piece.file for piece in job.pieces)]
    template = job.config.chat_template
    source = Path(template).read_text() if template and Path(template).is_file() else ""
    facts = [config, stamps, tokenizer_hash(job.tokenizer), job.tokenizer.special_tokens, source]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _prepare(job: Job) -> None:
    """Keep the parts of a run that was stopped if they are of this run; else begin anew."""
    mark, wanted = job.parts / "run.json", _fingerprint(job)
    if job.parts.is_dir():
        if mark.is_file() and mark.read_text() == wanted:
            for left in job.parts.glob("*.tmp"):
                shutil.rmtree(left)
            return
        _LOG.warning("%s holds parts of another run; beginning anew", job.parts)
        shutil.rmtree(job.parts)
    job.parts.mkdir(parents=True)
    mark.write_text(wanted)


def _run(job: Job, progress: Callable[[int, int], None]) -> None:
    """Make the parts that are missing. Bad rows are judged in the order of the input."""
    total, done, summary = sum(piece.n_bytes for piece in job.pieces), 0, Summary()
    with closing(_results(job)) as results:
        for piece, part in zip(job.pieces, results, strict=False):
            summary.add(part)
            if summary.bad > _allowed(job.config):
                break
            done += piece.n_bytes
            progress(done, total)
    if summary.bad > _allowed(job.config):
        shutil.rmtree(job.parts)
        many = f" ({summary.bad} bad rows, more than max_bad_rows {job.config.max_bad_rows})"
        raise DataError(summary.bad_rows[0] + (many if job.config.on_bad_row == "skip" else ""))
    if summary.kept == 0:
        shutil.rmtree(job.parts)
        reasons = [f"{n} {reason}" for reason, n in sorted(summary.dropped.items())]
        reasons += [f"{summary.bad} bad"] if summary.bad else []
        raise DataError(
            f"{job.pieces[0].file}: no row is left of the input ({', '.join(reasons) or 'it holds none'}); "
            "check inputs and format"
        )


def _allowed(config: PreprocessConfig) -> int:
    return config.max_bad_rows if config.on_bad_row == "skip" else 0


def _results(job: Job) -> Generator[Summary, None, None]:
    """The counts of every part in order, made as far as they are missing."""
    workers = job.config.workers if job.config.workers is not None else _cores()
    if workers == 0:
        encoder = Encoder(job.config, job.tokenizer)
        for i in range(len(job.pieces)):
            yield _finished(job.parts, i) or make_part(job, encoder, i)
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker, (job,))
    try:
        waiting: deque[Summary | Future[Summary]] = deque()
        for i in range(len(job.pieces)):
            waiting.append(_finished(job.parts, i) or pool.submit(_work, i))
            if len(waiting) > 2 * workers:
                yield _of(waiting.popleft())
        while waiting:
            yield _of(waiting.popleft())
    except BrokenProcessPool:
        raise DataError(
            "a worker process died (out of memory?); lower workers or chunk_bytes and run again, what is finished is kept"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _of(item: Summary | Future[Summary]) -> Summary:
    return item.result() if isinstance(item, Future) else item


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_worker: list[tuple[Job, Encoder]] = []
"""What a worker process was started with."""


def _start_worker(job: Job) -> None:
    # One process a core already: threads of the tokenizer would only be in each other's way.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Ctrl-C reaches every process of the group; the first one ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker[:] = [(job, Encoder(job.config, job.tokenizer))]


def _end_with_parent() -> None:
    """End this worker when the process that started it was killed: its queue would keep it waiting for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "workers are started by multiprocessing"
    parent.join()
    os._exit(1)


def _work(number: int) -> Summary:
    job, encoder = _worker[0]
    return make_part(job, encoder, number)


def _name(number: int) -> str:
    return f"{number:08d}"


def _finished(parts: Path, number: int) -> Summary | None:
    file = parts / _name(number) / "summary.json"
    return Summary.from_dict(json.loads(file.read_text())) if file.is_file() else None


def make_part(job: Job, encoder: Encoder, number: int) -> Summary:
    """Turn one piece into a part, which appears under its number when it is whole.

    Bad rows beyond what the configuration bears end the part early; the run then stops, and the part is not kept.
    """
    scratch = job.parts / f"{_name(number)}.tmp"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    piece, summary = job.pieces[number], Summary()
    with ShardWriter(scratch, 0, streams_of(job.config.kind, job.tokenizer.vocab_size)) as writer:
        for places, samples in _batches(job, piece, summary):
            for at, row in zip(places, encoder.encode(samples), strict=True):
                _count(job, piece, summary, at, row, writer)
            if summary.bad > _allowed(job.config):
                return summary
    if summary.bad > _allowed(job.config):
        return summary
    (scratch / "shard.json").write_text(json.dumps(writer.describe()))
    (scratch / "summary.json").write_text(json.dumps(summary.to_dict()))
    os.rename(scratch, job.parts / _name(number))
    return summary


def _batches(job: Job, piece: files.Piece, summary: Summary) -> Iterator[tuple[list[int], list[Sample]]]:
    """The piece's samples with their places, a bounded number at a time; what is no sample is counted."""
    config = job.config
    places: list[int] = []
    samples: list[Sample] = []
    size = 0
    for record in files.read(piece, config.text_unit):
        try:
            if record.problem is not None:
                raise BadRow(record.problem)
            samples.append(to_sample(record.value, config.format, config.fields, config.roles))
        except BadRow as error:
            _count(job, piece, summary, record.at, error, None)
            if summary.bad > _allowed(config):
                break
            continue
        except DroppedRow as error:
            summary.dropped[str(error)] += 1
            continue
        places.append(record.at)
        size += len(record.value) if isinstance(record.value, str) else 1024
        if len(samples) >= _BATCH_ROWS or size >= _BATCH_CHARACTERS:
            yield places, samples
            places, samples, size = [], [], 0
    if samples:
        yield places, samples


def _count(
    job: Job,
    piece: files.Piece,
    summary: Summary,
    at: int,
    row: Row | BadRow | DroppedRow,
    writer: ShardWriter | None,
) -> None:
    if isinstance(row, BadRow):
        summary.bad += 1
        if len(summary.bad_rows) < _REPORTED:
            summary.bad_rows.append(f"{files.place(piece, at)}: {row}")
    elif isinstance(row, DroppedRow):
        summary.dropped[str(row)] += 1
    else:
        assert writer is not None, "only bad rows are counted without a shard"
        writer.add(row)
        summary.kept += 1
        ids = [items for name, items in row.items() if name not in ("mask", "columns")]
        summary.tokens += sum(map(len, ids))
        summary.supervised += _supervised(row)


def _supervised(row: Row) -> int:
    if "mask" in row:
        return int(np.count_nonzero(row["mask"]))
    return sum(len(items) for name, items in row.items() if name in ("input_ids", "chosen", "rejected"))
