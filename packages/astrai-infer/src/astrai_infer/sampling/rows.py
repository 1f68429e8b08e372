"""Sampling on the device: parameters by row on the host, one launch for a batch, and what only some requests need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from astrai_core import sampling
from astrai_core.types import SamplingParams, TokenLogprobs
from astrai_infer.sampling import strategies
from astrai_infer.sampling.batch_info import SamplingBatchInfo, SamplingView, floats_of
from astrai_infer.sampling.pipeline import logprob_entries, logprob_tensors, processed_scores
from astrai_infer.task import Task

Variant = Literal["greedy", "random", "history"]
"""What a batch needs: argmax; filters and draws; these after penalties."""

VARIANTS: tuple[Variant, ...] = ("greedy", "random")
"""What is captured before the first request; penalties come when someone asks for them."""


@dataclass(frozen=True)
class RowFields:
    """A batch's sampling parameters on the device; a row is a request, or padding, which is greedy."""

    rows: Tensor
    """``[batch]`` int64: row of each in the history; the scratch row for padding."""
    positions: Tensor
    """``[batch]`` int64: index within its sequence of each one's last token, the counter of the generator."""
    floats: Tensor
    """``[batch, 6]`` fp32: temperature, top_p, min_p, presence, frequency, repetition."""
    ints: Tensor
    """``[batch, 2]`` int64: top_k, seed."""


class RowSampler:
    """Samples for the rows of a step.

    Parameters
    ----------
    n_rows
        Rows of the pool, the scratch row included.
    vocab_size
        Width of the penalty history, which is allocated when the first request needs it.
    """

    def __init__(self, n_rows: int, vocab_size: int, device: torch.device) -> None:
        self.info = SamplingBatchInfo(n_rows, vocab_size, device)
        self._vocab_size = vocab_size
        self.floats = np.tile(np.array([0.0, 1.0, 0.0, 0.0, 0.0, 1.0], dtype=np.float32), (n_rows, 1))
        """``[rows, 6]``, see :class:`RowFields`."""
        self.ints = np.zeros((n_rows, 2), dtype=np.int64)

    def admit(self, task: Task) -> None:
        """Write a task's row; after a preemption its history is rebuilt from the tokens it has."""
        assert task.row is not None, "admitted tasks have a row"
        p = task.params
        self.floats[task.row] = floats_of(p)
        self.ints[task.row] = (max(p.top_k, 0), task.seed)
        if p.counts_history:
            self.info.write_history(task)

    @staticmethod
    def variant(tasks: Sequence[Task]) -> Variant:
        """Say what these tasks need."""
        if any(task.params.counts_history for task in tasks):
            return "history"
        return "greedy" if all(task.params.greedy for task in tasks) else "random"

    @staticmethod
    def needs_amending(params: SamplingParams) -> bool:
        """Whether a request has rules that :meth:`sample` knows nothing of, for :meth:`amend`."""
        return bool(params.logit_bias or params.allowed_token_ids is not None or params.min_tokens or params.structured)

    def sample(self, variant: Variant, logits: Tensor, fields: RowFields, out: Tensor) -> None:
        """Write a token for each row of ``[batch, vocab]`` to `out`, ``[batch]`` int64. Reads nothing back, so it can be
        captured."""
        if variant == "greedy":
            sampling.argmax(logits, out)
            return
        penalties = None
        if variant == "history":
            counts, seen = self.info.history
            presence, frequency, repetition = fields.floats[:, 3:].unsqueeze(-1).unbind(1)
            penalties = (
                presence,
                frequency,
                repetition,
                counts.index_select(0, fields.rows),
                seen.index_select(0, fields.rows),
            )
        temperature, top_p, min_p = fields.floats[:, :3].unbind(1)
        top_k, seed = fields.ints.unbind(1)
        sampling.sample(logits, temperature, top_k, top_p, min_p, seed, fields.positions, out, penalties)

    def record(self, fields: RowFields, token_ids: Tensor) -> None:
        """Count the sampled tokens in the history, where there is one. Can be captured."""
        counts, seen = self.info.history
        place = fields.rows * self._vocab_size + token_ids
        counts.view(-1).index_add_(0, place, torch.ones_like(token_ids, dtype=counts.dtype))
        seen.view(-1).index_fill_(0, place, True)

    def amend(self, tasks: Sequence[Task], at: Sequence[int], logits: Tensor, fields: RowFields, out: Tensor) -> None:
        """Sample anew for the tasks whose rules :meth:`sample` did not apply.

        Each row comes out as it would alone, whatever its batch mates ask for.

        Parameters
        ----------
        at
            Row of the batch of each task.
        """
        for task, i in zip(tasks, at, strict=True):
            if self.needs_amending(task.params):
                row = slice(i, i + 1)
                scores = self._scores(task, logits[row], fields, row)
                floats, ints = fields.floats[row], fields.ints[row]
                sampling.sample(
                    scores,
                    floats[:, 0],
                    ints[:, 0],
                    floats[:, 1],
                    floats[:, 2],
                    ints[:, 1],
                    fields.positions[row],
                    out[row],
                )

    def _scores(self, task: Task, logits: Tensor, fields: RowFields, row: slice) -> Tensor:
        """Return ``[1, vocab]`` fp32 after penalties and rules."""
        scores = logits.float()
        if task.params.counts_history:
            counts, seen = self.info.history
            rows = fields.rows[row]
            presence, frequency, repetition = fields.floats[row, 3:].unsqueeze(-1).unbind(1)
            scores = strategies.apply_penalties(scores, presence, frequency, repetition, counts[rows], seen[rows])
        if self.needs_amending(task.params):
            scores = strategies.apply_rules(scores.clone() if scores is logits else scores, (task,))
        return scores

    def logprobs(
        self, tasks: Sequence[Task], at: Sequence[int], logits: Tensor, fields: RowFields, token_ids: Tensor
    ) -> Callable[[], list[TokenLogprobs | None]]:
        """Start to compute the log-probabilities that tasks asked for; call it before :meth:`record`.

        Returns
        -------
        A function that gives an entry for each task, to be called when the step has ended.
        """
        found: list[tuple[Tensor, ...] | None] = []
        for task, i in zip(tasks, at, strict=True):
            params, row = task.params, slice(i, i + 1)
            if params.logprobs is None:
                found.append(None)
                continue
            source = logits[row]
            if params.logprobs_mode == "processed":
                source = self._processed(task, self._scores(task, source, fields, row), fields, row)
            found.append(to_host(*logprob_tensors(source, token_ids[row], params.logprobs)))

        def entries() -> list[TokenLogprobs | None]:
            return [None if tensors is None else logprob_entries(*tensors)[0] for tensors in found]

        return entries

    def _processed(self, task: Task, scores: Tensor, fields: RowFields, row: slice) -> Tensor:
        floats, ints = fields.floats[row], fields.ints[row]
        view = SamplingView(
            tasks=(task,),
            rows=fields.rows[row],
            temperature=floats[:, 0],
            top_k=ints[:, 0],
            top_p=floats[:, 1],
            min_p=floats[:, 2],
            seed=ints[:, 1],
            groups={},
            any_penalty=False,
            any_rule=False,
            any_logprobs=True,
        )
        return processed_scores(scores, view, 0)


def to_host(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Start copies to the host (pinned where they come from a CUDA device); they are there when the step has ended."""
    return tuple(tensor.to("cpu", non_blocking=True, copy=True) for tensor in tensors)
