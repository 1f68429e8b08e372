"""What commands print: streamed text, token rates, JSON, tables of facts; and files that appear whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import rich_click as click

_FIRST_WIDE = 0x1100
"""First code point of the scripts that are written without spaces: a line may break after any of their characters."""


def print_json(data: Any) -> None:
    """Print one JSON object on stdout, escaped where stdout is not UTF-8."""
    is_utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    sys.stdout.write(json.dumps(data, ensure_ascii=not is_utf8) + "\n")


def human_bytes(n_bytes: float) -> str:
    """Return a size in decimal units: 269 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if n_bytes < 999.5:
            return f"{n_bytes:.3g} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.4g} TB"


def human_count(n: float) -> str:
    """Return a number of parameters: 134.5 M."""
    for unit in ("", " K", " M"):
        if n < 999.95:
            return f"{n:.4g}{unit}"
        n /= 1000
    return f"{n:.4g} B"


class TokenRate:
    """Counts tokens and takes the time; the rate leaves out the wait for the first token."""

    def __init__(self) -> None:
        self.n_tokens = 0
        self._start = time.perf_counter()
        self._first = self._last = self._start

    def add(self, n_tokens: int) -> None:
        """Note tokens that arrived now."""
        self._last = time.perf_counter()
        if self.n_tokens == 0 and n_tokens:
            self._first = self._last
        self.n_tokens += n_tokens

    def __str__(self) -> str:
        wait, rest = self._first - self._start, self._last - self._first
        rate = f", {(self.n_tokens - 1) / rest:.1f} tokens/s" if self.n_tokens > 1 and rest > 0 else ""
        plural = "" if self.n_tokens == 1 else "s"
        return f"{self.n_tokens} token{plural}{rate}, first token after {wait:.2f} s"


class StreamedText:
    """Writes text as it comes; in a terminal, lines break between words."""

    def __init__(self) -> None:
        self._width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        self._column = 0
        self._spaces = self._word = ""
        self._text_ends_line = True

    def write(self, text: str) -> None:
        """Write a piece of text; in a terminal its last, perhaps unfinished word waits for the rest."""
        if text:
            self._text_ends_line = text.endswith("\n")
        if self._width is None:
            sys.stdout.write(text)
        else:
            for character in text:
                if character in " \t\n":
                    self._flush_word()
                    if character == "\n":
                        sys.stdout.write(self._spaces + "\n")
                        self._spaces, self._column = "", 0
                    else:
                        self._spaces += character
                else:
                    self._word += character
                    if ord(character) >= _FIRST_WIDE or len(self._word) >= self._width:
                        self._flush_word()
        sys.stdout.flush()

    def end(self) -> None:
        """Write what is held back, and end the line."""
        self._flush_word()
        sys.stdout.write("" if self._text_ends_line else "\n")
        sys.stdout.flush()

    def _flush_word(self) -> None:
        if not self._word:
            return
        from rich.cells import cell_len

        assert self._width is not None, "words are only held back in a terminal"
        needed = cell_len(self._spaces.expandtabs()) + cell_len(self._word)
        if self._column and self._column + needed > self._width:
            self._spaces, self._column, needed = "\n", 0, cell_len(self._word)
        sys.stdout.write(self._spaces + self._word)
        self._column += needed
        self._spaces = self._word = ""


class Fact(NamedTuple):
    """One line of a report."""

    label: str
    value: str
    good: bool | None = None
    """Shown as a mark before the value; None for neither."""


def print_report(sections: Iterable[tuple[str, Iterable[Fact]]]) -> None:
    """Print sections of facts: aligned and wrapped in a terminal, ``label: value`` lines elsewhere."""
    if not sys.stdout.isatty():
        for title, facts in sections:
            sys.stdout.write(f"{title}\n")
            for fact in facts:
                said = {True: "ok: ", False: "no: ", None: ""}[fact.good]
                sys.stdout.write(f"  {fact.label}: {said}{fact.value}\n")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    marks = {True: Text("✓", "green"), False: Text("✗", "yellow"), None: Text("")}
    for title, facts in sections:
        table = Table.grid(padding=(0, 1))
        table.add_column(width=2)
        table.add_column(style="cyan", min_width=18, no_wrap=True)
        table.add_column(overflow="fold")
        for fact in facts:
            table.add_row(marks[fact.good], fact.label, Text(fact.value))
        console.print(Text(title, "bold"))
        console.print(table)
        console.print()


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """Open a UTF-8 text file for writing that takes its name when the body succeeds; a failed body leaves nothing.

    Devices and pipes are written to directly. The body should only write.

    Raises
    ------
    click.ClickException
        If it cannot be written.
    """
    target = path.resolve()
    direct = target.exists() and not target.is_file()
    scratch = target if direct else target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with scratch.open("w", encoding="utf-8") as file:
            yield file
            file.flush()
            if not direct:
                os.fsync(file.fileno())
        if not direct:
            os.replace(scratch, target)
    except OSError as error:
        raise click.ClickException(
            f"{path}: cannot write: {error.strerror or error}; choose a place with room that you may write to"
        ) from error
    finally:
        if not direct:
            scratch.unlink(missing_ok=True)
