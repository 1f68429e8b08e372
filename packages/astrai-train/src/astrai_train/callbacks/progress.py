"""A progress bar on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from astrai_train.callbacks.base import Callback
from astrai_train.metrics.memory import peak_memory_bytes

if TYPE_CHECKING:
    from astrai_train.context import StepRecord, TrainContext, TrainResult

SMOOTHING = 0.9
"""Decay of the averages behind the speed that is shown."""


class ProgressBar(Callback):
    """Steps, loss, tokens per second, MFU where the device's peak is known, peak memory and time left, on stderr."""

    def __init__(self, console: Console | None = None) -> None:
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=console or Console(stderr=True),
        )
        self._task = TaskID(0)
        self._tokens = self._flops = self._seconds = 0.0

    def on_train_begin(self, context: TrainContext) -> None:
        """Show the bar where the run stands."""
        self._peak = context.peak_flops
        self._task = self._progress.add_task(
            "training", total=context.total_steps, completed=context.counters.step, figures=""
        )
        self._progress.start()

    def on_step_end(self, context: TrainContext, record: StepRecord) -> None:
        """Move the bar."""
        for name, value in (("_tokens", record.n_tokens), ("_flops", record.flops), ("_seconds", record.seconds)):
            setattr(self, name, SMOOTHING * getattr(self, name) + (1 - SMOOTHING) * value)
        figures = [f"loss {record.loss:.4f}" if record.loss is not None else "no loss"]
        figures.append(f"{self._tokens / self._seconds:,.0f} tokens/s")
        if self._peak is not None:
            figures.append(f"MFU {self._flops / self._seconds / self._peak:.1%}")
        figures.append(f"{peak_memory_bytes(context.device) / 2**30:.1f} GiB")
        self._progress.update(self._task, completed=record.step, figures="  ".join(figures))

    def on_train_end(self, context: TrainContext, result: TrainResult) -> None:
        """Leave the bar as it is."""
        self._progress.stop()

    def on_error(self, context: TrainContext, error: BaseException) -> None:
        """Leave the bar as it is."""
        self._progress.stop()
