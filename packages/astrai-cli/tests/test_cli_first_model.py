"""``astrai tokenizer train``, ``astrai report`` and the model that ``astrai quickstart`` trains."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("astrai_train", reason="astrai-train is not installed")

TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 30


def test_a_tokenizer_from_files(run: Any, tmp_path: Path) -> None:
    """The directory holds what loads; a second run keeps what it would overwrite."""
    from astrai_core import AutoTokenizer

    (tmp_path / "a.txt").write_text(TEXT)
    target = tmp_path / "made"
    command = ["tokenizer", "train", tmp_path / "*.txt", "--vocab-size", 290, "-o", target]
    done = run(*command, "--chat-template", "chatml", "--special-token", "<|tool|>")
    assert done.exit_code == 0, done.stderr
    assert "vocabulary: 290 entries" in done.stdout and "eos token: <|im_end|> (2)" in done.stdout
    assert {path.name for path in target.iterdir()} == {
        *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    }
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert tokenizer.decode(tokenizer.encode("Größe 13")) == "Größe 13"
    assert len(tokenizer.encode("<|tool|>")) == 1
    again = run(*command)
    assert again.exit_code == 1 and "not empty; choose another one or use --overwrite" in again.stderr
    shown = json.loads(run(*command, "--overwrite", "--json").stdout)
    assert shown["vocab_size"] == 290 and not shown["chat_template"]
    assert shown["special_tokens"]["eos_token"] == ["<|endoftext|>", 0]
    assert not (target / "chat_template.jinja").exists()


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--vocab-size", "100"], 2, "--vocab-size: 100 has no room for 256 bytes and 1 special tokens"),
        (["--vocab-size", "300", "--chat-template", "x"], 2, "--chat-template: 'x' is neither chatml nor a file"),
        (["--vocab-size", "300", "--special-token", ""], 2, "--special-token: one is empty"),
        ([], 2, "missing option '--vocab-size'"),
    ],
)
def test_a_mistake_is_one_line(run: Any, tmp_path: Path, flags: list[str], code: int, message: str) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    failed = run("tokenizer", "train", tmp_path / "a.txt", "-o", tmp_path / "made", *flags)
    assert failed.exit_code == code
    assert message in failed.stderr and failed.stderr.count("\n") == 1
    assert not (tmp_path / "made").exists()


def test_a_text_with_too_few_pairs_is_told(run: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc abc")
    done = run("tokenizer", "train", tmp_path / "a.txt", "--vocab-size", 1000, "-o", tmp_path / "made")
    assert done.exit_code == 0
    assert re.search(r"warning: the text gave 2\d\d entries, not 1000: .* lower --min-frequency", done.stderr)


def test_the_report_of_a_run(run: Any, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 2.25}\n')
    done = run("report", tmp_path)
    assert (done.exit_code, done.stdout) == (0, f"{tmp_path / 'report.html'}\n")
    assert "<dd>2.2500</dd>" in (tmp_path / "report.html").read_text()
    assert run("report", tmp_path, "-o", tmp_path / "other.html").stdout == f"{tmp_path / 'other.html'}\n"
    assert (tmp_path / "other.html").read_bytes() == (tmp_path / "report.html").read_bytes()
    (tmp_path / "empty").mkdir()
    assert "empty: holds no metrics.jsonl; give the output_dir of a run" in run("report", tmp_path / "empty").stderr


def test_the_novel_is_whole() -> None:
    from astrai_cli.first_model import novel

    text = novel()
    assert text.startswith("EMMA\n\nBy Jane Austen") and text.rstrip().endswith("FINIS")
    assert 880_000 < len(text) < 890_000


def test_a_folder_that_exists_is_not_taken(tmp_path: Path) -> None:
    from astrai_cli.first_model import free_folder

    assert free_folder(tmp_path / "run") == tmp_path / "run"
    (tmp_path / "run").mkdir()
    (tmp_path / "run-2").mkdir()
    assert free_folder(tmp_path / "run") == tmp_path / "run-3"


def test_a_training_that_is_stopped_early_says_nothing_of_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C before the first test: there is no loss to tell."""
    from astrai_cli.first_model import _loss_lines
    from astrai_train import TrainResult

    _loss_lines(3.0).on_train_end(None, TrainResult(1, Path("step_1"), "SIGINT"))
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_quickstart_trains_and_writes(
    run: Any, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 6, deliver 7, cut short: the loss falls, the model writes, and what is left can be used."""
    pytest.importorskip("astrai_infer", reason="astrai-infer is not installed")
    from astrai_cli import first_model
    from astrai_cli.commands import quickstart

    monkeypatch.setattr(quickstart, "MODEL", str(model_dir))
    monkeypatch.setattr(first_model, "SEQ_LEN", 64)
    monkeypatch.setattr(first_model, "BATCH", 4)
    monkeypatch.setattr(first_model, "MIN_STEPS", 60)
    monkeypatch.chdir(tmp_path)
    done = run("quickstart", "--train-seconds", 8, "--device", "cpu")
    assert done.exit_code == 0, done.stderr
    losses = [float(found) for found in re.findall(r"^ +\d+ +(\d\.\d{3}) +\d+  █+$", done.stdout, re.MULTILINE)]
    assert len(losses) >= 5
    assert 6.5 < losses[0] < 7.5, "as random weights: about ln 1024"
    assert losses[-1] < losses[0] - 0.7
    assert re.search(r"before the training it was (6\.9|7\.0)", done.stdout)
    story = done.stdout.partition("It writes on from 'Emma was very':\n\n")[2].partition("\n\nIts curves are in ")
    assert story[0].startswith("Emma was very") and len(story[0]) > 100
    assert Path(story[2].partition("\n")[0]).is_file(), "the report"
    command = re.search(r"astrai (generate -m runs\S+ --raw) -p", done.stdout)
    assert command is not None
    answer = run(*command[1].split(), "-p", "Mr. Knightley", "--max-tokens", 5, "--temperature", 0)
    assert answer.exit_code == 0 and answer.stdout
    taken = run("quickstart", "--output", tmp_path / "runs" / "quickstart")
    assert taken.exit_code == 2 and "exists; name a directory that does not" in taken.stderr


def test_quickstart_without_the_training_package(run: Any, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be shown is said."""
    pytest.importorskip("astrai_infer", reason="astrai-infer is not installed")
    import importlib.util

    from astrai_cli.commands import quickstart

    find = importlib.util.find_spec
    monkeypatch.setattr(quickstart, "MODEL", str(model_dir))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "astrai_train" else find(name))
    done = run("quickstart")
    assert done.exit_code == 0
    assert "no model is trained here, which needs astrai-train: pip install 'astrai-cli[train]'" in done.stderr
    assert "astrai chat" in done.stdout
