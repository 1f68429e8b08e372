"""metrics.jsonl: one line of figures every few steps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from astrai_train.callbacks.base import Callback
from astrai_train.metrics.memory import peak_memory_bytes
from astrai_train.metrics.mfu import peak_flops

if TYPE_CHECKING:
    from astrai_train.context import Evaluation, StepRecord, TrainContext

FILE = "metrics.jsonl"


class MetricsFile(Callback):
    """Writes the columns that ``log.metrics`` names, every ``log.interval`` steps and at the last one.

    ``loss``, ``lr`` and ``grad_norm`` are those of the line's step, ``tokens`` counts from the start of the run;
    ``tokens_per_s`` and ``mfu`` are over the steps since the line before; ``memory`` is the peak in bytes. What does
    not exist (the MFU of a CPU, the loss of a skipped step) is null.
    """

    def __init__(self) -> None:
        self._tokens = 0
        self._flops = self._seconds = 0.0

    def on_train_begin(self, context: TrainContext) -> None:
        """Drop lines of steps that a resumed run does again."""
        self._peak = peak_flops(context.device)
        keep_lines(context.run_dir / FILE, context.counters.step)

    def on_step_end(self, context: TrainContext, record: StepRecord) -> None:
        """Add up, and write a line when one is due."""
        self._tokens += record.n_tokens
        self._flops += record.flops
        self._seconds += record.seconds
        if record.step % context.config.log.interval and record.step != context.total_steps:
            return
        write_line(context.run_dir / FILE, {"step": record.step, **self._columns(context, record), **record.metrics})
        self._tokens = 0
        self._flops = self._seconds = 0.0

    def on_evaluate(self, context: TrainContext, found: Evaluation) -> None:
        """Write a line of its own: ``valid_loss``, and ``valid_losses`` by path."""
        line = {"step": found.step, "valid_loss": found.loss, "valid_losses": dict(found.losses)}
        write_line(context.run_dir / FILE, line)

    def _columns(self, context: TrainContext, record: StepRecord) -> dict[str, Any]:
        wanted = context.config.log.metrics
        columns = {
            "loss": record.loss,
            "lr": record.lr,
            "grad_norm": record.grad_norm,
            "grad_snr": context.grad_snr.ratio() if context.grad_snr is not None else None,
            "tokens": context.counters.tokens,
            "tokens_per_s": self._tokens / self._seconds,
            "mfu": None if self._peak is None else self._flops / self._seconds / self._peak,
            "memory": peak_memory_bytes(context.device),
        }
        return {name: value for name, value in columns.items() if name in wanted}


def write_line(path: Path, line: Mapping[str, Any]) -> None:
    """Append a line."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def keep_lines(path: Path, last_step: int) -> None:
    """Rewrite a metrics file without the lines after `last_step` and without a last line that was cut off."""
    if not path.exists():
        return
    kept = [
        line
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True)
        if line.endswith("\n") and json.loads(line)["step"] <= last_step
    ]
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    temporary.replace(path)
