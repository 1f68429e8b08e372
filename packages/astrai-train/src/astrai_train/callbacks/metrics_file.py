"""metrics.jsonl: one line of figures every few steps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from astrai_train.callbacks.figures import Figures
from astrai_train.report.page import METRICS, read_lines

if TYPE_CHECKING:
    from astrai_train.context import TrainContext


class MetricsFile(Figures):
    """Writes each step's figures as a line; an evaluation is a line of its own."""

    def on_train_begin(self, context: TrainContext) -> None:
        """Drop lines of steps that a resumed run does again."""
        super().on_train_begin(context)
        keep_lines(context.run_dir / METRICS, context.counters.step)

    def log(self, context: TrainContext, step: int, figures: Mapping[str, Any]) -> None:
        """Append a line."""
        with open(context.run_dir / METRICS, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **figures}) + "\n")


def keep_lines(path: Path, last_step: int) -> None:
    """Rewrite a metrics file without the lines after `last_step` and without a last line that was cut off.

    Raises
    ------
    DataError
        If another line is damaged.
    """
    if not path.exists():
        return
    kept = [json.dumps(line) + "\n" for line in read_lines(path) if line["step"] <= last_step]
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    temporary.replace(path)
