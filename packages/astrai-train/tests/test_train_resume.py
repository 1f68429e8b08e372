"""Resuming: bit for bit after a stop, and whole after a kill at any moment (training rules 5 and 6)."""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from astrai_core import AutoModel
from astrai_core.errors import AstraiError
from astrai_train import TrainConfig
from astrai_train.callbacks.base import Callback
from astrai_train.checkpoint import CheckpointStore
from astrai_train.context import StepRecord, TrainContext
from astrai_train.run import build, train

Recipe = Callable[..., dict[str, Any]]
EXACT = ("step", "loss", "lr", "grad_norm", "grad_snr", "tokens")
"""Columns that do not depend on the clock."""


class StopAfter(Callback):
    """Sends this process a signal during a step, as a cluster or Ctrl-C would."""

    def __init__(self, step: int, number: int = signal.SIGTERM, times: int = 1) -> None:
        self.step, self.number, self.times = step, number, times

    def on_step_end(self, context: TrainContext, record: StepRecord) -> None:
        if record.step == self.step:
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)


def exact_metrics(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [{name: json.loads(line)[name] for name in EXACT} for line in lines]


def final_weights(recipe: dict[str, Any], step: int) -> dict[str, torch.Tensor]:
    model = AutoModel.from_pretrained(Path(recipe["output_dir"]) / "checkpoints" / f"step_{step}", device="cpu")
    return dict(model.named_parameters())


def texts_store(path: Path, tokenizer: Any, n_rows: int) -> str:
    """A store of `n_rows` texts, each shorter than a row."""
    import numpy as np

    from astrai_train.data.store import write_store

    rows = [{"input_ids": np.array(tokenizer.encode(f"text {n}: " + "ab" * (n % 9)))} for n in range(n_rows)]
    write_store(path, "text", rows, tokenizer)
    return str(path)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "written in the training thread": {"checkpoint.asynchronous": False},
    "dropout": {"model.architecture.attention_dropout": 0.2},
    "accumulation": {"batch_size": 6, "micro_batch_size": 2},
    "no accumulation": {"batch_size": 2, "micro_batch_size": 2},
    "workers": {"data.workers": 2},
    "bf16 compute": {"precision.dtype": "bf16_mixed"},
    "bf16 weights": {"precision.dtype": "bf16"},
    "average of the weights": {"ema_decay": 0.9},
    "average of bf16 weights": {"ema_decay": 0.9, "precision.dtype": "bf16"},
    "recomputation": {"precision.activation_checkpointing": "full", "model.architecture.attention_dropout": 0.2},
    "rotary pairs": {"model.architecture.rope_interleave": True},
    "muon": {"optimizer": {"name": "muon_adamw", "lr": 1e-2}},
    "mano": {"optimizer": {"name": "mano_adamw", "lr": 1e-2}},
    "nora": {"optimizer": {"name": "nora_nadamw", "lr": 1e-2}},
    "at the edge of an epoch": {"rows": 28, "data.packing": "none"},
    "before the edge of an epoch": {"rows": 31, "data.packing": "none"},
    "behind the edge of an epoch": {"rows": 27, "data.packing": "none", "model.architecture.attention_dropout": 0.2},
}


@pytest.mark.parametrize("case", CASES)
def test_twenty_steps_are_seven_and_thirteen(
    run_recipe: Recipe, byte_tokenizer: Any, tmp_path: Path, case: str
) -> None:
    """Training rule 5: losses, norms, gradient noise and weights are equal bit for bit. 7 is odd on purpose."""
    changes = {"max_steps": 20, "max_grad_norm": 0.5} | CASES[case]
    if rows := changes.pop("rows", None):
        changes["data.train"] = [{"path": texts_store(tmp_path / "texts", byte_tokenizer, rows)}]
    straight = run_recipe({**changes, "output_dir": str(tmp_path / "straight")})
    broken = run_recipe({**changes, "output_dir": str(tmp_path / "broken")})
    assert train(TrainConfig.from_dict(straight)).step == 20
    stopped = train(TrainConfig.from_dict(broken), callbacks=[StopAfter(7)])
    assert (stopped.step, stopped.stopped_by) == (7, "SIGTERM")
    torch.rand(3)  # the streams of this process must not matter
    random.random()
    assert train(TrainConfig.from_dict(broken), resume=True).step == 20
    assert exact_metrics(tmp_path / "broken") == exact_metrics(tmp_path / "straight")
    expected = final_weights(straight, 20)
    for name, value in final_weights(broken, 20).items():
        assert torch.equal(value, expected[name]), name
    assert (tmp_path / "straight" / "ema").exists() == ("ema_decay" in changes)
    for file in (tmp_path / "straight" / "ema").glob("*.safetensors"):
        assert (tmp_path / "broken" / "ema" / file.name).read_bytes() == file.read_bytes()


