"""The training loop: accumulate, divide once, clip, step, save."""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from astrai_core.errors import DataError, TrainingError
from astrai_train import training_state
from astrai_train.callbacks.base import Callback
from astrai_train.context import StepRecord, TrainContext, TrainResult
from astrai_train.data.collate import TrainBatch
from astrai_train.ema import DIRECTORY
from astrai_train.evaluation import evaluate
from astrai_train.metrics.mfu import FlopsCounter
from astrai_train.optim.matrix import local
from astrai_train.precision import attention
from astrai_train.rng import set_rng_state
from astrai_train.signals import StopSignals
from astrai_train.strategy.base import LossOutput, add_terms, document_lens, means, total_loss

logger = logging.getLogger(__name__)

CLIP_EPS = 1e-6
"""Added to the norm that gradients are clipped by, once and not on every rank."""


class Trainer:
    """Carries out a run, together with the trainers of the other ranks.

    Parameters
    ----------
    context
        The parts of the run.
    callbacks
        Who watches it, in the order in which they are called; on rank 0 alone.
    """

    def __init__(self, context: TrainContext, callbacks: Sequence[Callback] = ()) -> None:
        self.context = context
        self.callbacks = list(callbacks) if context.parallel.world.is_first else []
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
        self._resumed_rng = training_state.restore(self.context, checkpoint)
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
            with StopSignals() as stop, attention(context.config, context.device):
                for callback in self.callbacks:
                    callback.on_train_begin(context)
                batches, early = iter(context.source), None
                if self._resumed_rng is not None:
                    set_rng_state(self._resumed_rng, context.device)
                while context.counters.step < context.total_steps and (early := self._stopped_by(stop)) is None:
                    record = self._step(batches)
                    for callback in self.callbacks:
                        callback.on_step_end(context, record)
                    if context.config.eval_interval and record.step % context.config.eval_interval == 0:
                        self._evaluate()
                    if self._save_is_due():
                        self.save()
                if self._saved != context.checkpoints.path(context.counters.step):
                    self.save()
                context.checkpoints.wait()
                self._export_average()
                assert self._saved is not None, "a run ends with a checkpoint"
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
        context.parallel.world.leave()
        return result

    def save(self) -> None:
        """Save the state after the last step that was done."""
        context = self.context
        counters = context.counters
        state = training_state.collect(context)
        model = context.parallel.whole(context.model)
        self._saved = context.checkpoints.save(
            counters.step,
            model,
            state,
            model_is_copy=model is not context.model,
            best=counters.best_step if context.config.checkpoint.keep_best else None,
        )
        for callback in self.callbacks:
            callback.on_save(context, self._saved)

    def _save_is_due(self) -> bool:
        counters, wanted = self.context.counters, self.context.config.checkpoint
        return counters.step % wanted.interval == 0 or (wanted.keep_best and counters.best_step == counters.step)

    def _export_average(self) -> None:
        """Write the averaged weights into the run directory, if the run keeps them; a collective."""
        context = self.context
        if context.ema is None:
            return
        with context.ema.in_place():
            model = context.parallel.whole(context.model)
            if model is not None:
                context.checkpoints.export(model, context.run_dir / DIRECTORY)

    def _stopped_by(self, stop: StopSignals) -> str | None:
        """Say what asks any rank to stop, the same on every rank; None to go on."""
        number = self.context.parallel.world.largest(0 if stop.requested is None else stop.requested)
        if number:
            return signal.Signals(number).name
        patience = self.context.config.early_stop_patience
        return "early_stop_patience" if patience and self.context.counters.evaluations_since_best >= patience else None

    def _evaluate(self) -> None:
        counters = self.context.counters
        found = evaluate(self.context)
        if found.loss is not None:
            best = math.inf if counters.best_valid_loss is None else counters.best_valid_loss
            is_best = found.loss < best  # never of a NaN, which no later loss would be below
            counters.evaluations_since_best += 1
            if is_best:
                counters.best_valid_loss, counters.best_step = found.loss, found.step
                counters.evaluations_since_best = 0
        for callback in self.callbacks:
            callback.on_evaluate(self.context, found)

    def _step(self, batches: Iterator[TrainBatch]) -> StepRecord:
        """Do one optimizer step: all micro-batches, then one division, one clipping, one update."""
        context, counters = self.context, self.context.counters
        started = time.perf_counter()
        outputs: list[LossOutput] = []
        n_tokens, flops = 0, 0.0
        for index in range(context.accumulation_steps):
            batch = next(batches, None)
            if batch is None:
                raise DataError(f"step {counters.step + 1}: the training data ended; a source must go on without end")
            with context.autocast():
                last = index + 1 == context.accumulation_steps
                output = context.parallel.loss(context.strategy, batch, last=last)
            output.loss_sum.backward()
            if index == 0 and context.noise_scale is not None:
                context.noise_scale.begin(output.n_supervised)
            outputs.append(output.detach())
            n_tokens += batch.n_tokens
            flops += self._flops.of(document_lens(batch))
        mine = add_terms([(output.n_supervised, output.metrics) for output in outputs])
        parts = context.parallel.world.gather((mine, n_tokens, flops))
        n_supervised, sums = add_terms([terms for terms, _, _ in parts])
        n_tokens, flops = sum(part[1] for part in parts), sum(part[2] for part in parts)
        context.optimizer.set_lr(context.schedule, counters.step)
        loss, grad_norm = self._update(n_supervised, total_loss(outputs))
        counters.step += 1
        counters.tokens += n_tokens
        counters.supervised_tokens += n_supervised
        return StepRecord(
            step=counters.step,
            loss=loss,
            lr=context.optimizer.param_groups[0]["lr"],
            grad_norm=grad_norm,
            grad_snr=self._grad_snr(),
            noise_scale=context.noise_scale.batch_size()
            if context.noise_scale is not None and self._is_logged()
            else None,
            n_tokens=n_tokens,
            flops=flops,
            seconds=time.perf_counter() - started,
            metrics=means(n_supervised, sums),
        )

    def _update(self, n_supervised: int, loss_sum: Tensor) -> tuple[float | None, float | None]:
        """Divide the gradient by what the step supervised, clip it and move the weights; return loss and norm.

        The device is read once a step, and where the optimizer can leave the weights alone by itself, only after it has
        been given its update: it would wait for the host meanwhile, and then again until the next forward pass begins.
        """
        context, optimizer = self.context, self.context.optimizer
        step = context.counters.step + 1
        try:
            if n_supervised == 0:
                if context.parallel.world.is_first:
                    logger.warning("step %d has no supervised token and is skipped", step)
                return None, None
            grads = [local(p.grad) for p in self._parameters if p.grad is not None]
            norm = context.parallel.total_norm(grads) / n_supervised
            told = torch.stack([context.parallel.world.add_up(loss_sum) / n_supervised, norm.double()])
            if context.grad_snr is not None:
                context.grad_snr.update(n_supervised)
            if context.noise_scale is not None:
                context.noise_scale.update(norm, n_supervised, context.parallel.world.add_up)
            # Division and clipping are one pass over the gradients.
            factor = torch.full_like(norm, 1.0 / n_supervised)
            if context.config.max_grad_norm is not None:
                factor *= torch.clamp(context.config.max_grad_norm / (norm + CLIP_EPS), max=1.0)
            torch._foreach_mul_(grads, factor)
            if optimizer.can_decide_on_device:
                optimizer.step_if(norm.isfinite())
                loss, grad_norm = self._read(told, step)
            else:
                loss, grad_norm = self._read(told, step)
                optimizer.step()
            if context.ema is not None:
                context.ema.update(step)
            return loss, grad_norm
        finally:
            optimizer.zero_grad(set_to_none=True)

    @staticmethod
    def _read(told: Tensor, step: int) -> tuple[float, float]:
        loss, grad_norm = told.tolist()
        if not math.isfinite(grad_norm):
            raise TrainingError(
                f"step {step}: the gradient norm is {grad_norm} (loss {loss}), the weights are those of step {step - 1}; "
                "lower optimizer.lr, or look at the step's data"
            )
        return loss, grad_norm

    def _grad_snr(self) -> float | None:
        """Return the gradient's signal over noise at a step that is logged; a collective."""
        tracker = self.context.grad_snr
        return (
            tracker.decibels(self.context.parallel.add_up_shards) if tracker is not None and self._is_logged() else None
        )

    def _is_logged(self) -> bool:
        step = self.context.counters.step
        return step % self.context.config.log.interval == 0 or step == self.context.total_steps
