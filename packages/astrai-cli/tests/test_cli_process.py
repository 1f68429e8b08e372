"""``astrai`` as a process: exit codes, broken pipes, full disks, tracebacks only with --debug."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("astrai_infer", reason="astrai-infer is not installed")

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="no /dev/full on this system")


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_traceback_is_shown_only_on_demand(run_process: Any, tmp_path: Path, place: str) -> None:
    lines = tmp_path / "in.jsonl"
    lines.write_text("{")
    args = ["generate", "-m", "x", "--input", lines, "--output", tmp_path / "out"]
    quiet = run_process(*args)
    assert (quiet.returncode, quiet.stderr.count("\n"), "Traceback" in quiet.stderr) == (1, 1, False)
    loud = run_process(*(["--debug", *args] if place == "before" else [*args, "--debug"]))
    assert loud.returncode == 1
    assert "Traceback (most recent call last)" in loud.stderr
    assert loud.stderr.splitlines()[-1] == quiet.stderr.strip()


def test_an_unexpected_failure_is_one_line_too() -> None:
    code = (
        "from astrai_cli import main\n"
        "from astrai_cli.commands import doctor\n"
        "doctor.examine = lambda: 1 / 0\n"
        "main.main()"
    )
    for flags in ([], ["--debug"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *flags, "doctor"], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 1
        if flags:
            assert "Traceback" in done.stderr
        else:
            assert done.stderr == "error: ZeroDivisionError: division by zero (run with --debug for the traceback)\n"


@pytest.mark.parametrize("args", [("--help",), ("generate",)])
def test_a_reader_that_goes_away_is_no_error(args: tuple[str, ...], counting_dir: Path) -> None:
    if args == ("generate",):
        args = ("generate", "-m", str(counting_dir), "-p", "Hi")
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "astrai_cli", *args], stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    if args[0] == "generate":
        assert os.read(reader, 1)
    os.close(reader)
    _, errors = process.communicate(timeout=300)
    assert errors == ""
    assert process.returncode == 1


@needs_full
@pytest.mark.parametrize("args", [("--help",), ("completion", "bash"), ("generate", "-p", "Hi")])
def test_a_full_disk_behind_stdout(args: tuple[str, ...], model_dir: Path) -> None:
    model = ["-m", model_dir] if args[0] == "generate" else []
    with FULL.open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "astrai_cli", *args, *map(str, model)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=300,
        )
    assert done.stderr == "error: standard output: cannot write: No space left on device; free some space\n"
    assert done.returncode == 1


@needs_full
def test_a_full_disk_behind_output(run: Any, model_dir: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "Hi"}\n')
    result = run("generate", "-m", model_dir, "--input", source, "--output", FULL)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: /dev/full: cannot write: No space left on device; ")
    assert FULL.is_char_device(), "a device is written to, not replaced"


def test_output_that_cannot_be_written_leaves_nothing(
    run: Any, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "Hi"}\n')
    target.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    result = run("generate", "-m", model_dir, "--input", source, "--output", target)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {target}: cannot write: No space left on device")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    assert target.read_text() == "old"


def test_characters_that_the_terminal_lacks_do_not_end_the_answer(
    run_process: Any, copy_model: Callable[..., Path]
) -> None:
    path = copy_model(chat_template="0")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = run_process("generate", "-m", path, "-p", "ü", "--json", "--max-tokens", 2, env=environment)
    assert done.returncode == 0
    assert done.stdout.isascii()


def test_warnings_of_the_packages_are_one_line() -> None:
    """A record with an exception is left out: what it reports reaches the command as an error."""
    code = (
        "import logging\n"
        "from astrai_cli import diagnostics\n"
        "diagnostics.set_up()\n"
        "logging.getLogger('astrai_infer.x').warning('two\\nlines')\n"
        "logging.getLogger('astrai_infer.x').info('not shown')\n"
        "logging.getLogger('transformers').warning('noise')\n"
        "try: 1 / 0\n"
        "except ZeroDivisionError: logging.getLogger('astrai_infer.x').exception('step failed')\n"
        "import warnings; warnings.warn('noise')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "warning: two lines\n")
