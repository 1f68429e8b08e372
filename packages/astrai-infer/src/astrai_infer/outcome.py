"""What a step does to its tasks: when it is launched, and when its tokens are there. No torch here."""

from __future__ import annotations

from collections.abc import Callable

from astrai_core.types import TokenLogprobs
from astrai_infer.seams import Pool
from astrai_infer.task import Batch, StepResult, Task


def advance(batch: Batch, pool: Pool) -> None:
    """Note that a step was launched: what it feeds is computed for everything that is launched later."""
    for task in batch.decodes:
        task.computed_len += 1
        task.pending_len = 1
        task.draft_lag = 0
    for item in batch.chunks:
        task = item.task
        assert task.row is not None, "a task of the batch has a row"
        task.computed_len = item.start + item.n_tokens
        task.record_len = pool.record(task.row, task.token_ids, task.computed_len)
        task.pending_len = int(item.samples)
        task.draft_lag = 0


def deliver(batch: Batch, result: StepResult, pool: Pool, release: Callable[[Task], None]) -> list[int]:
    """Hand a step's results to their tasks and retire those that are done; some may have ended since the launch.

    Parameters
    ----------
    release
        Takes a finished task's row and pages back, before its caller hears of the end.

    Returns
    -------
    If the step verified: how many guesses of each decode were right.
    """
    if batch.draft_lens:
        return _deliver_verified(batch, result, pool, release)
    for i, entries in result.prompt_logprobs.items():
        batch.chunks[i].task.prompt_logprobs.extend(entries)
    sampled = zip(result.token_ids, result.logprobs, strict=True)
    record = pool.record
    # The decodes come first in the zip: when they are used up, nothing was taken from `sampled` for the chunks.
    for task, (token_id, logprobs) in zip(batch.decodes, sampled, strict=False):
        if (row := task.row) is None:
            continue  # it ended since the launch
        # Every token that is known by now was fed; the one that comes now may have been too, by a step launched since.
        n_fed = len(task.token_ids)
        if n_fed >= task.record_len:
            task.record_len = record(row, task.token_ids, n_fed)
        task.pending_len = task.computed_len - n_fed
        task.append(token_id, logprobs)
        if task.status == "finished":
            release(task)
            task.notify()
    for item in batch.chunks:
        if not item.samples:
            continue
        token_id, logprobs = next(sampled)
        if item.task.row is not None:
            _append(item.task, token_id, logprobs, release)
    return []


def _deliver_verified(batch: Batch, result: StepResult, pool: Pool, release: Callable[[Task], None]) -> list[int]:
    """Keep each task's sampled tokens up to the first that was guessed wrong.

    What is sampled after a right guess is what would have been sampled without guessing: logits and generator are
    functions of the tokens before and of the position.
    """
    at, accepted = 0, []
    for task, draft in zip(batch.decodes, result.drafts, strict=True):
        sampled = range(at, at + 1 + len(draft))
        at, n_right = sampled.stop, 0
        for i, guess in zip(sampled, (*draft, None), strict=True):
            token_id = result.token_ids[i]
            _append(task, token_id, result.logprobs[i], release)
            if token_id != guess:
                break
            n_right += 1
            if task.row is None:
                break
            task.computed_len += 1
        accepted.append(n_right)
        task.n_drafted += len(draft)
        task.n_accepted += n_right
        if task.row is not None:
            task.draft_lag = int(batch.drafts is None and n_right == len(draft) > 0)
            pool.truncate(task.row, task.computed_len)
            # Neither model computes again what is recorded.
            recorded_len = task.computed_len - task.draft_lag
            if recorded_len >= task.record_len:
                task.record_len = pool.record(task.row, task.token_ids, recorded_len)
    return accepted


def _append(task: Task, token_id: int, logprobs: TokenLogprobs | None, release: Callable[[Task], None]) -> None:
    task.pending_len = task.computed_len - len(task.token_ids)
    task.append(token_id, logprobs)
    if task.status == "finished":
        release(task)
        task.notify()
