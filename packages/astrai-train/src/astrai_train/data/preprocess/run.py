"""Preprocessing: many workers, bounded memory, an order that depends on the files alone, resumable.

Every piece of the input becomes a part in ``DIR.partial``: one finished shard and its counts, under its number. When
all parts are there they are joined in order into the stores, which appear at once. A run that was stopped finds its
finished parts again, unless configuration, tokenizer or files have changed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path

from astrai_core.checkpoint.atomic import atomic_directory
from astrai_core.errors import ConfigError, DataError
from astrai_core.tokenizer.tokenizer import Tokenizer
from astrai_train.data.preprocess import files
from astrai_train.data.preprocess.config import PreprocessConfig
from astrai_train.data.preprocess.encode import Encoder
from astrai_train.data.preprocess.join import join_parts
from astrai_train.data.preprocess.part import Job, Summary, allowed_bad_rows, finished, make_part, part_name
from astrai_train.data.preprocess.workers import MAX_WORKERS, WorkerPool
from astrai_train.data.store import tokenizer_hash

_LOG = logging.getLogger(__name__)


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
    job = Job(config, tokenizer, output.with_name(output.name + ".partial"))
    _prepare(job, pieces)
    _run(job, pieces, progress)
    summaries = {}
    made_by = {"name": config.tokenizer, "sha256": tokenizer_hash(tokenizer)}
    with atomic_directory(output, overwrite=overwrite) as scratch:
        for domain in domains:
            numbers = [i for i, name in enumerate(of_domain) if name == domain]
            summary = Summary()
            for i in numbers:
                summary.add(finished(job.parts, i) or Summary())
            if summary.kept == 0:
                raise DataError(f"domain {domain!r} has no rows; remove it or correct its paths")
            summaries[domain] = summary
            extra = {"summary": summary.to_dict(), "config": config.to_dict()}
            join_parts(
                [job.parts / part_name(i) for i in numbers],
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


def _fingerprint(job: Job, pieces: Sequence[files.Piece]) -> str:
    """Tells whether finished parts are still right; not how many workers made them."""
    config = {key: value for key, value in job.config.to_dict().items() if key not in ("workers", "shard_bytes")}
    stamps = [files.stamp(file) for file in dict.fromkeys(piece.file for piece in pieces)]
    template = job.config.chat_template
    source = Path(template).read_text() if template and Path(template).is_file() else ""
    facts = [config, stamps, tokenizer_hash(job.tokenizer), job.tokenizer.special_tokens, source]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _prepare(job: Job, pieces: Sequence[files.Piece]) -> None:
    """Keep the parts of a run that was stopped if they are of this run; else begin anew."""
    mark, wanted = job.parts / "run.json", _fingerprint(job, pieces)
    if job.parts.is_dir():
        if mark.is_file() and mark.read_text() == wanted:
            for left in job.parts.glob("*.tmp"):
                shutil.rmtree(left)
            return
        _LOG.warning("%s holds parts of another run; beginning anew", job.parts)
        shutil.rmtree(job.parts)
    job.parts.mkdir(parents=True)
    mark.write_text(wanted)


def _run(job: Job, pieces: Sequence[files.Piece], progress: Callable[[int, int], None]) -> None:
    """Make the parts that are missing. Bad rows are judged in the order of the input."""
    total, done, summary = sum(piece.n_bytes for piece in pieces), 0, Summary()
    with closing(_results(job, pieces)) as results:
        for piece, part in zip(pieces, results, strict=False):
            summary.add(part)
            if summary.bad > allowed_bad_rows(job.config):
                break
            done += piece.n_bytes
            progress(done, total)
    if summary.bad > allowed_bad_rows(job.config):
        shutil.rmtree(job.parts)
        many = f" ({summary.bad} bad rows, more than max_bad_rows {job.config.max_bad_rows})"
        raise DataError(summary.bad_rows[0] + (many if job.config.on_bad_row == "skip" else ""))
    if summary.kept == 0:
        shutil.rmtree(job.parts)
        reasons = [f"{n} {reason}" for reason, n in sorted(summary.dropped.items())]
        reasons += [f"{summary.bad} bad"] if summary.bad else []
        raise DataError(
            f"{pieces[0].file}: no row is left of the input ({', '.join(reasons) or 'it holds none'}); "
            "check inputs and format"
        )


def _results(job: Job, pieces: Sequence[files.Piece]) -> Generator[Summary, None, None]:
    """The counts of every part in order, made as far as they are missing."""
    n_workers, n_threads = _processes(job.config, sum(finished(job.parts, i) is None for i in range(len(pieces))))
    if n_workers == 0:
        encoder = Encoder(job.config, job.tokenizer)
        for i, piece in enumerate(pieces):
            yield finished(job.parts, i) or make_part(job, encoder, i, piece)
        return
    waiting: deque[Summary | Future[Summary]] = deque()
    with WorkerPool(job, n_workers, n_threads) as pool:
        for i, piece in enumerate(pieces):
            waiting.append(finished(job.parts, i) or pool.submit(i, piece))
            if len(waiting) > 2 * n_workers:
                yield _of(waiting.popleft())
        while waiting:
            yield _of(waiting.popleft())


def _of(item: Summary | Future[Summary]) -> Summary:
    return item.result() if isinstance(item, Future) else item


def _processes(config: PreprocessConfig, n_missing: int) -> tuple[int, int]:
    """Worker processes, and threads of the tokenizer in each."""
    if config.workers is not None:
        return min(config.workers, n_missing), 1
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    n_workers = min(n_cores, n_missing, MAX_WORKERS)
    return n_workers, n_cores // max(n_workers, 1)
