"""The figures of a run, every few steps: what metrics.jsonl and the trackers are made of."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from astrai_train.callbacks.base import Callback
from astrai_train.metrics.memory import peak_memory_bytes

if TYPE_CHECKING:
    from astrai_train.context import Evaluation, StepRecord, TrainContext


class Figures(Callback):
    """Gathers the columns that ``log.metrics`` names, every ``log.interval`` steps and at the last one.

    ``loss``, ``lr`` and ``grad_norm`` are those of the line's step, ``grad_snr`` is in decibels, ``noise_scale`` in samples,
    ``tokens`` counts from the start of the run; ``tokens_per_s`` and ``mfu`` are over the steps since the line before;
    ``memory`` is the peak in bytes. What does not exist (the MFU of a CPU, the loss of a skipped step) is None.
    """

    def __init__(self) -> None:
        self._tokens = 0
        self._flops = self._seconds = 0.0
        self._peak: float | None = None

    @abstractmethod
    def log(self, context: TrainContext, step: int, figures: Mapping[str, Any]) -> None:
        """Take in the figures of a step.

        Parameters
        ----------
        step
            Counted from 1.
        figures
            Numbers, or None, by column; of an evaluation ``valid_loss``, and ``valid_losses`` by path.
        """

    def on_train_begin(self, context: TrainContext) -> None:
        """Look up what the devices could do."""
        self._peak = context.peak_flops

    def on_step_end(self, context: TrainContext, record: StepRecord) -> None:
        """Add up, and log when it is time."""
        self._tokens += record.n_tokens
        self._flops += record.flops
        self._seconds += record.seconds
        if record.step % context.config.log.interval and record.step != context.total_steps:
            return
        self.log(context, record.step, {**self._columns(context, record), **record.metrics})
        self._tokens = 0
        self._flops = self._seconds = 0.0

    def on_evaluate(self, context: TrainContext, found: Evaluation) -> None:
        """Log what an evaluation found."""
        self.log(context, found.step, {"valid_loss": found.loss, "valid_losses": dict(found.losses)})

    def _columns(self, context: TrainContext, record: StepRecord) -> dict[str, Any]:
        wanted = context.config.log.metrics
        columns = {
            "loss": record.loss,
            "lr": record.lr,
            "grad_norm": record.grad_norm,
            "grad_snr": record.grad_snr,
            "noise_scale": record.noise_scale,
            "tokens": context.counters.tokens,
            "tokens_per_s": self._tokens / self._seconds,
            "mfu": None if self._peak is None else self._flops / self._seconds / self._peak,
            "memory": peak_memory_bytes(context.device),
        }
        return {name: value for name, value in columns.items() if name in wanted}
