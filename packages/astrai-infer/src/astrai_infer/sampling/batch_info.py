"""Sampling parameters of the live requests, one row each, in tensors that a step indexes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from astrai_core.types import SamplingParams
from astrai_infer.task import Task

Width = Literal["none", "narrow", "wide", "nucleus"]
"""What the filters of a random row ask for: nothing sorted, the first NARROW or WIDE columns, or as many as hold its mass.
It is a fact of the row alone, so that a row is computed in the same way whatever its batch mates are."""

NARROW, WIDE = 64, 1024
"""Columns (sorting 49,152 columns costs 4 ms a row on a CPU, finding the 1,024 largest 0.3 ms)."""

LEAST_DIVISOR = 1e-15
"""Of logits: they stay finite in fp32 when both a penalty and a temperature divide them, and so near to 0 a draw is the
argmax."""


@dataclass(frozen=True)
class SamplingView:
    """The rows of one step's sampling tasks, with host flags that say what can be skipped (rows S4, S6, S7)."""

    tasks: tuple[Task, ...]
    rows: Tensor
    """``[batch]`` int64."""
    temperature: Tensor
    """``[batch]`` fp32; 0 is greedy."""
    top_k: Tensor
    """``[batch]`` int64; 0 is off."""
    top_p: Tensor
    """``[batch]`` fp32; 1 is off."""
    min_p: Tensor
    """``[batch]`` fp32; 0 is off."""
    seed: Tensor
    """``[batch]`` int64."""
    groups: dict[Width, Tensor]
    """How much of a row must be sorted to draw from it -> positions within the batch, ``[n]`` int64."""
    any_penalty: bool
    any_rule: bool
    """Some task has a logit_bias, allowed_token_ids, min_tokens or a grammar."""
    any_logprobs: bool


class SamplingBatchInfo:
    """Device tables with a row per live request: admission writes one row, a step reads many.

    Parameters
    ----------
    n_rows
        Rows of the pool.
    vocab_size
        Width of the penalty history, which is allocated when the first request needs it.
    """

    def __init__(self, n_rows: int, vocab_size: int, device: torch.device) -> None:
        self.device = device
        self.vocab_size = vocab_size
        self._floats = torch.zeros((n_rows, 6), dtype=torch.float32, device=device)
        self._ints = torch.zeros((n_rows, 2), dtype=torch.int64, device=device)
        self._n_rows = n_rows
        self._counts: Tensor | None = None
        self._seen: Tensor | None = None
        self._view: SamplingView | None = None

    def admit(self, task: Task) -> None:
        """Write a task's row; after a preemption its history is rebuilt from the tokens it has."""
        assert task.row is not None, "admitted tasks have a row"
        params = task.params
        self._floats[task.row] = torch.tensor(floats_of(params), device=self.device)
        self._ints[task.row] = torch.tensor([max(params.top_k, 0), task.seed], device=self.device)
        self._view = None
        if params.counts_history:
            self.write_history(task)

    @property
    def history(self) -> tuple[Tensor, Tensor]:
        """counts ``[rows, vocab]`` int32 and seen ``[rows, vocab]`` bool; there once a row with penalties was admitted."""
        assert self._counts is not None and self._seen is not None, "a row with penalties was admitted"
        return self._counts, self._seen

    def write_history(self, task: Task) -> None:
        """Count the tokens that a task has in its row."""
        row = task.row
        assert row is not None, "admitted tasks have a row"
        if self._counts is None or self._seen is None:
            shape = (self._n_rows, self.vocab_size)
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self.device)
            self._seen = torch.zeros(shape, dtype=torch.bool, device=self.device)
        window = task.params.rep_window
        tail = task.prompt_ids[-window:] if window else ()
        counted = torch.as_tensor([*tail, *task.output_ids], dtype=torch.int64, device=self.device)
        self._counts[row] = torch.bincount(counted, minlength=self.vocab_size).int()
        self._seen[row] = False
        self._seen[row, torch.as_tensor(task.token_ids, dtype=torch.int64, device=self.device)] = True

    def penalties(self, view: SamplingView) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return presence, frequency, repetition ``[batch, 1]`` fp32, counts and seen ``[batch, vocab]`` of a view."""
        counts, seen = self.history
        presence, frequency, repetition = self._floats[view.rows, 3:].unsqueeze(-1).unbind(1)
        return presence, frequency, repetition, counts[view.rows], seen[view.rows]

    def record(self, view: SamplingView, token_ids: Tensor) -> None:
        """Count the sampled tokens ``[batch]`` in the history."""
        if self._counts is not None and self._seen is not None and view.any_penalty:
            self._counts[view.rows, token_ids] += 1
            self._seen[view.rows, token_ids] = True

    def view(self, tasks: tuple[Task, ...]) -> SamplingView:
        """Return the rows of these tasks; the same ordered set of tasks gets the same view again."""
        if self._view is not None and self._view.tasks == tasks:
            return self._view
        rows = torch.tensor([task.row for task in tasks], dtype=torch.int64, device=self.device)
        temperature, top_p, min_p = self._floats[rows, :3].unbind(1)
        top_k, seed = self._ints[rows].unbind(1)
        params = [task.params for task in tasks]
        groups: dict[Width, list[int]] = {}
        for i, p in enumerate(params):
            if not p.greedy:
                groups.setdefault(_width(p), []).append(i)
        self._view = SamplingView(
            tasks=tasks,
            rows=rows,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            groups={width: torch.tensor(index, device=self.device) for width, index in groups.items()},
            any_penalty=any(p.counts_history for p in params),
            any_logprobs=any(p.logprobs is not None for p in params),
            any_rule=any(
                p.logit_bias or p.allowed_token_ids is not None or p.min_tokens or p.structured for p in params
            ),
        )
        return self._view


def floats_of(params: SamplingParams) -> tuple[float, float, float, float, float, float]:
    """Return temperature, top_p, min_p, presence, frequency and repetition as a row holds them."""
    return (
        max(params.temperature, LEAST_DIVISOR) if params.temperature else 0.0,
        params.top_p,
        params.min_p,
        params.presence_penalty,
        params.frequency_penalty,
        max(params.repetition_penalty, LEAST_DIVISOR),
    )


def _width(params: SamplingParams) -> Width:
    if 0 < params.top_k <= WIDE:
        return "narrow" if params.top_k <= NARROW else "wide"
    return "nucleus" if params.top_k > 0 or params.top_p < 1 or params.min_p > 0 else "none"
