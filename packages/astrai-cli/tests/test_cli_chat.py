"""``astrai chat``: history, commands, piped input, and Ctrl-C and Ctrl-D in a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("astrai_infer", reason="astrai-infer is not installed")

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def test_each_piped_line_is_one_turn(run: Any, model_dir: Path) -> None:
    result = run("chat", "-m", model_dir, stdin="Hi\n\nAgain")
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"{ALPHABET}\n{ALPHABET}\n", "")


def test_the_history_is_part_of_the_next_prompt(run: Any, model_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "saved.jsonl"
    result = run("chat", "-m", model_dir, "--system", "Be.", stdin=f"one\ntwo\n/save {file}\n")
    assert result.exit_code == 0
    assert json.loads(file.read_text()) == {
        "messages": [
            {"role": "system", "content": "Be."},
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": ALPHABET},
            {"role": "user", "content": "two"},
            {"role": "assistant", "content": ALPHABET},
        ]
    }
    # A context with room for the first turn but not for the second shows that the second prompt holds the first.
    result = run("chat", "-m", model_dir, "--max-seq-len", 70, stdin="one\ntwo\n/reset\ntwo\n")
    assert (result.exit_code, result.stdout) == (1, f"{ALPHABET}\n{ALPHABET}\n")
    assert re.fullmatch(r"error: the conversation has \d+ tokens, the context 70; /reset forgets it.*\n", result.stderr)


def test_a_message_that_was_refused_is_forgotten(run: Any, model_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "saved.jsonl"
    result = run("chat", "-m", model_dir, "--max-seq-len", 60, stdin=f"{'x' * 100}\nHi\n/save {file}\n")
    assert (result.exit_code, result.stdout) == (1, f"{ALPHABET}\n")
    assert [turn["content"] for turn in json.loads(file.read_text())["messages"]] == ["Hi", ALPHABET]


def test_commands(run: Any, model_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "saved.jsonl"
    lines = ["Hi", "/reset", "/system You are.", "Ho", f"/save {file}", "/exit", "never read"]
    assert run("chat", "-m", model_dir, stdin="\n".join(lines)).stdout == f"{ALPHABET}\n" * 2
    messages = json.loads(file.read_text())["messages"]
    assert [message["content"] for message in messages] == ["You are.", "Ho", ALPHABET]
    result = run(
        "chat", "-m", model_dir, stdin=f"/system a\n/system\n/save {file}\n/nonesuch\n/save\n/save no/such/x\n"
    )
    assert json.loads(file.read_text()) == {"messages": []}
    assert result.exit_code == 1
    errors = result.stderr.splitlines()
    assert errors[0] == "error: unknown command /nonesuch; /help lists them"
    assert errors[1] == "error: /save needs a file name"
    assert errors[2].startswith("error: no/such/x: cannot write: No such file or directory")


def test_an_answer_that_was_cut_off_says_why(run: Any, model_dir: Path) -> None:
    result = run("chat", "-m", model_dir, "--max-tokens", 3, stdin="Hi\n")
    assert (result.stdout, result.stderr) == ("abc\n", "cut off after 3 tokens (--max-tokens)\n")
    result = run("chat", "-m", model_dir, "--max-seq-len", 32, stdin="Hi\n")
    assert result.stderr == "cut off: the context of 32 tokens is full; /reset forgets the conversation\n"


def test_stats_print_the_rate(run: Any, model_dir: Path) -> None:
    result = run("chat", "-m", model_dir, "--stats", stdin="Hi\n")
    assert re.fullmatch(r"27 tokens, [\d.]+ tokens/s, first token after [\d.]+ s\n", result.stderr)


class Terminal:
    """``astrai`` in a pseudo-terminal of its own."""

    def __init__(self, *args: object) -> None:
        self.pid, self.descriptor = pty.fork()
        if self.pid == 0:
            environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
            signal.signal(
                signal.SIGINT, signal.SIG_DFL
            )  # a shell's background job ignores it, and so would its children
            os.execve(sys.executable, [sys.executable, "-m", "astrai_cli", *map(str, args)], environment)
        self.shown = ""
        self.seen = 0

    def type(self, text: str) -> None:
        os.write(self.descriptor, text.encode())

    def wait_for(self, pattern: str, seconds: float = 120) -> str:
        """Wait until what was shown since the last call matches; return it up to the match's end."""
        end = time.monotonic() + seconds
        while (match := re.search(pattern, self.shown[self.seen :])) is None:
            ready, _, _ = select.select([self.descriptor], [], [], max(0, end - time.monotonic()))
            assert ready, f"waited for {pattern!r} in {self.shown!r}"
            try:
                data = os.read(self.descriptor, 65536)
            except OSError:  # Linux reports the end of a terminal as an I/O error
                data = b""
            assert data, f"ended before {pattern!r} in {self.shown!r}"
            self.shown += data.decode(errors="replace").replace("\r\n", "\n")
        text = self.shown[self.seen : self.seen + match.end()]
        self.seen += match.end()
        return text

    def press(self, key: str, pattern: str) -> str:
        """Press a key, again if need be, until `pattern` shows.

        CPython may notice a signal late: between two reads of readline, only with the next key.
        """
        for _ in range(60):
            self.type(key)
            try:
                return self.wait_for(pattern, seconds=2)
            except AssertionError:
                continue
        raise AssertionError(f"{key!r} did not bring {pattern!r} in {self.shown!r}")

    def exit_code(self, seconds: float = 120) -> int:
        end = time.monotonic() + seconds
        while True:
            ready, _, _ = select.select([self.descriptor], [], [], max(0, end - time.monotonic()))
            assert ready, f"still running after {seconds} s; it showed {self.shown!r}"
            try:
                if not os.read(self.descriptor, 65536):
                    break
            except OSError:
                break
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        return os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.descriptor)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def start(*args: object) -> Terminal:
        opened.append(Terminal(*args))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


@pytest.mark.slow
def test_ctrl_c_stops_the_answer_and_ctrl_d_leaves(
    terminal: Callable[..., Terminal], counting_dir: Path, tmp_path: Path
) -> None:
    chat = terminal("chat", "-m", counting_dir, "--stats")
    assert "context of 200000 tokens" in chat.wait_for("\n> ")
    chat.type("Count!\r")
    chat.wait_for("12345678")
    chat.press("\x03", "stopped")
    n_tokens = int(re.search(r"(\d+) tokens, ", chat.wait_for(r"\d+ tokens, .*first token.*\n"))[1])  # type: ignore[index]
    assert 8 <= n_tokens < 190_000, "it was aborted, not finished"
    chat.wait_for("> ")
    file = tmp_path / "saved.jsonl"
    chat.type(f"/save {file}\r")
    chat.wait_for("2 messages are in")
    assert json.loads(file.read_text())["messages"][1]["content"].startswith("12345678")
    chat.wait_for("> ")  # a control key typed before the prompt would mean something else to the terminal
    chat.type("half a line")
    chat.press("\x03", "Ctrl-D leaves")
    chat.wait_for("> ")
    chat.type("/help\r")
    assert "/system TEXT" in chat.wait_for("Ctrl-C stops an answer")
    chat.wait_for("> ")
    chat.type("\x04")
    assert chat.exit_code() == 0


@pytest.mark.slow
def test_ctrl_c_ends_generate_with_130(terminal: Callable[..., Terminal], counting_dir: Path) -> None:
    generate = terminal("generate", "-m", counting_dir, "-p", "Hi")
    generate.wait_for("12345678")
    generate.press("\x03", r"\n")
    assert generate.exit_code() == 130
    assert "Traceback" not in generate.shown
