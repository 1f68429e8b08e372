"""Checkpoint directories: written whole or not at all, checked before use, and deleted with care (training rule 6)."""

from __future__ import annotations

import errno
import logging
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from astrai_core import AutoModel, ModelConfig
from astrai_core.errors import CheckpointError
from astrai_train import checkpoint as checkpoint_module
from astrai_train.checkpoint import MARKER, STATE, TENSORS, CheckpointStore, TrainingState, load_training_state
from astrai_train.parallel.shards import read_tensors
from astrai_train.rng import rng_state, set_rng_state

CPU = torch.device("cpu")
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
}


@pytest.fixture
def model() -> Any:
    return AutoModel.from_config(ModelConfig.from_dict(CONFIG), device="cpu", generator=torch.manual_seed(0))


def store(root: Path, keep: int | None = None, asynchronous: bool = False) -> CheckpointStore:
    return CheckpointStore(root, keep=keep, asynchronous=asynchronous)


def state_of(model: Any, step: int) -> TrainingState:
    """A state with a tensor for each weight, as optimizers have it."""
    return TrainingState({"step": step}, {f"m/{n}": torch.full_like(p, step) for n, p in model.named_parameters()})


def steps(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in root.glob("step_*"))


def break_marker(path: Path) -> None:
    (path / MARKER).unlink()


def cut_state(path: Path) -> None:
    (path / STATE).write_bytes((path / STATE).read_bytes()[:-10])


def flip_bit(path: Path) -> None:
    data = bytearray((path / STATE).read_bytes())
    data[len(data) // 2] ^= 8
    (path / STATE).write_bytes(data)


def cut_tensors(path: Path) -> None:
    file = path / TENSORS / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-10])


def lose_index(path: Path) -> None:
    (path / TENSORS / ".metadata").unlink()


def lose_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()


def garble_marker(path: Path) -> None:
    (path / MARKER).write_text("[1, 2]")


@pytest.mark.parametrize(
    "damage", [break_marker, cut_state, flip_bit, cut_tensors, lose_index, lose_weights, garble_marker]
)
def test_damage_is_seen_and_skipped(model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Any) -> None:
    saved = store(tmp_path)
    for step in (2, 10):
        saved.save(step, model, state_of(model, step))
    assert saved.newest() == (10, tmp_path / "step_10"), "by number, not by name"
    damage(tmp_path / "step_10")
    with caplog.at_level(logging.WARNING):
        assert saved.newest() == (2, tmp_path / "step_2")
    assert f"{tmp_path / 'step_10'}: skipped" in caplog.text
    damage(tmp_path / "step_2")
    assert saved.newest() is None


