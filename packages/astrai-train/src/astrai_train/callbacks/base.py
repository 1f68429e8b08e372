"""The callback seam: what a run tells those who watch it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from astrai_core.registry import BaseFactory

if TYPE_CHECKING:
    from astrai_train.context import Evaluation, StepRecord, TrainContext, TrainResult


class Callback:
    """Watches a run; every method does nothing until it is overridden.

    A callback that raises ends the run with its error. `on_train_begin` is followed by exactly one of `on_train_end`
    and `on_error`.
    """

    def on_train_begin(self, context: TrainContext) -> None:
        """Called once, after a resumed state was restored and before the first step."""

    def on_step_end(self, context: TrainContext, record: StepRecord) -> None:
        """Called after every step, before its checkpoint."""

    def on_evaluate(self, context: TrainContext, found: Evaluation) -> None:
        """Called after an evaluation, before the step's checkpoint."""

    def on_save(self, context: TrainContext, path: Path) -> None:
        """Called when a checkpoint was handed to the writer."""

    def on_train_end(self, context: TrainContext, result: TrainResult) -> None:
        """Called when the run ended as it should: all steps are done, or a signal asked it to stop."""

    def on_error(self, context: TrainContext, error: BaseException) -> None:
        """Called when the run ends by an error, which is raised afterwards."""


class CallbackFactory(BaseFactory[Callback]):
    """Callbacks by name."""


CallbackFactory.register("metrics_file", "astrai_train.callbacks.metrics_file:MetricsFile")
CallbackFactory.register("progress", "astrai_train.callbacks.progress:ProgressBar")
CallbackFactory.register("report", "astrai_train.callbacks.report:Report")
CallbackFactory.register("tensorboard", "astrai_train.callbacks.trackers:TensorBoard")
CallbackFactory.register("wandb", "astrai_train.callbacks.trackers:WandB")
