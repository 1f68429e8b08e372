"""``astrai train``: every field of a recipe is a flag, a run ends with its checkpoint, and failures are one line."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import socket
import subprocess
import sys
import time
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("astrai_train")

from astrai_train import TrainConfig

ARCHITECTURE = {
    "model_type": "llama",
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture
def recipe(model_dir: Path, tmp_path: Path) -> Path:
    """A small run on a text of its own."""
    import numpy as np

    from astrai_core import AutoTokenizer
    from astrai_train.data.store import write_store

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    rows = [{"input_ids": np.array(tokenizer.encode(f"line {n} of the text"))} for n in range(40)]
    write_store(tmp_path / "store", "text", rows, tokenizer)
    data = {
        "model": {"architecture": ARCHITECTURE, "tokenizer": str(model_dir)},
        "data": {"train": [{"path": str(tmp_path / "store")}], "seq_len": 32, "packing": "bfd", "workers": 0},
        "strategy": {"name": "seq"},
        "optimizer": {"name": "adamw", "lr": 0.01},
        "output_dir": str(tmp_path / "run"),
        "batch_size": 2,
        "max_steps": 3,
        "log": {"interval": 1},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def fields_of(kind: Any, prefix: str = "") -> Iterator[str]:
    """Dotted names of a configuration class, by its annotations rather than by its schema."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        inner = [item for item in _classes(hints[field.name]) if item.__name__ != "DataSource"]
        if inner:
            for item in inner:
                yield from fields_of(item, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}"


def _classes(annotation: Any) -> list[Any]:
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return [annotation]
    return [found for part in typing.get_args(annotation) for found in _classes(part)]


