"""A small model of one's own, from nothing: what ``astrai quickstart`` trains on the novel that comes with it."""

from __future__ import annotations

import gzip
import importlib.resources
import math
import shutil
import statistics
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from astrai_cli.loading import busy
from astrai_cli.output import human_count

if TYPE_CHECKING:
    from astrai_core import Tokenizer
    from astrai_train import Callback, TrainConfig

VOCABULARY, SEQ_LEN, BATCH = 1024, 128, 16
HELD_OUT = 0.04
"""Share of the novel, its end, that the model is only tested on."""
MAX_EPOCHS = 12
"""Passes over the novel that a fast machine stops at: more of them teach it by heart."""
MIN_STEPS, CALIBRATION_STEPS, N_LINES, BAR = 12, 5, 12, 36
OVERHEAD = 1.1
"""Time of the run over that of its steps: the tests between them."""

ARCHITECTURE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class FirstModel:
    """What the training left."""

    run_dir: Path
    checkpoint: Path
    finished: bool
    """False if a signal ended it early."""


def novel() -> str:
    """Return the text of the novel in this wheel."""
    packed = importlib.resources.files("astrai_cli").joinpath("novel", "emma.txt.gz").read_bytes()
    return gzip.decompress(packed).decode("ascii")


def free_folder(wanted: Path) -> Path:
    """Return `wanted`, or the first of ``wanted-2``, ``wanted-3``, ... that does not exist."""
    names = (wanted if n == 1 else wanted.with_name(f"{wanted.name}-{n}") for n in count(1))
    return next(path for path in names if not path.exists())


