"""metrics.jsonl: one line of figures every few steps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from astrai_train.callbacks.figures import Figures

if TYPE_CHECKING:
    from astrai_train.context import TrainContext

FILE = "metrics.jsonl"


class MetricsFile(Figures):
    """Writes each step's figures as a line; an evaluation is a line of its own."""

    def on_train_begin(self, context: TrainContext) -> None:
        """Drop lines of steps that a resumed run does again."""
        super().on_train_begin(context)
        keep_lines(context.run_dir / FILE, context.counters.step)

    def log(self, context: TrainContext, step: int, figures: Mapping[str, Any]) -> None:
        """Append a line."""
        write_line(context.run_dir / FILE, {"step": step, **figures})


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
