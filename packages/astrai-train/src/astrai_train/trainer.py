"""The training loop: accumulate, divide once, clip, step, save."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from astrai_core.errors import DataError, TrainingError
from astrai_train.callbacks.base import Callback
from astrai_train.checkpoint import load_training_state
from astrai_train.context import StepRecord, TrainContext, TrainResult
from astrai_train.data.collate import TrainBatch
from astrai_train.evaluation import evaluate
from astrai_train.metrics.mfu import FlopsCounter
from astrai_train.rng import rng_state, set_rng_state
from astrai_train.signals import StopSignals
from astrai_train.strategy.base import LossOutput, StepLoss, document_lens, step_loss

logger = logging.getLogger(__name__)


class Trainer:
    """Carries out a run.

    Parameters
    ----------
    context
        The parts of the run.
    callbacks
        Who watches it, in the order in which they are called.
    """

    def __init__(self, context: TrainContext, callbacks: Sequence[Callback] = ()) -> None:
        self.context = context
        self.callbacks = list(callbacks)
        self._flops = FlopsCounter(context.model)
        self._parameters = [p for group in context.optimizer.param_groups for p in group["params"]]
        self._resumed_rng: Mapping[str, Any] | None = None
        self._saved: Path | None = None

    def restore(self, checkpoint: Path) -> None:
        """Take over the training state of a checkpoint; the context's model must hold its weights.

        Raises
        ------
        CheckpointError
            If it belongs to another optimizer or model.
        ConfigError
            If it belongs to other data.
        """
        context = self.context
        state = load_training_state(checkpoint)
        context.optimizer.load_state_dict(state["optimizer"])
        context.source.load_state_dict(state["source"])
        for name, value in state["counters"].items():
            setattr(context.counters, name, value)
        if context.grad_snr is not None and state["grad_snr"] is not None:
            context.grad_snr.load_state_dict(state["grad_snr"])
        self._resumed_rng = state["rng"]
        self._saved = checkpoint

    def train(self) -> TrainResult:
        """Run to the last step, or to the end of the step in which SIGTERM or SIGINT arrives, and save.

        Raises
        ------
        TrainingError
            If a gradient is not finite.
        CheckpointError
            If a checkpoint cannot be written.
        KeyboardInterrupt
            At a second signal.
        """
        context = self.context
        context.model.train()
        try:
            with StopSignals() as stop:
                for callback in self.callbacks:
                    callback.on_train_begin(context)
                batches = iter(context.source)
                if self._resumed_rng is not None:
                    set_rng_state(self._resumed_rng)
                while (
                    context.counters.step < context.total_steps and (stop.requested or self._patience_is_over) is None
                ):
                    record = self._step(batches)
                    for callback in self.callbacks:
                        callback.on_step_end(context, record)
                    if context.config.eval_interval and record.step % context.config.eval_interval == 0:
                        self._evaluate()
                    if record.step % context.config.checkpoint.interval == 0:
                        self.save()
                if self._saved != context.checkpoints.path(context.counters.step):
                    self.save()
                context.checkpoints.wait()
                assert self._saved is not None, "a run ends with a checkpoint"
                early = stop.requested or self._patience_is_over
                done = context.counters.step >= context.total_steps
                result = TrainResult(context.counters.step, self._saved, None if done else early)
                for callback in self.callbacks:
                    callback.on_train_end(context, result)
        except BaseException as error:
            for callback in self.callbacks:
                callback.on_error(context, error)
            raise
        finally:
            context.checkpoints.close()
        return result

    def save(self) -> None:
        """Save the state after the last step that was done."""
        context = self.context
        counters = context.counters
        state = {
            "counters": vars(counters),
            "optimizer": context.optimizer.state_dict(),
            "source": context.source.state_dict(),
            "grad_snr": None if context.grad_snr is None else context.grad_snr.state_dict(),
            "rng": rng_state(),
        }
        self._saved = context.checkpoints.save(counters.step, context.model, state)
        for callback in self.callbacks:
            callback.on_save(context, self._saved)

    @property
    def _patience_is_over(self) -> str | None:
        patience = self.context.config.early_stop_patience
        return "early_stop_patience" if patience and self.context.counters.evaluations_since_best >= patience else None

    def _evaluate(self) -> None:
        counters = self.context.counters
        found = evaluate(self.context)
        if found.loss is not None:
            is_best = counters.best_valid_loss is None or found.loss < counters.best_valid_loss
            counters.best_valid_loss = found.loss if is_best else counters.best_valid_loss
            counters.evaluations_since_best = 0 if is_best else counters.evaluations_since_best + 1
        for callback in self.callbacks:
            callback.on_evaluate(self.context, found)

    def _step(self, batches: Iterator[TrainBatch]) -> StepRecord:
        """Do one optimizer step: all micro-batches, then one division, one clipping, one update."""
        context, counters = self.context, self.context.counters
        started = time.perf_counter()
        outputs: list[LossOutput] = []
        n_tokens, flops = 0, 0.0
        for _ in range(context.accumulation_steps):
            batch = next(batches, None)
            if batch is None:
                raise DataError(f"step {counters.step + 1}: the training data ended; a source must go on without end")
            with context.autocast():
                output = context.strategy(batch)
            output.loss_sum.backward()
            outputs.append(output.detach())
            n_tokens += batch.n_tokens
            flops += self._flops.of(document_lens(batch))
        totals = step_loss(outputs)
        for group in context.optimizer.param_groups:
            group["lr"] = context.schedule(counters.step, group["base_lr"])
        grad_norm = self._update(totals)
        counters.step += 1
        counters.tokens += n_tokens
        counters.supervised_tokens += totals.n_supervised
        return StepRecord(
            step=counters.step,
            loss=totals.loss,
            lr=context.optimizer.param_groups[0]["lr"],
            grad_norm=grad_norm,
            n_tokens=n_tokens,
            flops=flops,
            seconds=time.perf_counter() - started,
            metrics=totals.metrics,
        )

    def _update(self, totals: StepLoss) -> float | None:
        """Divide the gradient by the step's supervised tokens, clip it and move the weights; return its norm."""
        context = self.context
        step = context.counters.step + 1
        try:
            if totals.n_supervised == 0:
                logger.warning("step %d has no supervised token and is skipped", step)
                return None
            grads = [p.grad for p in self._parameters if p.grad is not None]
            torch._foreach_div_(grads, totals.n_supervised)
            norm = get_total_norm(grads)
            grad_norm = float(norm)
            if not math.isfinite(grad_norm):
                raise TrainingError(
                    f"step {step}: the gradient norm is {grad_norm} (loss {totals.loss}), the weights are those of "
                    f"step {step - 1}; lower optimizer.lr, or look at the step's data"
                )
            if context.grad_snr is not None:
                context.grad_snr.update()
            if context.config.max_grad_norm is not None:
                clip_grads_with_norm_(self._parameters, context.config.max_grad_norm, norm)
            context.optimizer.step()
            return grad_norm
        finally:
            context.optimizer.zero_grad(set_to_none=True)
