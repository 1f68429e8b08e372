"""Guesses of what comes next, without a model. No torch here."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from astrai_core.types import SamplingParams
from astrai_infer.seams import Pool
from astrai_infer.task import Task

LONGEST, SHORTEST = 4, 2
"""Tokens that must have come before in the same order (prompt lookup decoding; A. Saxena 2023)."""


def can_verify(params: SamplingParams) -> bool:
    """Whether several tokens of a request can be sampled in one step: penalties and rules depend on the tokens before."""
    ruled = params.min_tokens or params.structured or params.logit_bias or params.allowed_token_ids is not None
    return not (params.counts_history or ruled)


class _Index:
    """Where each run of tokens of one task ended last, and how many guesses are worth making."""

    def __init__(self, n_guesses: int) -> None:
        self.ends: dict[tuple[int, ...], int] = {}
        self.n_indexed = SHORTEST
        self.n_guesses = n_guesses
        self.expected: tuple[int, tuple[int, ...]] = (0, ())
        """Length of the sequence when the last guesses were made, and the guesses."""


class NgramDrafter:
    """Guesses that what followed the newest tokens when they came before follows again.

    Parameters
    ----------
    most
        Guesses for a request in a step. A request whose guesses were all wrong gets half as many the next time, at least
        one; one whose guesses were all right twice as many.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._indices: WeakKeyDictionary[Task, _Index] = WeakKeyDictionary()

    def draft(self, decodes: list[Task], pool: Pool, most: int) -> list[tuple[int, ...]]:
        """Guess for each decoding task, and give it slots for the guesses.

        Parameters
        ----------
        most
            Guesses of all together.
        """
        drafts = []
        for task in decodes:
            assert task.row is not None, "a task of the batch has a row"
            guesses = self.propose(task, min(most, task.end_len - task.total_len - 1))
            if guesses and not pool.extend(task.row, len(guesses)):
                guesses = ()
            most -= len(guesses)
            drafts.append(guesses)
        return drafts

    def propose(self, task: Task, limit: int) -> tuple[int, ...]:
        """Return at most `limit` guesses for a task whose tokens are all known; none where they could not be verified."""
        if limit < 1 or not can_verify(task.params):
            return ()
        index = self._indices.get(task)
        if index is None:
            index = self._indices[task] = _Index(self._most)
        tokens = task.token_ids
        self._learn(index, tokens)
        for end in range(index.n_indexed, len(tokens)):
            for n in range(SHORTEST, min(LONGEST, end) + 1):
                index.ends[tuple(tokens[end - n : end])] = end
        index.n_indexed = max(index.n_indexed, len(tokens))
        for n in range(min(LONGEST, len(tokens) - 1), SHORTEST - 1, -1):
            begin = index.ends.get(tuple(tokens[-n:]))
            if begin is not None:
                guesses = tuple(tokens[begin : begin + min(limit, index.n_guesses)])
                index.expected = len(tokens), guesses
                return guesses
        index.expected = len(tokens), ()
        return ()

    def _learn(self, index: _Index, tokens: list[int]) -> None:
        """Compare the last guesses with what came."""
        length, guesses = index.expected
        if not guesses:
            return
        came = tuple(tokens[length : length + len(guesses)])
        if came == guesses:
            index.n_guesses = min(2 * index.n_guesses, self._most)
        elif came[:1] != guesses[:1]:
            index.n_guesses = max(index.n_guesses // 2, 1)