def test_dropout_drops(run_recipe: Recipe, tmp_path: Path) -> None:
    """Otherwise the cases above would show nothing about random streams."""
    train(TrainConfig.from_dict(run_recipe({"max_steps": 1})))
    dropout = {"max_steps": 1, "model.architecture.attention_dropout": 0.2, "output_dir": str(tmp_path / "other")}
    train(TrainConfig.from_dict(run_recipe(dropout)))
    assert exact_metrics(tmp_path / "run")[0]["loss"] != exact_metrics(tmp_path / "other")[0]["loss"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_and_saves(run_recipe: Recipe, number: signal.Signals) -> None:
    """Training rule 6; the handlers of before are back afterwards."""
    before = signal.getsignal(number)
    result = train(TrainConfig.from_dict(run_recipe()), callbacks=[StopAfter(2, number)])
    assert (result.step, result.stopped_by, result.checkpoint.name) == (2, number.name, "step_2")
    assert signal.getsignal(number) is before


class StopAll(StopAfter):
    """Signals the processes that prepare the data too, as a cluster and a terminal's Ctrl-C do."""

    def on_step_end(self, context: TrainContext, record: StepRecord) -> None:
        if record.step == self.step:
            workers = multiprocessing.active_children()
            assert len(workers) == 2
            subprocess.run(["kill", f"-{int(self.number)}", *(str(worker.pid) for worker in workers)], check=True)
            time.sleep(0.5)  # for the death of one to be told, if it dies
            assert all(worker.is_alive() for worker in workers)
        super().on_step_end(context, record)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_all_processes_finishes_the_step(run_recipe: Recipe, number: signal.Signals) -> None:
    """Training rule 6; and the workers end with the run."""
    result = train(TrainConfig.from_dict(run_recipe({"data.workers": 2})), callbacks=[StopAll(2, number)])
    assert (result.step, result.stopped_by, result.checkpoint.name) == (2, number.name, "step_2")
    gc.collect()
    assert multiprocessing.active_children() == []


def test_a_failure_leaves_no_worker(run_recipe: Recipe, tmp_path: Path) -> None:
    """A process that fails ends its workers and itself: they obey its signal, and no other's."""
    TrainConfig.from_dict(run_recipe({"data.workers": 2})).to_yaml(tmp_path / "recipe.yaml")
    code = (
        "import sys\n"
        "from astrai_train import Callback, TrainConfig\n"
        "from astrai_train.run import train\n"
        "class Fail(Callback):\n"
        "    def on_step_end(self, context, record):\n"
        "        raise ZeroDivisionError\n"
        "train(TrainConfig.from_yaml(sys.argv[1]), callbacks=[Fail()])"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "recipe.yaml")]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr


def test_a_signal_in_the_last_step_stops_nothing(run_recipe: Recipe) -> None:
    result = train(TrainConfig.from_dict(run_recipe({"max_steps": 2})), callbacks=[StopAfter(2)])
    assert (result.step, result.stopped_by) == (2, None)


def test_a_second_signal_aborts(run_recipe: Recipe, tmp_path: Path) -> None:
    """Training rule 6: what was saved before stays."""
    config = TrainConfig.from_dict(run_recipe({"checkpoint.interval": 1}))
    with pytest.raises(KeyboardInterrupt):
        train(config, callbacks=[StopAfter(2, signal.SIGINT, times=2)])
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_1"]


def test_a_finished_run_resumes_to_nothing(run_recipe: Recipe, tmp_path: Path) -> None:
    config = TrainConfig.from_dict(run_recipe({"max_steps": 2}))
    train(config)
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text()
    marker = tmp_path / "run" / "checkpoints" / "step_2" / "checkpoint.json"
    written = marker.stat().st_mtime_ns
    assert train(config, resume=True).step == 2
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == metrics
    assert marker.stat().st_mtime_ns == written, "nothing was saved again"


