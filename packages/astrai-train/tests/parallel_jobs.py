"""What the ranks of test_train_parallel.py do, each in a process of its own."""

from __future__ import annotations

import errno
import os
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch
from torch import distributed
from torch.distributed.tensor import DTensor

from astrai_core import AutoModel, AutoTokenizer, ModelConfig, save_pretrained
from astrai_core.errors import AstraiError
from astrai_train import TrainConfig, checkpoint
from astrai_train.data.store import write_store
from astrai_train.run import build
from astrai_train.trainer import Trainer

Job = dict[str, Any]
"""``recipe``; ``resume``; ``stop`` = (rank, step) that gets SIGTERM; ``gradient`` = file for the first step's gradient
instead of training; ``full`` = rank whose disk is full."""


def write_stores(root: Path, tokenizer: Any) -> None:
    """Write the data of all jobs: rows of a few words, of each kind."""
    draw, words = random.Random(0), ["the", "cat", "sat", "on", "a", "mat", "and", "ran"]

    def ids() -> Any:
        text = " ".join(draw.choices(words, k=draw.randint(1, 8)))
        return np.array([*tokenizer.encode(text), tokenizer.eos_token_id])

    def chat() -> dict[str, Any]:
        row = ids()
        return {"input_ids": row, "mask": (np.arange(len(row)) > len(row) // 2).astype(np.uint8)}

    # Rows 0 and 1 are the first rank's part of the first micro-batch: they supervise nothing.
    one_token = [{"input_ids": ids()[:1]} for _ in range(2)]
    stores: dict[str, tuple[Any, list[dict[str, Any]]]] = {
        "text": ("text", [{"input_ids": ids()} for _ in range(50)]),
        "held_out": ("text", [{"input_ids": ids()} for _ in range(7)]),
        "sparse": ("text", [*one_token, *({"input_ids": ids()} for _ in range(10))]),
        "chat": ("chat", [chat() for _ in range(50)]),
        "pairs": ("pairs", [{name: ids() for name in ("prompt", "chosen", "rejected")} for _ in range(50)]),
    }
    for name, (kind, rows) in stores.items():
        write_store(root / name, kind, rows, tokenizer)


def write_start(root: Path, model: Any) -> None:
    """Write the pretrained model of some jobs, of the architecture that the others draw."""
    config, generator = ModelConfig.from_dict(dict(model.architecture)), torch.Generator().manual_seed(5)
    start = AutoModel.from_config(config, device="cpu", generator=generator)
    save_pretrained(start, root / "start", tokenizer=AutoTokenizer.from_pretrained(model.tokenizer))


def run_jobs(jobs: dict[str, Job], device: str) -> dict[str, Any]:
    """Do all jobs within one process group; return by name where each stopped, or its error."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # torch looks once, at a process's first product
    distributed.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    found = {name: run_or_tell(job, device) for name, job in jobs.items()}
    distributed.destroy_process_group()
    return found


def run_or_tell(job: Job, device: str) -> Any:
    """Do a job; what fails in torch, on every rank alike, is told, so that the jobs after it are done."""
    try:
        return run_job(job, device)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"


def run_job(job: Job, device: str) -> Any:
    try:
        trainer = build(TrainConfig.from_dict(job["recipe"]), resume=job.get("resume", False), device=device)
    except AstraiError as error:
        return f"{type(error).__name__}: {error}"
    if "gradient" in job:
        gradient = gradient_of(trainer)
        if distributed.get_rank() == 0:
            torch.save({name: value.cpu() for name, value in gradient.items()}, job["gradient"])
        return None
    if "stop" in job:
        rank, step = job["stop"]
        if distributed.get_rank() == rank:
            signal_in_step(trainer, step)
    if "full" in job and job["full"] == distributed.get_rank():
        with patch.object(torch, "save", full_disk):
            return outcome_of(trainer)
    return outcome_of(trainer)


def outcome_of(trainer: Trainer) -> Any:
    try:
        result = trainer.train()
    except AstraiError as error:
        return f"{type(error).__name__}: {error}"
    return result.step, result.stopped_by


def full_disk(value: Any, target: Any, **options: Any) -> None:
    """``torch.save``, which also carries tensors between ranks: only what goes into a checkpoint fails."""
    if threading.current_thread() is not threading.main_thread():
        raise OSError(errno.ENOSPC, "No space left on device")
    save(value, target, **options)


save = torch.save


def die_in_a_save(recipe: dict[str, Any], rank: int, save: int, device: str) -> None:
    """Train; one rank is killed in the middle of a save (counted from 1), when its own part is written."""
    trainer = build(TrainConfig.from_dict(recipe), device=device)
    write, saves = checkpoint.write_tensors, []

    def write_and_die(*args: Any) -> None:
        saves.append(args)
        if len(saves) == save and distributed.get_rank() == rank:
            write_part(args[0])
            os.kill(os.getpid(), signal.SIGKILL)
        write(*args)

    with patch.object(checkpoint, "write_tensors", write_and_die):
        trainer.train()


Moment = Literal["forward", "update"]
"""Of a step: before any gradient is exchanged, or where the others' hosts wait for their GPUs."""


def die_in_a_step(recipe: dict[str, Any], rank: int, step: int, moment: Moment, device: str) -> None:
    """Train; one rank is killed in the middle of a step, counted from 1."""
    trainer = build(TrainConfig.from_dict(recipe), device=device)
    owner, name = {"forward": (trainer.context.parallel, "loss"), "update": (trainer, "_update")}[moment]
    inner = getattr(owner, name)

    def die(*given: Any, **named: Any) -> Any:
        if trainer.context.counters.step + 1 == step and distributed.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(*given, **named)

    with patch.object(owner, name, die):
        trainer.train()


def write_part(directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "__1_0.distcp").write_bytes(b"half")


def signal_in_step(trainer: Trainer, step: int) -> None:
    """Send this process SIGTERM in the middle of a step."""
    inner = trainer._step

    def wrapped(batches: Any) -> Any:
        if trainer.context.counters.step + 1 == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return inner(batches)

    trainer._step = wrapped  # type: ignore[method-assign]


def gradient_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Do one step that changes no weight; return the whole gradient that the optimizer was given, by name."""
    found: dict[str, torch.Tensor] = {}

    def look() -> None:
        for name, parameter in trainer.context.model.named_parameters():
            grad = parameter.grad
            found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()

    trainer.context.optimizer.step = look
    trainer._step(iter(trainer.context.source))
    trainer.context.checkpoints.close()
    return found


if __name__ == "__main__":  # as torchrun starts it: RECIPE.yaml DEVICE
    die_in_a_step(TrainConfig.from_yaml(sys.argv[1]).to_dict(), 1, 3, "update", sys.argv[2])
