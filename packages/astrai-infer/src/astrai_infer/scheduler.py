"""Who runs: admit, step, retire. No torch here.

Each step has one token budget. Running requests decode one token each; what is left of the budget goes to chunks of
prompts, oldest first, so neither starves. Memory pressure preempts the request served last and recomputes it later.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import insort
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from astrai_core.errors import EngineError, RequestError
from astrai_core.types import Completion, Request
from astrai_infer.config import EngineConfig
from astrai_infer.queue import TaskQueue
from astrai_infer.task import Batch, BatchItem, Delta, StepResult, Task

logger = logging.getLogger(__name__)


class Pool(Protocol):
    """What the scheduler asks of the KV pool (:class:`astrai_infer.cache.pool.PagePool`)."""

    @property
    def page_size(self) -> int: ...
    @property
    def prefix(self) -> object | None: ...
    @property
    def capacity(self) -> int: ...
    def admit(self, token_ids: Sequence[int], namespace: Hashable, *, match: bool) -> tuple[int, int] | None: ...
    def record(self, row: int, token_ids: Sequence[int], computed_len: int) -> int: ...
    def extend(self, row: int, n_tokens: int) -> bool: ...
    def release(self, row: int) -> None: ...
    def clear_prefix_cache(self) -> None: ...


class StepRunner(Protocol):
    """What the scheduler asks of the executor (:class:`astrai_infer.runtime.executor.Executor`)."""

    def admit(self, task: Task) -> None: ...
    def run(self, batch: Batch) -> StepResult: ...


class InferenceScheduler:
    """Drives tasks through the executor. One :meth:`_step` serves the engine's loop and :meth:`run_batch` (row S1).

    Parameters
    ----------
    make_tasks
        Turns a request into its n tasks; raises RequestError for one that can never be served.
    clock
        Seconds, monotonic.
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: Pool,
        executor: StepRunner,
        make_tasks: Callable[[Request, Callable[[Delta], None]], list[Task]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.pool = pool
        self.executor = executor
        self._make_tasks = make_tasks
        self.waiting = TaskQueue()
        self.running: list[Task] = []
        """In the order in which they are served; the last is preempted first."""
        self._preempted = False
        self.n_steps = 0
        self.n_preemptions = 0
        self._clock = clock
        self._last_step_s = clock()
        self.weight_version = 0
        self.paused = False
        self.work = threading.Condition()
        """Guards the inbox below; notified when something arrives. Never held during a step."""
        self._arrived: list[Task] = []
        self._aborted: set[str] = set()
        self._stepping = threading.Lock()

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return not self.paused and bool(self.running or len(self.waiting) or self._arrived or self._aborted)

    @property
    def n_waiting(self) -> int:
        """Tasks that are not admitted."""
        return len(self.waiting) + len(self._arrived)

    @property
    def seconds_since_step(self) -> float:
        """Seconds since the last step ended, or since the start."""
        return self._clock() - self._last_step_s

    def submit(self, tasks: Sequence[Task]) -> None:
        """Queue tasks; any thread may call this.

        Raises
        ------
        RequestError
            If a prompt can never fit in the KV cache, or the queue is full; none of the tasks is queued then.
        """
        for task in tasks:
            if len(task.prompt_ids) >= self.pool.capacity:
                raise RequestError(
                    f"prompt has {len(task.prompt_ids)} tokens, the KV cache holds {self.pool.capacity} for prompt "
                    "and completion; shorten it or give the cache more memory"
                )
        with self.work:
            if self.n_waiting + len(tasks) > self.config.max_waiting:
                raise RequestError(
                    f"{self.n_waiting} requests are waiting, max_waiting allows no more; try again later"
                )
            self._arrived.extend(tasks)
            self.work.notify_all()

    def pause(self) -> None:
        """Run no further step until :meth:`resume`; requests keep their pages and new ones queue up."""
        with self._stepping, self.work:
            self.paused = True

    def resume(self) -> None:
        """Go on after :meth:`pause`."""
        with self.work:
            self.paused = False
            self.work.notify_all()

    def abort(self, request_id: str) -> None:
        """End all choices of a request before the next step; any thread may call this. Idempotent."""
        with self.work:
            self._aborted.add(request_id)
            self.work.notify_all()

    def run_batch(self, requests: Sequence[Request]) -> list[Completion]:
        """Complete all requests in the calling thread, in the order given (n choices in a row each).

        Raises
        ------
        RequestError
            If one of them can never be served; nothing runs then.
        EngineError
            If the engine is paused, or a step failed.
        """
        if self.paused:
            raise EngineError("the engine is paused; resume it first")
        done: list[list[Completion | None]] = []
        tasks: list[Task] = []
        for request in requests:
            slots: list[Completion | None] = [None] * request.params.n
            done.append(slots)
            tasks.extend(self._make_tasks(request, _collect_into(slots)))
        self.submit(tasks)
        while not all(completion is not None for slots in done for completion in slots):
            if not self.step():
                with self.work:
                    self.work.wait_for(lambda: not self.paused)
        completions = [completion for slots in done for completion in slots if completion is not None]
        for completion in completions:
            if completion.error is not None:
                raise EngineError(completion.error)
        return completions

    def step(self) -> bool:
        """Run one step; return whether there was anything to do."""
        with self._stepping:
            return self._step()

    @contextmanager
    def between_steps(self, *, recompute: bool) -> Iterator[None]:
        """Hold the next step back while the body runs.

        Parameters
        ----------
        recompute
            Send every running request back to the queue first and empty the prefix cache: no key or value computed so
            far is used again. Tokens already sampled stay.
        """
        with self._stepping:
            if recompute:
                for task in self.running[::-1]:
                    self._preempt(task)
                self.pool.clear_prefix_cache()
            yield

    def fail_all(self, error: str) -> None:
        """End everything with an error; no request waits for ever."""
        with self._stepping:
            self._receive()
            self._retire([*self.running, *self.waiting], error)

    def _step(self) -> bool:
        if self.paused:
            return False
        self._receive()
        batch = self._schedule()
        if not (batch.decodes or batch.chunks):
            return False
        self.n_steps += 1
        try:
            result = self.executor.run(batch)
        except (RuntimeError, ValueError, IndexError, MemoryError) as error:
            logger.exception("step %d failed", self.n_steps)
            first_line = str(error).partition("\n")[0]
            self._retire([item.task for item in batch.items], f"a step failed: {type(error).__name__}: {first_line}")
            return True
        self._process(batch, result)
        self._last_step_s = self._clock()
        return True

    def _receive(self) -> None:
        """Take over what other threads left in the inbox."""
        with self.work:
            arrived, self._arrived = self._arrived, []
            aborted, self._aborted = self._aborted, set()
        for task in arrived:
            self.waiting.push(task)
        if not aborted:
            return
        for task in [task for task in self.running if task.request_id in aborted]:
            self._release(task)
            task.finish("abort")
            task.notify()
        dropped = [task for task in self.waiting if task.request_id in aborted]
        self.waiting.remove(dropped)
        for task in dropped:
            task.finish("abort")
            task.notify()

    def _schedule(self) -> Batch:
        """Choose the step's work and take the pages it needs."""
        decodes: list[Task] = []
        chunks: list[BatchItem] = []
        budget = self.config.max_batch_tokens
        prefilling = []
        extend = self.pool.extend
        for task in self.running.copy():
            if len(task.token_ids) - task.computed_len > 1:
                prefilling.append(task)
            elif (row := task.row) is not None and (extend(row, 1) or self._make_room(task, 1)):
                decodes.append(task)
        budget -= len(decodes)
        for task in prefilling:
            n_tokens = min(task.remaining_len, budget)
            if task.row is not None and n_tokens and self._make_room(task, n_tokens):
                chunks.append(BatchItem(task, task.computed_len, n_tokens, n_tokens == task.remaining_len))
                budget -= n_tokens
        deferred: list[Task] = []
        while budget and (head := self.waiting.peek()) is not None:
            if self._awaits_first_choice(head):
                deferred.append(self.waiting.pop())
                continue
            # A deferred choice keeps its seat: nobody behind it in the queue takes the row that it will need.
            if len(self.running) + len(deferred) >= self.config.max_num_seqs or not self._admit(head):
                break
            n_tokens = min(head.remaining_len, budget)
            extended = self._make_room(head, n_tokens)
            assert extended, "admit promised room for everything the task has"
            chunks.append(BatchItem(head, head.computed_len, n_tokens, n_tokens == head.remaining_len))
            budget -= n_tokens
        for task in deferred:
            self.waiting.push(task)
        if self._preempted:  # what was chosen before its pages went to another
            decodes = [task for task in decodes if task.row is not None]
            chunks = [item for item in chunks if item.task.row is not None]
            self._preempted = False
        chunks.sort(key=lambda item: item.n_tokens > 1)
        return Batch(decodes, chunks)

    def _awaits_first_choice(self, task: Task) -> bool:
        """Whether the first choice of its request is still computing prompt pages that this one will find.

        So n choices compute their prompt once. A first choice that waits itself stands before the others in the queue.
        """
        first, pool = task.first, self.pool
        if first is None or first.row is None or pool.prefix is None or task.params.prompt_logprobs is not None:
            return False
        return first.computed_len < (len(task.prompt_ids) - 1) // pool.page_size * pool.page_size

    def _admit(self, task: Task) -> bool:
        """Move the first waiting task to the running ones if there is room for all it has."""
        admission = self.pool.admit(
            task.token_ids, (self.weight_version, None), match=task.params.prompt_logprobs is None
        )
        if admission is None:
            return False
        self.waiting.pop()
        task.row, task.computed_len = admission
        if task.n_preemptions == 0:  # what the request's own first choice computed was not there before the request
            first = task.first
            task.cached_len = task.computed_len if first is None else min(task.computed_len, first.cached_len)
        task.status = "running"
        task.weight_version = self.weight_version
        self.executor.admit(task)
        insort(self.running, task, key=lambda task: task.order)
        return True

    def _make_room(self, task: Task, n_tokens: int) -> bool:
        """Extend a running task, preempting those served after it; return False if the task itself had to go."""
        assert task.row is not None, "a running task has a row"
        while not self.pool.extend(task.row, n_tokens):
            victim = self.running[-1]
            assert len(self.running) > 1, "one request alone fits: its total length is bounded by the pool's capacity"
            self._preempt(victim)
            if victim is task:
                return False
        return True

    def _preempt(self, task: Task) -> None:
        self._preempted = True
        self.n_preemptions += 1
        self._release(task)
        task.computed_len = 0
        task.n_preemptions += 1
        self.waiting.push(task)

    def _release(self, task: Task) -> None:
        assert task.row is not None, "a running task has a row"
        self.pool.release(task.row)
        task.row = None
        self.running.remove(task)

    def _process(self, batch: Batch, result: StepResult) -> None:
        """Hand the step's results to their tasks and retire those that are done."""
        for i, entries in result.prompt_logprobs.items():
            batch.chunks[i].task.prompt_logprobs.extend(entries)
        sampled = zip(result.token_ids, result.logprobs, strict=True)
        record = self.pool.record
        # The decodes come first in the zip: when they are used up, nothing was taken from `sampled` for the chunks.
        for task, (token_id, logprobs) in zip(batch.decodes, sampled, strict=False):
            assert task.row is not None, "a task of the batch has a row"
            task.computed_len += 1
            if task.computed_len >= task.record_len:
                task.record_len = record(task.row, task.token_ids, task.computed_len)
            task.append(token_id, logprobs)
            if task.status == "finished":
                self._release(task)
                task.notify()
        for item in batch.chunks:
            task = item.task
            assert task.row is not None, "a task of the batch has a row"
            task.computed_len = item.start + item.n_tokens
            task.record_len = record(task.row, task.token_ids, task.computed_len)
            if item.samples:
                task.append(*next(sampled))
                if task.status == "finished":
                    self._release(task)
                    task.notify()

    def _retire(self, tasks: list[Task], error: str) -> None:
        waiting = [task for task in tasks if task.row is None]
        self.waiting.remove(waiting)
        for task in tasks:
            if task.row is not None:
                self._release(task)
            task.finish("error", error=error)
            task.notify()


def _collect_into(slots: list[Completion | None]) -> Callable[[Delta], None]:
    def on_delta(delta: Delta) -> None:
        if delta.completion is not None:
            slots[delta.choice] = delta.completion

    return on_delta