def test_every_field_is_a_flag_in_one_of_ten_groups(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row CL1."""
    monkeypatch.setenv("COLUMNS", "100")
    shown = run("train", "--help").stdout
    flags = {found.replace("-", "_") for found in re.findall(r"^│ --([a-z][\w.-]*)[ ,]", shown, re.MULTILINE)}
    fields = set(fields_of(TrainConfig))
    assert len(fields) > 80
    assert fields - flags == set()
    assert flags - fields == {"resume", "device", "nprocs"} | {"debug", "help"} & flags
    panels = re.findall(r"╭─ (.*?) ─", shown)
    assert len(panels) == len(set(panels)) >= 11
    assert panels[:3] == ["Run", "Batch and gradient", "Evaluation"]


def test_a_run_from_start_to_end(run: Any, recipe: Path, tmp_path: Path) -> None:
    done = run("train", recipe, "--device", "cpu")
    assert done.exit_code == 0, done.stderr
    assert done.stdout == f"{tmp_path}/run/checkpoints/step_3: 3 of 3 steps\n"
    assert f"{tmp_path}/store: documents 40, rows " in done.stderr
    assert "memory: about " in done.stderr, "before the model is loaded"
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    again = run("train", recipe)
    assert again.exit_code == 1
    assert "holds a run already; resume it (--resume)" in again.stderr
    resumed = run("train", recipe, "--resume", "--max-steps", 5)
    assert resumed.exit_code == 0, resumed.stderr
    assert "after step 3" in resumed.stdout and "step_5: 5 of 5 steps" in resumed.stdout


def test_flags_take_the_place_of_fields(run: Any, recipe: Path, tmp_path: Path) -> None:
    """Numbers, truth values, lists, null, sources and groups that the file does not have."""
    other = tmp_path / "elsewhere"
    flags = {
        "--output-dir": other,
        "--max-steps": 1,
        "--optimizer.lr": "2e-3",
        "--optimizer.betas": "0.8,0.9",
        "--max-grad-norm": "null",
        "--checkpoint.asynchronous": "false",
        "--lr-schedule.name": "wsd",
        "--lr-schedule.decay": "1",
        "--metrics": "loss,lr",
        "--data.train": f"{{path: {tmp_path / 'store'}, weight: 2}}",
    }
    done = run("train", recipe, *(part for pair in flags.items() for part in pair))
    assert done.exit_code == 0, done.stderr
    config = TrainConfig.from_yaml(other / "recipe.yaml")
    assert (config.optimizer.lr, config.optimizer.betas, config.max_grad_norm) == (2e-3, (0.8, 0.9), None)
    assert (config.checkpoint.asynchronous, config.lr_schedule.name, config.lr_schedule.decay) == (False, "wsd", 1)
    assert config.log.metrics == ("loss", "lr") and config.log.interval == 1
    assert [(source.path, source.weight) for source in config.data.train] == [(str(tmp_path / "store"), 2.0)]


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--optimizer.lr", "-1"], 2, "field 'optimizer.lr': input should be greater than 0 (got -1)"),
        (["--optimizer.muon-momentum", "0.9"], 2, "unknown field 'optimizer.muon_momentum'"),
        (["--data.train", "{path: [}"], 2, "--data.train: '{path: [}' is not valid YAML"),
        (["--lora.rank", "4"], 1, "field 'lora': an adapter needs weights to adapt"),
        (["--data.train", "nowhere"], 1, "nowhere"),
        (["--optimiser.lr", "1"], 2, "no such option"),
        (["--nprocs", "2"], 2, "--nprocs: 2 ranks need --parallel.mode ddp or fsdp, it is none"),
        (["--nprocs", "0"], 2, "--nprocs"),
    ],
)
def test_a_mistake_is_one_line(run: Any, recipe: Path, flags: list[str], code: int, message: str) -> None:
    failed = run("train", recipe, *flags)
    assert failed.exit_code == code
    assert message in failed.stderr
    assert failed.stderr.count("\n") == 1


def test_a_mistake_in_the_file_names_its_line(run: Any, recipe: Path) -> None:
    recipe.write_text(recipe.read_text() + "batchsize: 3\n")
    failed = run("train", recipe, "--max-steps", 2)
    assert failed.exit_code == 1
    assert re.match(rf"error: {recipe}:\d+: unknown field 'batchsize'", failed.stderr)


def test_a_signal_ends_the_command_well(recipe: Path, tmp_path: Path) -> None:
    """Training rule 6: finish the step, save, exit 0."""
    command = [sys.executable, "-m", "astrai_cli", "train", str(recipe), "--max-steps", "100000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not metrics.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    shown, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert re.search(r"SIGTERM: stopped after step \d+; go on with --resume", shown)
    last = json.loads(metrics.read_text().splitlines()[-1])["step"]
    assert (tmp_path / "run" / "checkpoints" / f"step_{last}" / "checkpoint.json").is_file()


@pytest.mark.slow
def test_ranks_are_started_and_stopped_together(recipe: Path, tmp_path: Path) -> None:
    """Issue 6: --nprocs; a signal to the command is one for all ranks, which agree on the step; torchrun goes on."""
    command = [sys.executable, "-m", "astrai_cli", "train", str(recipe), "--parallel.mode", "fsdp", "--device", "cpu"]
    ranks = ["--nprocs", "2", "--max-steps", "100000"]
    process = subprocess.Popen([*command, *ranks], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 240
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not metrics.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    shown, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    stopped = re.search(r"^SIGINT: stopped after step (\d+); go on with --resume$", shown, re.MULTILINE)
    assert stopped and shown.count("step_") == 1, "one rank speaks"
    more = str(int(stopped[1]) + 2)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *command[1:]]
    done = subprocess.run(
        [*torchrun, "--resume", "--max-steps", more], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"Resuming {tmp_path}/run after step {stopped[1]}",
        f"{tmp_path}/run/checkpoints/step_{more}: {more} of {more} steps",
    ]


@pytest.mark.slow
def test_two_machines_meet(recipe: Path, tmp_path: Path) -> None:
    """Issue 6: two groups of ranks find each other by torchrun's rendezvous, on one machine here."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    rendezvous = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "run1"]
    train = ["-m", "astrai_cli", "train", str(recipe), "--parallel.mode", "fsdp", "--device", "cpu"]
    command = [sys.executable, "-m", "torch.distributed.run", *rendezvous, "--rdzv-endpoint", f"127.0.0.1:{port}"]
    machines = [
        subprocess.Popen([*command, *train], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        told = [machine.communicate(timeout=240) for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
    assert [machine.returncode for machine in machines] == [0, 0], "\n".join(errors for _, errors in told)
    assert "".join(shown for shown, _ in told) == f"{tmp_path}/run/checkpoints/step_3: 3 of 3 steps\n"
    shards = (tmp_path / "run" / "checkpoints" / "step_3" / "training_state").glob("*.distcp")
    assert sorted(path.name for path in shards) == ["__0_0.distcp", "__1_0.distcp"]
