"""Streamed text, token rates, sizes and files that appear whole."""

from __future__ import annotations

import io
import os
import re
import sys
from pathlib import Path

import pytest
import rich_click as click
from hypothesis import given
from hypothesis import strategies as st

from astrai_cli import output
from astrai_cli.output import Fact, StreamedText, TokenRate, human_bytes, human_count, print_report, whole_file


class Screen(io.StringIO):
    """A terminal's stdout."""

    def isatty(self) -> bool:
        return True


def streamed(pieces: list[str], columns: int) -> str:
    """What a terminal of that width shows."""
    screen = Screen()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", screen)
        patch.setattr(output.shutil, "get_terminal_size", lambda: os.terminal_size((columns, 24)))
        out = StreamedText()
        for piece in pieces:
            out.write(piece)
        out.end()
    return screen.getvalue()


def test_lines_break_between_words() -> None:
    assert streamed(["one tw", "o three fo", "ur"], 10) == "one two\nthree four\n"
    assert streamed(["a b\n\n  c", " d"], 10) == "a b\n\n  c d\n"


def test_scripts_without_spaces_are_not_held_back() -> None:
    """Each of these characters is two columns wide."""
    assert streamed(["日本語", "日本語"], 8) == "日本語日\n本語\n"


@given(st.lists(st.text("ab 日\n", max_size=12), max_size=8), st.integers(4, 30))
def test_wrapping_changes_nothing_but_spaces_and_fits(pieces: list[str], columns: int) -> None:
    """Whatever the pieces: the same characters in the same order, and no line that is too wide but by a word."""
    from rich.cells import cell_len

    shown = streamed(pieces, columns)
    assert "".join(shown.split()) == "".join("".join(pieces).split())
    assert streamed(["".join(pieces)], columns) == shown
    for line in shown.split("\n"):
        assert cell_len(line.rstrip(" ")) <= columns or " " not in line.strip(" ") or line.startswith(" ")


def test_a_report_is_aligned_in_a_terminal_and_plain_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = [("Title", [Fact("one", "x" * 70, True), Fact("two", "y", False), Fact("three", "z")])]
    print_report(report)
    assert capsys.readouterr().out == f"Title\n  one: ok: {'x' * 70}\n  two: no: y\n  three: z\n"
    screen = Screen()
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", screen)
    print_report(report)
    assert "\x1b[" in screen.getvalue(), "colours"
    lines = [line.rstrip() for line in re.sub(r"\x1b\[[\d;]*m", "", screen.getvalue()).splitlines()]
    assert lines == [
        "Title",
        f"✓  one{'x':>17}{'x' * 37}",
        f"{'x' * 32:>54}",
        f"✗  two{'y':>17}",
        f"   three{'z':>15}",
        "",
    ]


def test_the_rate_leaves_out_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 2.0, 2.5, 3.0])
    monkeypatch.setattr(output.time, "perf_counter", lambda: next(times))
    rate = TokenRate()
    for n_tokens in (1, 4, 5):
        rate.add(n_tokens)
    assert str(rate) == "10 tokens, 9.0 tokens/s, first token after 2.00 s"


@pytest.mark.parametrize(
    ("n", "as_bytes", "as_count"),
    [
        (0, "0 B", "0"),
        (999, "999 B", "999"),
        (269_060_552, "269 MB", "269.1 M"),
        (1_000_000, "1 MB", "1 M"),
        (999_999, "1 MB", "1 M"),
        (7_615_616_512, "7.62 GB", "7.616 B"),
        (2_000_000_000_000, "2 TB", "2000 B"),
    ],
)
def test_human_sizes(n: int, as_bytes: str, as_count: str) -> None:
    assert (human_bytes(n), human_count(n)) == (as_bytes, as_count)


def test_a_failed_body_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.write_text("old")

    def fail() -> None:
        with whole_file(target) as file:
            file.write("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert target.read_text() == "old"
    with whole_file(target) as file:
        file.write("new")
    assert target.read_text() == "new"


def test_a_link_keeps_pointing_where_it_did(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    link = tmp_path / "link"
    link.symlink_to("real")
    with whole_file(link) as file:
        file.write("new")
    assert link.is_symlink()
    assert (tmp_path / "real").read_text() == "new"


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(click.ClickException, match="no/out: cannot write: No such file or directory; choose"),
        whole_file(tmp_path / "no" / "out"),
    ):
        pytest.fail("the body must not run")


def test_dtypes_are_those_of_core() -> None:
    """The names of --dtype are written twice, because reading core's would import torch for the help."""
    import torch

    from astrai_cli.options import DTYPES
    from astrai_core import ModelConfig
    from astrai_core.auto import _DTYPES, resolve_dtype

    config = ModelConfig.from_dict(
        {
            "model_type": "llama",
            "vocab_size": 8,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        }
    )
    assert set(DTYPES) == {"auto", *_DTYPES}
    assert all(isinstance(resolve_dtype(name, config, torch.device("cpu")), torch.dtype) for name in DTYPES)
