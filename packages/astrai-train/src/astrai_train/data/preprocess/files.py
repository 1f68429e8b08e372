"""Input files in pieces of bounded size, each of which any worker can read by itself.

A piece of a line-based file is a range of bytes: it holds the lines that begin in it. Lines are numbered only when one
is bad. BOM, CRLF, blank lines and a last line without its end are all handled here (training rule 11).
"""

from __future__ import annotations

import codecs
import glob
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from astrai_core.errors import DataError, MissingDependencyError

FileType = Literal["jsonl", "json", "parquet", "text"]

_TYPES: dict[str, FileType] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".txt": "text",
    ".md": "text",
}
_READ = 1 << 20


@dataclass(frozen=True)
class Piece:
    """A part of a file."""

    file: Path
    type: FileType
    start: int
    """First byte of its range, or its first row group."""
    stop: int
    """Byte behind the range, or row group behind the last."""
    n_bytes: int
    """Its share of the file, for progress."""


@dataclass(frozen=True)
class Record:
    """What a file holds at one place."""

    at: int
    """Byte at which the line begins, or the index of the record in its file."""
    value: Any
    """Parsed JSON, a dict of columns, or text; None if `problem`."""
    n_bytes: int
    """About what it takes in the file (a Parquet row: in memory)."""
    problem: str | None = None
    """Why it could not be read."""


