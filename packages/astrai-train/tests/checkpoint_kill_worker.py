"""Saves a small state in a loop and is killed, over and over: the process tree of test_train_checkpoint_kill.py.

One process imports torch once; each of its children goes on from the newest whole checkpoint and saves until SIGKILL
meets it. What a child wrote is checked after each kill. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import time
from pathlib import Path

import torch

from astrai_core import AutoModel, ModelConfig
from astrai_core.model.transformer import CausalLM
from astrai_train.checkpoint import CheckpointStore, TrainingState, load_training_state

CONFIG = {
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
}


def fill(model: CausalLM, step: int) -> None:
    """Give every weight a value that only this step has."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)


def check(path: Path, step: int) -> None:
    """Weights and state are those of the step that the directory names."""
    state = load_training_state(path)
    assert state["counters"] == {"step": step}, (path, state)
    loaded = AutoModel.from_pretrained(path, "float32", "cpu")
    assert all(bool((parameter == step).all()) for parameter in loaded.parameters()), path


def save_for_ever(root: Path, model: CausalLM, asynchronous: bool, told: int) -> None:
    """Go on from the newest whole checkpoint; each finished save is told as a line."""
    store = CheckpointStore(root, keep=2, asynchronous=asynchronous)
    store.clean()
    found = store.newest()
    step = 0 if found is None else found[0]
    if found is not None:
        check(found[1], step)
    while True:
        step += 1
        fill(model, step)
        store.save(step, model, TrainingState({"counters": {"step": step}}, {"m/a": torch.full((8,), float(step))}))
        store.wait()
        os.write(told, f"{step}\n".encode())


def kill_one(root: Path, model: CausalLM, asynchronous: bool, draw: random.Random) -> int:
    """Let a child save at least once, kill it a random moment later; return the last step that it told."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            save_for_ever(root, model, asynchronous, writer)
        finally:
            os._exit(1)  # an error of the child: its parent sees that no kill ended it
    os.close(writer)
    heard = select.select([reader], [], [], 60)[0]
    time.sleep(draw.uniform(0, 0.1))
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    lines = b""
    while chunk := os.read(reader, 1 << 16):
        lines += chunk
    os.close(reader)
    assert heard and os.WIFSIGNALED(status), "the child failed by itself"
    return int(lines.decode().split("\n")[-2])


def main(root: Path, n_kills: int) -> None:
    torch.set_num_threads(1)
    model = AutoModel.from_config(ModelConfig.from_dict(CONFIG), "float32", "cpu", torch.manual_seed(0))
    draw, reached, torn = random.Random(0), 0, 0
    store = CheckpointStore(root, keep=None, asynchronous=False)
    for kill in range(n_kills):
        told = kill_one(root, model, kill % 2 == 0, draw)
        found = store.newest()
        assert found is not None and found[0] >= told > reached, (kill, found, told, reached)
        check(found[1], found[0])
        reached = told
        torn += bool(list(root.glob(".step_*")))
    sys.stdout.write(json.dumps({"kills": n_kills, "reached": reached, "torn": torn}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