def test_without_a_checkpoint_a_run_starts_again(
    run_recipe: Recipe, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = TrainConfig.from_dict(run_recipe({"max_steps": 2}))
    build(config)
    with caplog.at_level(logging.WARNING):
        assert train(config, resume=True).step == 2
    assert "no whole checkpoint to resume from; training starts at step 1" in caplog.text
    assert [line["step"] for line in exact_metrics(tmp_path / "run")] == [1, 2]


def test_a_damaged_checkpoint_is_skipped(run_recipe: Recipe, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Training rule 6: the run goes on from the one before, replaces the damaged one, and ends as if nothing was."""
    recipe = run_recipe({"checkpoint.interval": 2})
    train(TrainConfig.from_dict(recipe))
    expected, metrics = final_weights(recipe, 6), exact_metrics(tmp_path / "run")
    weights = tmp_path / "run" / "checkpoints" / "step_6" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert train(TrainConfig.from_dict(recipe), resume=True).step == 6
    assert "step_6: skipped, the contents of model.safetensors have changed" in caplog.text
    assert all(torch.equal(value, expected[name]) for name, value in final_weights(recipe, 6).items())
    assert exact_metrics(tmp_path / "run") == metrics


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("data.shuffle_seed", 5, "the data's seed is 5"),
        ("data.seq_len", 16, "cannot resume"),
        ("optimizer.lr", 5e-3, "lr"),
        ("model.architecture", {"attention_dropout": 0.2}, "attention_dropout is 0.2, the checkpoint's 0.0; resume"),
    ],
)
def test_other_data_or_settings_are_refused(run_recipe: Recipe, field: str, value: Any, message: str) -> None:
    train(TrainConfig.from_dict(run_recipe({"max_steps": 1})))
    changed = run_recipe({"max_steps": 2})
    group, name = field.split(".")
    changed[group][name] = changed[group][name] | value if isinstance(value, dict) else value
    with pytest.raises(AstraiError, match=message):
        build(TrainConfig.from_dict(changed), resume=True)


@pytest.mark.slow
def test_kill_at_any_moment_loses_nothing(run_recipe: Recipe, tmp_path: Path) -> None:
    """Training rule 6: kill -9 in a loop of saves; every start finds a whole checkpoint, and the end is the same."""
    changes = {"max_steps": 60, "checkpoint.interval": 1, "batch_size": 2}
    straight = run_recipe({**changes, "output_dir": str(tmp_path / "straight")})
    train(TrainConfig.from_dict(straight))
    recipe = run_recipe({**changes, "output_dir": str(tmp_path / "killed")})
    TrainConfig.from_dict(recipe).to_yaml(tmp_path / "recipe.yaml")
    code = (
        "import sys\n"
        "from astrai_train import TrainConfig\n"
        "from astrai_train.run import train\n"
        "train(TrainConfig.from_yaml(sys.argv[1]), resume=True)"
    )
    checkpoints, draw, reached = tmp_path / "killed" / "checkpoints", random.Random(0), 0
    for _ in range(6):
        process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "recipe.yaml")], stderr=subprocess.PIPE)
        deadline = time.monotonic() + 120
        while process.poll() is None and newest(checkpoints) < min(reached + 4, 60) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.1))
        process.kill()
        process.communicate()
        found = CheckpointStore(checkpoints, keep=None, asynchronous=False).newest()
        assert found is not None and found[0] >= reached, "what was reached is still there, and whole"
        reached = found[0]
    assert reached >= 12, "the kills came between saves"
    assert train(TrainConfig.from_dict(recipe), resume=True).step == 60
    expected = final_weights(straight, 60)
    assert all(torch.equal(value, expected[name]) for name, value in final_weights(recipe, 60).items())
    assert exact_metrics(tmp_path / "killed") == exact_metrics(tmp_path / "straight")
    assert not list(checkpoints.glob(".*")), "nothing half-written is left behind"


def newest(checkpoints: Path) -> int:
    return max((int(path.name.removeprefix("step_")) for path in checkpoints.glob("step_*")), default=0)
