"""Outside trackers: they get the figures of metrics.jsonl. Each is an extra of this package, asked for by name."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from astrai_core.errors import MissingDependencyError
from astrai_train.callbacks.figures import Figures

if TYPE_CHECKING:
    from astrai_train.context import TrainContext, TrainResult

WANDB_ID = "wandb_id.txt"
"""Holds the id of the run at W&B, so that a resumed run goes on there."""


def flat(figures: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers by tag: ``train/...`` of a step, ``valid/...`` of an evaluation; None is left out."""
    for name, value in figures.items():
        if isinstance(value, Mapping):
            members = {f"valid/{member}": loss for member, loss in value.items()} if len(value) > 1 else {}
        else:
            members = {"valid/loss" if name == "valid_loss" else f"train/{name}": value}
        yield from ((tag, number) for tag, number in members.items() if number is not None)


class TensorBoard(Figures):
    """Writes event files into ``tensorboard/`` of the run directory; look at them with ``tensorboard --logdir``.

    Raises
    ------
    MissingDependencyError
        If tensorboard is not installed.
    """

    def __init__(self) -> None:
        super().__init__()
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingDependencyError(
                "log.trackers: tensorboard is not installed; run `pip install 'astrai-train[tensorboard]'`"
            ) from None
        self._open = SummaryWriter

    def on_train_begin(self, context: TrainContext) -> None:
        """Open a file; what an earlier part wrote of steps that are done again is hidden."""
        super().on_train_begin(context)
        folder = context.run_dir / "tensorboard"
        self._writer = self._open(str(folder), purge_step=context.counters.step + 1)

    def log(self, context: TrainContext, step: int, figures: Mapping[str, Any]) -> None:
        """Write one scalar for each figure."""
        for tag, number in flat(figures):
            self._writer.add_scalar(tag, number, step)

    def on_train_end(self, context: TrainContext, result: TrainResult) -> None:
        """Close the file."""
        self._writer.close()

    def on_error(self, context: TrainContext, error: BaseException) -> None:
        """Close the file, if the run came so far."""
        if hasattr(self, "_writer"):
            self._writer.close()


class WandB(Figures):
    """Sends the figures to Weights & Biases, or keeps them in the run directory under ``WANDB_MODE=offline``.

    Project and entity are those of W&B's own settings (``WANDB_PROJECT``, ``WANDB_ENTITY``), the name is the run
    directory's. A resumed run goes on under the same id.

    Raises
    ------
    MissingDependencyError
        If wandb is not installed.
    """

    def __init__(self) -> None:
        super().__init__()
        try:
            import wandb
        except ImportError:
            raise MissingDependencyError(
                "log.trackers: wandb is not installed; run `pip install 'astrai-train[wandb]'`"
            ) from None
        self._wandb = wandb
        self._run: Any = None

    def on_train_begin(self, context: TrainContext) -> None:
        """Begin the run, or take it up again."""
        super().on_train_begin(context)
        kept = context.run_dir / WANDB_ID
        if context.counters.step == 0 or not kept.is_file():
            kept.write_text(uuid.uuid4().hex[:12], encoding="utf-8")
        self._run = self._wandb.init(
            id=kept.read_text(encoding="utf-8"),
            resume="allow",
            name=context.run_dir.resolve().name,
            dir=str(context.run_dir),
            config=context.config.to_dict(),
        )

    def log(self, context: TrainContext, step: int, figures: Mapping[str, Any]) -> None:
        """Send the figures."""
        self._run.log(dict(flat(figures)), step=step)

    def on_train_end(self, context: TrainContext, result: TrainResult) -> None:
        """Say that the run ended well."""
        self._run.finish()

    def on_error(self, context: TrainContext, error: BaseException) -> None:
        """Say that the run failed, if it began."""
        if self._run is not None:
            self._run.finish(exit_code=1)