def find_files(patterns: tuple[str, ...]) -> list[Path]:
    """Return the files of paths and patterns, each once, a pattern's in the order of their names.

    Raises
    ------
    DataError
        If a path does not exist or a pattern finds nothing.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        exact = Path(pattern)
        names = [exact] if exact.is_file() else sorted(Path(p) for p in glob.glob(pattern, recursive=True))
        files = [path for path in names if path.is_file()]
        if not files:
            raise DataError(f"{pattern}: no such file; correct the path or pattern in inputs.paths")
        found |= dict.fromkeys(files)
    return list(found)


def file_type(file: Path, wanted: str) -> FileType:
    """Return what a file is: as asked, else by its name, and for ``.json`` by its first character.

    Raises
    ------
    DataError
        If the name tells nothing.
    """
    if wanted != "auto":
        return wanted  # type: ignore[return-value]  # the configuration's names
    if file.suffix == ".json":
        with file.open("rb") as stream:
            _skip_bom(stream, file)
            start = stream.read(4096).lstrip()
        return "json" if start.startswith(b"[") else "jsonl"
    if file.suffix not in _TYPES:
        raise DataError(f"{file}: the name does not tell what it is; set inputs.type to jsonl, json, parquet or text")
    return _TYPES[file.suffix]


def cut(file: Path, wanted: str, chunk_bytes: int) -> list[Piece]:
    """Cut a file into pieces.

    Raises
    ------
    DataError, MissingDependencyError
        If it is not a Parquet file, or pyarrow is not installed.
    """
    kind = file_type(file, wanted)
    size = file.stat().st_size
    if kind == "parquet":
        groups = _parquet(file).num_row_groups
        return [Piece(file, kind, i, i + 1, size // groups) for i in range(groups)]
    if kind == "json":
        return [Piece(file, kind, 0, size, size)]
    ranges = [(start, min(start + chunk_bytes, size)) for start in range(0, size, chunk_bytes)]
    return [Piece(file, kind, start, stop, stop - start) for start, stop in ranges]


def read(piece: Piece, text_unit: str) -> Iterator[Record]:
    """Yield the records of a piece; blank lines are left out.

    Raises
    ------
    DataError
        If the file as a whole is not what it should be.
    """
    if piece.type == "parquet":
        yield from _read_parquet(piece)
    elif piece.type == "json":
        yield from _read_array(piece.file)
    elif piece.type == "text" and text_unit == "file":
        yield from _read_text(piece)
    else:
        for at, line in _lines(piece):
            if line.strip():
                yield _record(at, line, piece.type)


def place(piece: Piece, at: int) -> str:
    """Return ``file:line`` of a record, or ``file: record n`` where there are no lines."""
    if piece.type in ("parquet", "json"):
        return f"{piece.file}: record {at + 1}"
    with piece.file.open("rb") as stream:
        lines, left = 1, at
        while left and (chunk := stream.read(min(left, _READ))):
            lines += chunk.count(b"\n")
            left -= len(chunk)
    return f"{piece.file}:{lines}"


def _skip_bom(stream: BinaryIO, file: Path) -> int:
    """Go behind a UTF-8 byte-order mark; return how long it is."""
    start = stream.read(3)
    if start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        raise DataError(f"{file}: UTF-16 text; convert it to UTF-8")
    length = 3 if start == codecs.BOM_UTF8 else 0
    stream.seek(length)
    return length


def _lines(piece: Piece) -> Iterator[tuple[int, bytes]]:
    """Yield (first byte, line without its end) of the lines that begin in the piece."""
    with piece.file.open("rb") as stream:
        at = _skip_bom(stream, piece.file)
        if piece.start > at:
            # The line that runs into the piece belongs to the one before, unless it ends just there.
            stream.seek(piece.start - 1)
            at = piece.start - 1 + len(stream.readline())
        while at < piece.stop and (line := stream.readline()):
            yield at, line.rstrip(b"\r\n")
            at += len(line)


def _record(at: int, line: bytes, kind: FileType) -> Record:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        return Record(at, None, len(line), f"not UTF-8 text (byte {error.start} of the line)")
    if kind == "text":
        return Record(at, text, len(line))
    try:
        return Record(at, json.loads(text), len(line))
    except json.JSONDecodeError as error:
        cut_off = " (the line is cut off)" if error.pos >= len(text.rstrip()) or "Unterminated" in error.msg else ""
        return Record(at, None, len(line), f"not valid JSON: {error.msg} at character {error.pos + 1}{cut_off}")
    except (ValueError, RecursionError) as error:  # a number of too many digits, too deep a nesting
        return Record(at, None, len(line), f"not valid JSON: {error}")


def _read_text(piece: Piece) -> Iterator[Record]:
    lines = list(_lines(piece))
    if not lines:
        return
    try:
        text = "\n".join(line.decode("utf-8") for _, line in lines)
    except UnicodeDecodeError as error:
        bad = next(at for at, line in lines if _record(at, line, "text").problem)
        yield Record(bad, None, 0, f"not UTF-8 text ({error.reason})")
        return
    if text.strip():
        yield Record(lines[0][0], text, len(text))


def _read_array(file: Path) -> Iterator[Record]:
    """Yield the elements of a JSON array one by one, with only the current one in memory."""
    decoder, index, text, at = json.JSONDecoder(), 0, "", 0
    with file.open("rb") as raw:
        _skip_bom(raw, file)
        stream = codecs.getreader("utf-8")(raw)
        try:
            text = stream.read(_READ).lstrip()
            if not text.startswith("["):
                raise DataError(f"{file}: must hold a JSON array of records; set inputs.type to jsonl for JSON lines")
            at, expect_value = 1, True
            while True:
                while at < len(text) and text[at] in " \t\r\n":
                    at += 1
                if at == len(text):
                    text, at = stream.read(_READ), 0
                    if not text:
                        raise DataError(f"{file}: the JSON array is cut off after record {index}; fetch it again")
                elif text[at] == "]":
                    return
                elif text[at] == "," and not expect_value:
                    at, expect_value = at + 1, True
                elif not expect_value:
                    raise DataError(f"{file}: a comma is missing after record {index}; correct the file")
                else:
                    value, start, at, text = _element(decoder, stream, text, at, f"{file}: record {index + 1}")
                    yield Record(index, value, at - start)
                    index, expect_value = index + 1, False
        except UnicodeDecodeError as error:
            raise DataError(f"{file}: not UTF-8 text after record {index} ({error.reason}); convert it") from None


def _element(
    decoder: json.JSONDecoder, stream: codecs.StreamReader, text: str, at: int, where: str
) -> tuple[Any, int, int, str]:
    """Parse the value at `at`, reading on (twice as much each time) while it is not complete.

    Returns it, its first character and the one behind it, and the text in which these count.
    """
    size = _READ
    while True:
        try:
            value, end = decoder.raw_decode(text, at)
            # A number at the end of what was read may go on.
            if end < len(text) or text[at] in '{["':
                return value, at, end, text
            problem = "cut off"
        except ValueError as error:
            problem = getattr(error, "msg", str(error))
        more = stream.read(size)
        if not more:
            raise DataError(f"{where}: not valid JSON: {problem}; correct the file")
        text, at, size = text[at:] + more, 0, 2 * size


def _parquet(file: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingDependencyError(
            f"{file}: Parquet files need pyarrow; run `pip install 'astrai-train[parquet]'`"
        ) from None
    try:
        # Without a buffer a row group is read whole, however large it is.
        return pyarrow.parquet.ParquetFile(file, buffer_size=_READ)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file}: not a readable Parquet file: {' '.join(str(error).split())}") from None


def _read_parquet(piece: Piece) -> Iterator[Record]:
    file = _parquet(piece.file)
    index = sum(file.metadata.row_group(i).num_rows for i in range(piece.start))
    for batch in file.iter_batches(batch_size=256, row_groups=range(piece.start, piece.stop)):
        n_bytes = batch.nbytes // max(batch.num_rows, 1)
        for value in batch.to_pylist():
            yield Record(index, value, n_bytes)
            index += 1


def stamp(file: Path) -> tuple[str, int, int]:
    """Return what tells whether a file has changed: absolute path, size and modification time."""
    status = file.stat()
    return os.path.abspath(file), status.st_size, status.st_mtime_ns