def train_first_model(folder: Path, seconds: float, device: str | None) -> FirstModel:
    """Train on the novel for about `seconds`, and print how the loss falls.

    Parameters
    ----------
    folder
        Gets text, tokenizer, tokens and the run; must not exist.
    seconds
        Of the training itself; at least `MIN_STEPS` steps are done.
    device
        By default CUDA if there is any.
    """
    with busy("Reading the novel"):
        from astrai_train.data.tokenizer_training import bytes_per_token, train_tokenizer
        from astrai_train.run import train

    text = novel()
    end = text.rindex("\n\n", 0, int(len(text) * (1 - HELD_OUT)))
    (folder / "text").mkdir(parents=True)
    (folder / "text" / "train.txt").write_text(text[:end], encoding="utf-8")
    (folder / "text" / "held-out.txt").write_text(text[end:], encoding="utf-8")
    click.echo(f"The novel has {len(text):,} characters; the last {HELD_OUT:.0%} are kept back for tests.")

    start = time.perf_counter()
    with busy("Learning a vocabulary"):
        files = [str(folder / "text" / "train.txt")]
        tokenizer = train_tokenizer(files, VOCABULARY)
        tokenizer.save_pretrained(folder / "tokenizer")
        density = bytes_per_token(tokenizer, files)
    click.echo(
        f"Its vocabulary of {VOCABULARY:,} was learned in {time.perf_counter() - start:.1f} s; "
        f"a token is {density:.1f} characters."
    )
    with busy("Turning the novel into tokens"):
        n_tokens = _write_tokens(folder, tokenizer)
    with busy("Measuring this machine"):
        step_seconds = _step_seconds(_recipe(folder, folder / "measuring", CALIBRATION_STEPS, device), device)
        shutil.rmtree(folder / "measuring")
    most = max(MIN_STEPS, MAX_EPOCHS * n_tokens // (BATCH * SEQ_LEN))
    steps = min(most, max(MIN_STEPS, round(seconds / step_seconds / OVERHEAD)))
    config = _recipe(folder, folder, steps, device)
    click.echo(f"{steps} steps of {BATCH * SEQ_LEN:,} tokens, about {steps * step_seconds * OVERHEAD:.0f} s:\n")
    result = train(config, device=device, callbacks=[_loss_lines(density)])
    return FirstModel(folder, result.checkpoint, result.stopped_by is None)


def _write_tokens(folder: Path, tokenizer: Tokenizer) -> int:
    """Write both parts of the novel as stores; return the tokens of the first."""
    from astrai_train.data.preprocess.config import PreprocessConfig
    from astrai_train.data.preprocess.run import preprocess

    names = ("train", "held-out")
    config = PreprocessConfig.from_dict(
        {
            "inputs": [{"paths": [str(folder / "text" / f"{name}.txt")], "domain": name} for name in names],
            "tokenizer": str(folder / "tokenizer"),
            "format": "text",
            "workers": 0,
        }
    )
    return preprocess(config, folder / "data", tokenizer)["train"].tokens


def _recipe(folder: Path, run_dir: Path, steps: int, device: str | None) -> TrainConfig:
    from astrai_core.auto import resolve_device
    from astrai_train import TrainConfig

    on_cpu = resolve_device(device).type == "cpu"
    return TrainConfig.from_dict(
        {
            "model": {"architecture": ARCHITECTURE, "tokenizer": str(folder / "tokenizer")},
            "data": {
                "train": [{"path": str(folder / "data" / "train")}],
                "valid": [{"path": str(folder / "data" / "held-out")}],
                "seq_len": SEQ_LEN,
                "packing": "simple",
                "workers": 0,
            },
            "strategy": {"name": "seq"},
            "optimizer": {"name": "adamw", "lr": 3e-3},
            "lr_schedule": {"name": "cosine", "warmup": 0.05},
            "precision": {"dtype": "fp32" if on_cpu else "bf16_mixed"},
            "output_dir": str(run_dir),
            "batch_size": BATCH,
            "micro_batch_size": BATCH,
            "max_steps": steps,
            "eval_interval": math.ceil(steps / N_LINES),
            "log": {"interval": max(1, steps // 100), "progress": False},
        }
    )


def _step_seconds(config: TrainConfig, device: str | None) -> float:
    """Do a few steps; return what one takes, the first ones left out."""
    from astrai_train import Callback, StepRecord
    from astrai_train.run import train

    taken: list[float] = []

    class Watch(Callback):
        def on_step_end(self, context: Any, record: StepRecord) -> None:
            taken.append(record.seconds)

    result = train(config, device=device, callbacks=[Watch()])
    if result.stopped_by is not None:
        raise KeyboardInterrupt
    return statistics.mean(taken[2:])


def _loss_lines(bytes_per_token: float) -> Callback:
    """Return a callback that prints a line with a bar at every evaluation."""
    from astrai_train import Callback, StepRecord

    class LossLines(Callback):
        first: float
        last: float

        def on_train_begin(self, context: Any) -> None:
            n_parameters = sum(parameter.numel() for parameter in context.model.parameters())
            click.echo(f"  {human_count(n_parameters)} parameters, random at first")
            click.secho(f"  {'step':>6}  {'loss':>6}  {'seconds':>7}", dim=True)
            self._start = time.perf_counter()

        def on_step_end(self, context: Any, record: StepRecord) -> None:
            if record.step == 1 and record.loss is not None:
                self.first = record.loss
                self._line(1, record.loss)

        def on_evaluate(self, context: Any, found: Any) -> None:
            self.last = found.loss
            self._line(found.step, found.loss)

        def on_train_end(self, context: Any, result: Any) -> None:
            if result.stopped_by is not None:
                return
            bits = self.last / math.log(2) / bytes_per_token
            click.echo(
                f"\nOn pages that it never saw, the loss of a token is {self.last:.2f} ({bits:.2f} bits a character); "
                f"before the training it was {self.first:.2f}."
            )

        def _line(self, step: int, loss: float) -> None:
            bar = "█" * round(BAR * loss / self.first)
            click.echo(f"  {step:>6}  {loss:6.3f}  {time.perf_counter() - self._start:7.0f}  {bar}")

    return LossLines()
