"""``astrai preprocess`` and ``astrai data inspect``."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("astrai_train", reason="astrai-train is not installed")

CHAT = [{"role": "user", "content": "Größe?"}, {"role": "assistant", "content": "Zwölf"}]


@pytest.fixture
def prepare(tmp_path: Path, model_dir: Path) -> Callable[..., Path]:
    """Write records and a configuration; returns the configuration's path."""

    def make(records: list[Any], **changes: Any) -> Path:
        (tmp_path / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        config = {
            "inputs": [{"paths": [str(tmp_path / "*.jsonl")]}],
            "tokenizer": str(model_dir),
            "format": "messages",
            "workers": 0,
            **changes,
        }
        (tmp_path / "data.json").write_text(json.dumps(config))
        return tmp_path / "data.json"

    return make


def test_chats_become_a_store_that_shows_its_mask(run: Any, prepare: Any, tmp_path: Path) -> None:
    config = prepare([{"messages": CHAT}] * 2)
    made = run("preprocess", config, "-o", tmp_path / "store")
    assert made.exit_code == 0, made.stderr
    assert made.stdout.splitlines() == [
        str(tmp_path / "store"),
        "  rows kept: 2",
        "  tokens: 70",
        "  supervised: 20.0% of the tokens",
    ]
    shown = run("data", "inspect", tmp_path / "store", "--rows", 1, "--check").stdout
    assert "holds: 2 rows of kind chat" in shown
    assert "token type: <u2 for a vocabulary of 259" in shown
    assert shown.endswith(
        "row 0\ninput_ids: <|im_start|>user\nGröße?<|im_end|>\n<|im_start|>assistant\n>>>Zwölf<|im_end|><<<\n\n"
    )
    report = json.loads(run("data", "inspect", tmp_path / "store", "--start", 1, "--json").stdout)
    assert (report["kind"], report["n_rows"], report["summary"]["kept"]) == ("chat", 2, 2)
    assert [row["row"] for row in report["rows"]] == [1]
    assert [part["text"] for part in report["rows"][0]["parts"] if part["supervised"]] == ["Zwölf<|im_end|>"]


def test_a_terminal_gets_colours(model_dir: Path, run: Any, prepare: Any, tmp_path: Path, run_process: Any) -> None:
    run("preprocess", prepare([{"messages": CHAT}]), "-o", tmp_path / "store")
    reader, writer = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120"}
    environment.pop("NO_COLOR", None)
    done = run_process(
        "data", "inspect", tmp_path / "store", capture_output=False, stdout=writer, stderr=subprocess.PIPE, env=environment
    )  # fmt: skip
    os.close(writer)
    assert done.returncode == 0, done.stderr
    shown = os.read(reader, 1 << 16).decode()
    os.close(reader)
    assert re.search("\x1b\\[32mZwölf<\\|im_end\\|>", shown)
    assert re.search("\x1b\\[2m<\\|im_start\\|>user", shown)


def test_pairs_and_domains(run: Any, prepare: Any, tmp_path: Path) -> None:
    """Row PP1: the summary says why a record was dropped."""
    records = [{"prompt": "1", "chosen": "a", "rejected": "b"}, {"prompt": "2", "chosen": "a"}]
    inputs = [{"paths": [str(tmp_path / "in.jsonl")], "domain": "maths"}]
    config = prepare(records, format="preference", inputs=inputs)
    made = run("preprocess", config, "-o", tmp_path / "stores", "--workers", 1)
    assert made.exit_code == 0, made.stderr
    assert "  dropped: 1 (incomplete pair: no rejected)\n" in made.stdout
    shown = run("data", "inspect", tmp_path / "stores" / "maths").stdout
    assert "prompt: 1\nchosen: >>>a<|im_end|><<<\nrejected: >>>b<|im_end|><<<\n" in shown


def test_skipped_rows_are_warned_of(run: Any, prepare: Any, tmp_path: Path) -> None:
    config = prepare([{"messages": CHAT}, {"messages": 1}], on_bad_row="skip")
    made = run("preprocess", config, "-o", tmp_path / "store", "--json")
    assert json.loads(made.stdout)["store"]["bad"] == 1
    assert re.fullmatch(r"warning: skipped \S+in.jsonl:2: field 'messages' must be a list .*\n", made.stderr)


@pytest.mark.parametrize(
    ("records", "changes", "said"),
    [
        ([{"messages": CHAT}, {}], {}, r"error: \S+in.jsonl:2: field 'messages' is missing\n"),
        ([{"messages": CHAT}], {"format": "mesages"}, r"error: \S+data.json: field 'format': .*\n"),
        ([{"messages": CHAT}], {"tokenizer": "/nowhere"}, r"error: /nowhere.*\n"),
        ([], {}, r"error: \S+: the files are empty; give data\n"),
    ],
)
def test_failures_are_one_line(
    run: Any, prepare: Any, tmp_path: Path, records: list[Any], changes: dict[str, Any], said: str
) -> None:
    """Rule 11: file, line and reason; nothing is left behind."""
    made = run("preprocess", prepare(records, **changes), "-o", tmp_path / "store")
    assert made.exit_code == 1
    assert re.fullmatch(said, made.stderr)
    assert sorted(path.name for path in tmp_path.iterdir() if "store" in path.name) == []


def test_inspect_refuses_foreign_things_by_name(
    run: Any, prepare: Any, tmp_path: Path, copy_model: Callable[..., Path]
) -> None:
    assert "not a token store (store.json is missing)" in run("data", "inspect", tmp_path).stderr
    store = tmp_path / "store"
    run("preprocess", prepare([{"messages": CHAT}]), "-o", store)
    again = run("preprocess", tmp_path / "data.json", "-o", store)
    assert (again.exit_code, "directory is not empty" in again.stderr) == (1, True)
    other = copy_model("other", chat_template="{{ messages }}")
    refused = run("data", "inspect", store, "--tokenizer", other)
    assert (refused.exit_code, "made with another tokenizer" in refused.stderr) == (1, True)
    items = bytearray((store / "input_ids.000000.bin").read_bytes())
    items[1] = 255
    (store / "input_ids.000000.bin").write_bytes(items)
    assert "an item is not below 259" in run("data", "inspect", store, "--rows", 0, "--check").stderr


def test_the_flags_of_data_inspect_are_frozen(run: Any) -> None:
    from astrai_cli.commands.data import inspect_store

    flags = [param.opts[0] if param.opts else param.name for param in inspect_store.params]
    assert flags == ["store", "--rows", "--start", "--tokenizer", "--check", "--json", "--debug"]
    assert "Look at tokens to train on." in run("data", "--help").stdout
