"""Runs one step: the batch's lists become tensors, the model gives logits, the sampler gives tokens."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from astrai_core.attention.backend import AttentionBackend
from astrai_core.model.adapter_slots import AdapterSlots
from astrai_core.model.transformer import CausalLM
from astrai_infer.cache.pool import PagePool
from astrai_infer.runtime.drafting import DraftRunner
from astrai_infer.runtime.workspace import InferenceWorkspace
from astrai_infer.sampling.batch_info import SamplingBatchInfo
from astrai_infer.sampling.pipeline import SamplingPipeline, token_logprobs
from astrai_infer.task import Batch, BatchItem, StepResult, Task


class Executor:
    """Owns the model's side of a step; the scheduler decides who runs.

    Parameters
    ----------
    adapters
        Room for adapters on the model.
    draft
        A draft model, which makes the guesses of steps that verify.
    """

    def __init__(
        self,
        model: CausalLM,
        pool: PagePool,
        backend: AttentionBackend,
        n_rows: int,
        max_tokens: int,
        *,
        adapters: AdapterSlots | None = None,
        draft: CausalLM | None = None,
    ) -> None:
        self.model = model
        self.adapters = adapters
        self.pool = pool
        self.backend = backend
        self.workspace = InferenceWorkspace(max_tokens, n_rows, model.device, len(pool.groups))
        self.info = SamplingBatchInfo(n_rows, model.config.vocab_size, model.device)
        self.pipeline = SamplingPipeline(self.info)
        self.draft = None if draft is None else DraftRunner(draft, pool, backend, self.pipeline, max_tokens)
        self._decoding: list[Task] = []
        """The tasks of the last step if all of them decoded, in its order."""

    def admit(self, task: Task) -> None:
        """Write a task's sampling parameters into its row."""
        self.info.admit(task)

    def prepare(self) -> None:
        """Do nothing: steps are run as they come."""

    def forget(self) -> None:
        """Do nothing: no address of the pool outlives a step."""

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepResult:
        """Feed the batch's tokens and sample for the tasks that reach their last one."""
        if batch.draft_lens:
            return self._verify(batch)
        if self.draft is not None:
            self.draft.follow(batch.items)
        return self._run_mixed(batch) if batch.chunks else self._decode(batch.decodes)

    def _verify(self, batch: Batch) -> StepResult:
        """Feed each task's newest token and the guesses behind it, and sample after each of these."""
        tasks, workspace = batch.decodes, self.workspace
        self._decoding = []
        drafts = batch.drafts
        if drafts is None:
            assert self.draft is not None, "who leaves the guessing to a draft model has one"
            drafts = self.draft.guess(tasks, batch.draft_lens)
        counts = [1 + len(draft) for draft in drafts]
        cache = self.pool.bind_tasks(rows_of(tasks), counts, workspace)
        input_ids = workspace.input_ids.put(
            [token for task, draft in zip(tasks, drafts, strict=True) for token in (task.token_ids[-1], *draft)]
        )
        position_ids = workspace.position_ids.put(
            [task.computed_len + i for task, count in zip(tasks, counts, strict=True) for i in range(count)]
        )
        with self._adapted(tasks, counts):
            logits = self.model.forward_paged(input_ids, position_ids, cache, self.backend, None)
        each = tuple(task for task, count in zip(tasks, counts, strict=True) for _ in range(count))
        sampled, logprobs = self.pipeline.sample(logits, self.info.view(each), position_ids)
        return StepResult(sampled.tolist(), logprobs, drafts=drafts)

    def _decode(self, tasks: list[Task]) -> StepResult:
        """Run a step without chunks, which samples for every task.

        A task that decodes in two steps in a row is one token longer in the second: if it was preempted in between, it
        comes back as a chunk.
        """
        workspace = self.workspace
        cache = self.pool.bind_tasks(rows_of(tasks), [1] * len(tasks), workspace)
        input_ids = workspace.input_ids.put([task.token_ids[-1] for task in tasks])
        if tasks == self._decoding:
            position_ids = workspace.position_ids.first(len(tasks)).add_(1)
        else:
            position_ids = workspace.position_ids.put([task.computed_len for task in tasks])
            self._decoding = tasks
        with self._adapted(tasks, [1] * len(tasks)):
            logits = self.model.forward_paged(input_ids, position_ids, cache, self.backend, None)
        sampled, logprobs = self.pipeline.sample(logits, self.info.view(tuple(tasks)), position_ids)
        return StepResult(sampled.tolist(), logprobs)

    def _run_mixed(self, batch: Batch) -> StepResult:
        items, workspace = batch.items, self.workspace
        self._decoding = []
        rows = rows_of([item.task for item in items])
        cache = self.pool.bind_tasks(rows, [item.n_tokens for item in items], workspace)
        input_ids = workspace.input_ids.put(
            [token for item in items for token in item.task.token_ids[item.start : item.start + item.n_tokens]]
        )
        position_ids = workspace.position_ids.put(
            [pos for item in items for pos in range(item.start, item.start + item.n_tokens)]
        )
        plan = plan_logits(items)
        logit_rows = None if len(plan.rows) == batch.n_tokens else workspace.logit_rows.put(plan.rows)
        with self._adapted([item.task for item in items], [item.n_tokens for item in items]):
            logits = self.model.forward_paged(input_ids, position_ids, cache, self.backend, logit_rows)
        prompt_logprobs = {
            span.item - len(batch.decodes): token_logprobs(
                logits[span.first : span.first + len(span.predicted)], self._tensor(span.predicted), span.n_top
            )
            for span in plan.spans
        }
        tasks = tuple([item.task for item in items if item.samples])
        if not tasks:
            return StepResult([], [], prompt_logprobs)
        if plan.spans:
            logits = logits[self._tensor(plan.sample_at)]
        last_pos = workspace.last_pos.put([task.total_len - 1 for task in tasks])
        sampled, logprobs = self.pipeline.sample(logits, self.info.view(tasks), last_pos)
        return StepResult(sampled.tolist(), logprobs, prompt_logprobs)

    def _adapted(self, tasks: Sequence[Task], counts: Sequence[int]) -> AbstractContextManager[None]:
        """Let the model add to each task's tokens, `counts` of them, what its adapter makes of them."""
        if self.adapters is None:
            return nullcontext()
        ids = np.repeat(np.array([task.adapter_slot for task in tasks], dtype=np.int32), counts)
        return self.adapters.applied(self.workspace.adapter_ids.put(ids))

    def _tensor(self, values: object) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64).to(self.model.device, non_blocking=True)


