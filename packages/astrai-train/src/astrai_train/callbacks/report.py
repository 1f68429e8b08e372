"""report.html and starts.jsonl: the run as a page, and what each of its parts ran on."""

from __future__ import annotations

import json
import logging
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from astrai_core.errors import AstraiError
from astrai_train._version import __version__
from astrai_train.callbacks.base import Callback
from astrai_train.report.page import METRICS, STARTS, write_report

if TYPE_CHECKING:
    from astrai_train.context import TrainContext, TrainResult

logger = logging.getLogger(__name__)


class Report(Callback):
    """Writes ``report.html`` at every checkpoint and at the end.

    ``starts.jsonl`` gets a line each time the run is started: after which step, when, and on what. It is how the report
    knows where the run was resumed.
    """

    def on_train_begin(self, context: TrainContext) -> None:
        """Note this start."""
        with open(context.run_dir / STARTS, "a", encoding="utf-8") as file:
            file.write(json.dumps(describe(context)) + "\n")

    def on_save(self, context: TrainContext, path: Path) -> None:
        """Write the page."""
        self._write(context, f"running: step {context.counters.step:,} of {context.total_steps:,}")

    def on_train_end(self, context: TrainContext, result: TrainResult) -> None:
        """Write the page for the last time."""
        ended = "all steps are done" if result.stopped_by is None else f"stopped by {result.stopped_by}"
        self._write(context, f"step {result.step:,} of {context.total_steps:,}: {ended}")

    def on_error(self, context: TrainContext, error: BaseException) -> None:
        """Say on the page what happened. The error itself matters more than a page that cannot be written."""
        try:
            said = f"{type(error).__name__}: {error}".rstrip(": ")
            self._write(context, f"failed after step {context.counters.step:,} of {context.total_steps:,}: {said}")
        except (OSError, AstraiError) as second:
            logger.warning("%s: the report cannot be written: %s", context.run_dir, second)

    def _write(self, context: TrainContext, state: str) -> None:
        if (context.run_dir / METRICS).exists():
            write_report(context.run_dir, state=state)


def describe(context: TrainContext) -> dict[str, Any]:
    """Return the facts about a start: step, time, versions, machine, model."""
    device = context.device
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "step": context.counters.step,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": f"{device} ({name})",
        "ranks": context.parallel.world.size,
        "cores": cores,
        "threads": torch.get_num_threads(),
        "parameters": f"{sum(parameter.numel() for parameter in context.model.parameters()):,}",
        "astrai-train": __version__,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or "none",
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