def test_retention_keeps_the_newest(model: Any, tmp_path: Path) -> None:
    saved = store(tmp_path, keep=2)
    for step in range(1, 6):
        saved.save(step, model, state_of(model, step))
    assert steps(tmp_path) == [4, 5]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_retention_never_deletes_the_last_good_one(model: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Damaged ones do not count as kept, and a save that fails deletes nothing."""
    saved = store(tmp_path, keep=1)
    saved.save(1, model, state_of(model, 1))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full_disk)
        with pytest.raises(CheckpointError, match="step_2: cannot write: No space left on device; free some space"):
            saved.save(2, model, state_of(model, 2))
    assert steps(tmp_path) == [1]
    assert saved.newest() == (1, tmp_path / "step_1")
    damaged = tmp_path / "step_9"
    shutil.copytree(tmp_path / "step_1", damaged)
    break_marker(damaged)
    saved.save(3, model, state_of(model, 3))
    assert steps(tmp_path) == [3, 9]
    assert saved.newest() == (3, tmp_path / "step_3")


def test_retention_does_not_count_what_was_skipped(model: Any, tmp_path: Path) -> None:
    """A run goes on from before a checkpoint whose contents changed: that one has its size, and is not the newest."""
    saved = store(tmp_path, keep=1)
    saved.save(10, model, state_of(model, 10))
    shutil.copytree(tmp_path / "step_10", tmp_path / "step_30")
    flip_bit(tmp_path / "step_30")
    saved.save(20, model, state_of(model, 20))
    assert steps(tmp_path) == [20, 30]
    assert saved.newest() == (20, tmp_path / "step_20")


@pytest.mark.parametrize("part", ["weights", "plain", "tensors"])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_disk_that_is_full_is_told(
    model: Any, tmp_path: Path, small_disk: None, part: str, asynchronous: bool
) -> None:
    """Training rule 6: safetensors, torch.save and torch's sharded files each hide the system's error; nothing is left."""
    plain = {"text": "x" * (16 << 10)} if part == "plain" else {}
    tensors = {"m/a": torch.zeros(16 << 10)} if part == "tensors" else {}
    small = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "head_dim": 4}
    if part != "weights":
        model = AutoModel.from_config(ModelConfig.from_dict(CONFIG | small), device="cpu")
    saved = store(tmp_path, asynchronous=asynchronous)
    with pytest.raises(CheckpointError, match="step_1: cannot write: File too large; "):
        saved.save(1, model, TrainingState(plain, tensors))
        saved.wait()
    saved.close()
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_fails_unforeseen_is_told_by_one_error(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every rank: those that wait hear of it."""

    def fail(*args: Any, **options: Any) -> None:
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr(checkpoint_module, "write_pretrained", fail)
    with pytest.raises(CheckpointError, match=r"a save failed \(ZeroDivisionError: by nothing\); resume") as caught:
        store(tmp_path).save(1, model, state_of(model, 1))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert list(tmp_path.iterdir()) == []


def full_disk(*args: Any, **options: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_failed_write_in_the_background_is_told(model: Any, tmp_path: Path, monkeypatch: Any) -> None:
    saved = store(tmp_path, asynchronous=True)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full_disk)
        saved.save(1, model, state_of(model, 1))
        with pytest.raises(CheckpointError, match="No space left"):
            saved.wait()
    saved.save(2, model, state_of(model, 2))
    saved.wait()
    saved.close()
    assert steps(tmp_path) == [2]


def test_what_is_written_in_the_background_is_the_state_of_the_save(
    model: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """Training goes on in place while the writer still waits."""
    import threading

    gate, write = threading.Event(), checkpoint_module.write_pretrained

    def late(*args: Any, **options: Any) -> None:
        assert gate.wait(60)
        write(*args, **options)

    monkeypatch.setattr(checkpoint_module, "write_pretrained", late)
    saved = store(tmp_path, asynchronous=True)
    moments = {f"m/{name}": torch.ones_like(value) for name, value in model.named_parameters()}
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    saved.save(1, model, TrainingState({}, moments))
    with torch.no_grad():
        for value in [*model.parameters(), *moments.values()]:
            value.add_(1)
    gate.set()
    saved.wait()
    saved.close()
    loaded = AutoModel.from_pretrained(tmp_path / "step_1", device="cpu")
    assert all(torch.equal(value, before[name]) for name, value in loaded.named_parameters())
    found = read_tensors(tmp_path / "step_1" / TENSORS, dict(model.named_parameters()))
    assert found.keys() == moments.keys()
    assert all(bool((value == 1).all()) for value in found.values())


def test_what_a_kill_left_behind_is_removed(model: Any, tmp_path: Path) -> None:
    saved = store(tmp_path)
    saved.save(1, model, state_of(model, 1))
    for name in (".step_2.0123abcd.tmp", ".step_1.89ab0123.old", ".step_0.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    (tmp_path / "notes").mkdir()
    saved.clean()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step_1"]
    for name in (".ema.0123abcd.tmp", ".ema.89ab0123.old", ".emails.tmp"):
        (tmp_path / name).mkdir()
    saved.export(model, tmp_path / "ema")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".emails.tmp", "ema", "notes", "step_1"]


def test_another_format_is_refused(model: Any, tmp_path: Path) -> None:
    store(tmp_path).save(1, model, state_of(model, 1))
    torch.save({"format": 99}, tmp_path / "step_1" / STATE)
    with pytest.raises(CheckpointError, match="has format 99"):
        load_training_state(tmp_path / "step_1")


def test_code_in_a_checkpoint_does_not_run(model: Any, tmp_path: Path) -> None:
    """Training rule 6: weights_only=True."""
    store(tmp_path).save(1, model, state_of(model, 1))
    torch.save({"format": 1, "evil": Path("x")}, tmp_path / "step_1" / STATE)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_training_state(tmp_path / "step_1")


def test_every_random_stream_continues(tmp_path: Path) -> None:
    """Training rule 5: Python's, NumPy's (with the normal it holds back) and torch's, through a file."""
    draw = lambda: (random.random(), random.gauss(0, 1), np.random.standard_normal(), float(torch.rand(())))
    draw()
    torch.save(rng_state(CPU), tmp_path / "rng.pt")
    expected = [draw() for _ in range(3)]
    set_rng_state(torch.load(tmp_path / "rng.pt", weights_only=True), CPU)
    assert [draw() for _ in range(3)] == expected
