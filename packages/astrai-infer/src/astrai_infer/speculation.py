"""Guesses of what comes next: how many, and those that need no model. No torch here."""

from __future__ import annotations

from typing import Protocol
from weakref import WeakKeyDictionary

from astrai_core.types import SamplingParams
from astrai_infer.config import EngineConfig
from astrai_infer.seams import Pool
from astrai_infer.task import Batch, Task

LONGEST, SHORTEST = 4, 2
"""Tokens that must have come before in the same order (prompt lookup decoding; A. Saxena 2023)."""


def can_verify(params: SamplingParams) -> bool:
    """Whether several tokens of a request can be sampled in one step: penalties and rules depend on the tokens before."""
    ruled = params.min_tokens or params.structured or params.logit_bias or params.allowed_token_ids is not None
    return not (params.counts_history or ruled)


class Drafter(Protocol):
    """Plans the steps that verify guesses."""

    counts: GuessCounts

    def plan(self, decodes: list[Task], pool: Pool, max_tokens: int) -> Batch:
        """Make a step of decoding tasks, and give them slots for their guesses: all together are at most `max_tokens`, and
        no more than the pool has rows."""
        ...


class GuessCounts:
    """How many guesses are worth making for each task, and how they went.

    A task whose guesses were all wrong gets half as many the next time, at least one; one whose guesses were all right
    twice as many.

    Parameters
    ----------
    most
        Guesses for a task in a step.

    Attributes
    ----------
    n_drafts
        Times that a task had guesses in a step.
    n_drafted, n_accepted
        Guesses made, and those that were right.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._worth: WeakKeyDictionary[Task, int] = WeakKeyDictionary()
        self.n_drafts = self.n_drafted = self.n_accepted = 0

    def limit(self, task: Task) -> int:
        """Most guesses for a task in its next step: none where they could not be verified, or would lie behind its end."""
        if not can_verify(task.params):
            return 0
        return max(min(self._worth.get(task, self._most), task.end_len - task.total_len - 1), 0)

    def learn(self, batch: Batch, accepted: list[int]) -> None:
        """Take note of how many guesses of a step were right."""
        for task, n_drafted, n_accepted in zip(batch.decodes, batch.draft_lens, accepted, strict=True):
            if n_drafted:
                self.n_drafts += 1
                self.n_drafted += n_drafted
                self.n_accepted += n_accepted
                worth = self._worth.get(task, self._most)
                if n_accepted == n_drafted:
                    self._worth[task] = min(2 * worth, self._most)
                elif n_accepted == 0:
                    self._worth[task] = max(worth // 2, 1)


class ModelDrafter:
    """Leaves the guessing to the executor's draft model; decides how much of it there is.

    The step's rows are shared evenly: with many requests, each has few guesses.
    """

    def __init__(self, most: int) -> None:
        self.counts = GuessCounts(most)

    def plan(self, decodes: list[Task], pool: Pool, max_tokens: int) -> Batch:
        """See :class:`Drafter`."""
        most = min(pool.n_rows, max_tokens) - len(decodes)
        limits = [self.counts.limit(task) for task in decodes]
        lens = [0] * len(decodes)
        for share in range(max(limits)):
            for i, limit in enumerate(limits):
                if limit > share and most:
                    lens[i] += 1
                    most -= 1
        for i, task in enumerate(decodes):
            assert task.row is not None, "a task of the batch has a row"
            if lens[i] and not pool.extend(task.row, lens[i]):
                lens[i] = 0
        return Batch(decodes, [], lens)


class _Index:
    """Where each run of tokens of one task ended last."""

    def __init__(self) -> None:
        self.ends: dict[tuple[int, ...], int] = {}
        self.n_indexed = SHORTEST


class NgramDrafter:
    """Guesses that what followed the newest tokens when they came before follows again."""

    def __init__(self, most: int) -> None:
        self.counts = GuessCounts(most)
        self._indices: WeakKeyDictionary[Task, _Index] = WeakKeyDictionary()

    def plan(self, decodes: list[Task], pool: Pool, max_tokens: int) -> Batch:
        """See :class:`Drafter`."""
        most = min(pool.n_rows, max_tokens) - len(decodes)
        drafts = []
        for task in decodes:
            assert task.row is not None, "a task of the batch has a row"
            guesses = self.propose(task, min(most, self.counts.limit(task)))
            if guesses and not pool.extend(task.row, len(guesses)):
                guesses = ()
            most -= len(guesses)
            drafts.append(guesses)
        return Batch(decodes, [], [len(guesses) for guesses in drafts], drafts)

    def propose(self, task: Task, limit: int) -> tuple[int, ...]:
        """Return at most `limit` guesses for a task whose tokens are all known."""
        if limit < 1:
            return ()
        index = self._indices.get(task)
        if index is None:
            index = self._indices[task] = _Index()
        tokens = task.token_ids
        for end in range(index.n_indexed, len(tokens)):
            for n in range(SHORTEST, min(LONGEST, end) + 1):
                index.ends[tuple(tokens[end - n : end])] = end
        index.n_indexed = max(index.n_indexed, len(tokens))
        for n in range(min(LONGEST, len(tokens) - 1), SHORTEST - 1, -1):
            begin = index.ends.get(tuple(tokens[-n:]))
            if begin is not None:
                return tuple(tokens[begin : begin + limit])
        return ()


def make_drafter(config: EngineConfig) -> Drafter | None:
    """Return what plans the steps of an engine that guesses."""
    if config.speculation is None:
        return None
    return (
        NgramDrafter(config.max_draft_tokens)
        if config.speculation == "ngram"
        else ModelDrafter(config.max_draft_tokens)
    )