def rows_of(tasks: Sequence[Task]) -> list[int]:
    """Return the rows of tasks that a step runs."""
    rows = [row for task in tasks if (row := task.row) is not None]
    assert len(rows) == len(tasks), "every scheduled task has a row"
    return rows


@dataclass(frozen=True)
class PromptSpan:
    """Logits of one item that predict tokens of its prompt: rows ``first ..`` of the step's logits."""

    item: int
    first: int
    predicted: tuple[int, ...]
    n_top: int


@dataclass(frozen=True)
class LogitPlan:
    """Which of the step's tokens need logits."""

    rows: list[int]
    """Tokens of the step, ascending."""
    spans: list[PromptSpan]
    sample_at: list[int]
    """For each sampling item, its index within `rows`."""


def plan_logits(items: list[BatchItem]) -> LogitPlan:
    """Find the logits that a step's items want."""
    plan = LogitPlan([], [], [])
    token = 0
    for i, item in enumerate(items):
        task, start, end = item.task, item.start, item.start + item.n_tokens
        if task.params.prompt_logprobs is not None:
            first, last = max(start, len(task.prompt_logprobs) - 1), min(end, len(task.prompt_ids) - 1)
            if first < last:
                predicted = task.prompt_ids[first + 1 : last + 1]
                plan.spans.append(PromptSpan(i, len(plan.rows), predicted, task.params.prompt_logprobs))
                plan.rows.extend(range(token + first - start, token + last - start))
        if item.samples:
            plan.sample_at.append(len(plan.rows))
            plan.rows.append(token + item.n_tokens - 1)
        token += item.n_tokens
    return plan
