"""The draft model beside the plain executor: it keeps up with what is fed, and guesses what comes next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, chain

from torch import Tensor

from astrai_core.attention.backend import AttentionBackend
from astrai_core.model.transformer import CausalLM
from astrai_infer.cache.pool import PagePool
from astrai_infer.runtime.workspace import InferenceWorkspace
from astrai_infer.sampling.pipeline import SamplingPipeline
from astrai_infer.task import BatchItem, Task

DRAFT = 1
"""The draft model's storage in the pool; the model's own is 0."""


class DraftRunner:
    """Owns the draft model's side of a step.

    Its keys and values lie in the slots of the model's own, in a storage beside it, so pages, tables and lengths serve
    both. It has been fed what the model has been fed, but for the newest ``task.draft_lag`` tokens.

    A guess is drawn as the model will draw: with the request's parameters, its seed and the position. Where the two give
    nearly the same distribution they thus nearly always give the same token.
    """

    def __init__(
        self,
        model: CausalLM,
        pool: PagePool,
        backend: AttentionBackend,
        pipeline: SamplingPipeline,
        max_tokens: int,
    ) -> None:
        self.model = model
        self._pool = pool
        self._backend = backend
        self._pipeline = pipeline
        # Each row may be one token behind.
        self._workspace = InferenceWorkspace(max_tokens + pool.n_rows, pool.n_rows, model.device, len(pool.groups))

    def follow(self, items: Sequence[BatchItem]) -> None:
        """Feed what a step with chunks feeds."""
        items = catching_up(items)
        tokens = [item.task.token_ids[item.start : item.start + item.n_tokens] for item in items]
        self._feed([item.task for item in items], [item.start for item in items], tokens, [])

    def guess(self, tasks: list[Task], lens: list[int]) -> list[tuple[int, ...]]:
        """Feed each task's newest token and guess ``lens[i]`` of those that follow.

        All tasks are fed, also those without guesses: what is in the model's cache is in this one's too.
        """
        guesses: list[list[int]] = [[] for _ in tasks]
        starts = [task.computed_len - task.draft_lag for task in tasks]
        tokens = [task.token_ids[start:] for task, start in zip(tasks, starts, strict=True)]
        fed = list(range(len(tasks)))
        for depth in range(max(1, *lens)):
            guessing = [i for i in fed if lens[i] > depth]
            ends = accumulate(len(tokens[i]) for i in fed)
            logits = self._feed(
                [tasks[i] for i in fed],
                [starts[i] for i in fed],
                [tokens[i] for i in fed],
                [end - 1 for i, end in zip(fed, ends, strict=True) if lens[i] > depth],
            )
            if not guessing:
                break
            positions = self._workspace.last_pos.put([tasks[i].computed_len + depth for i in guessing])
            view = self._pipeline.info.view(tuple(tasks[i] for i in guessing))
            sampled, _ = self._pipeline.sample(logits, replace(view, any_logprobs=False), positions)
            for i, token in zip(guessing, sampled.tolist(), strict=True):
                guesses[i].append(token)
                tokens[i], starts[i] = [token], tasks[i].computed_len + depth + 1
            fed = [i for i in guessing if lens[i] > depth + 1]
        return [tuple(each) for each in guesses]

    def _feed(self, tasks: list[Task], starts: list[int], tokens: list[list[int]], logit_rows: list[int]) -> Tensor:
        """Write the tokens' keys and values; return the logits ``[len(logit_rows), vocab]``."""
        workspace = self._workspace
        q_lens = [len(ids) for ids in tokens]
        ends = [start + n for start, n in zip(starts, q_lens, strict=True)]
        rows = [task.row for task in tasks if task.row is not None]
        cache = self._pool.bind_tasks(rows, q_lens, workspace, ends, DRAFT)
        input_ids = workspace.input_ids.put(list(chain.from_iterable(tokens)))
        position_ids = workspace.position_ids.put(
            list(chain.from_iterable(range(start, end) for start, end in zip(starts, ends, strict=True)))
        )
        wanted = workspace.logit_rows.put(logit_rows)
        return self.model.forward_paged(input_ids, position_ids, cache, self._backend, wanted)


def catching_up(items: Sequence[BatchItem]) -> list[BatchItem]:
    """Return what the draft model is fed in a step with these items, so that it has been fed all; it samples nothing."""
    return [
        BatchItem(item.task, item.start - item.task.draft_lag, item.n_tokens + item.task.draft_lag, False)
        for item in items
    ]
