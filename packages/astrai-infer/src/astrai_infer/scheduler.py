"""Who runs: admit, step, retire. No torch here.

Each step has one token budget. Running requests decode one token each; what is left of the budget goes to chunks of
prompts, oldest first, so neither starves. Memory pressure preempts the request served last and recomputes it later.

Where the executor can, a step is launched before the one before it is read. What a request will sample is then unknown
while its next step is chosen, but not where it will stand: lengths follow from the batches alone. A request that turns
out to have ended has one step too many in the queue, whose token nobody sees; its pages and its row can go to others at
once, since the device works in order.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from astrai_core.errors import EngineError, RequestError
from astrai_core.types import Completion, FinishReason, Request
from astrai_infer.call import collect_into
from astrai_infer.config import EngineConfig
from astrai_infer.outcome import advance, deliver
from astrai_infer.queue import TaskQueue
from astrai_infer.seams import AheadRunner, Launched, Pool, StepRunner
from astrai_infer.speculation import make_drafter
from astrai_infer.task import Batch, BatchItem, Delta, Task
from astrai_infer.turns import Turns

logger = logging.getLogger(__name__)

STEP_ERRORS = (RuntimeError, ValueError, IndexError, MemoryError)
"""What a step can fail with; it ends the requests of the step, and the engine goes on (rule 10)."""


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
        self._left = False
        """Whether a task lost its row since the step was begun to be chosen."""
        self.drafter = make_drafter(config)
        # Whether guesses were right decides what comes next, so a step that verifies is read before the next is chosen.
        self._ahead = executor if isinstance(executor, AheadRunner) and self.drafter is None else None
        self._flight: tuple[Batch, Launched] | None = None
        """The step that was launched and not read yet."""
        self.n_steps = 0
        self.n_preemptions = 0
        self._clock = clock
        self._last_step_s = clock()
        self.weight_version = 0
        self.paused = False
        self.work = threading.Condition()
        """Guards what is below; notified when something arrives. Never held during a step."""
        self._arrived: list[Task] = []
        self._aborted: set[str] = set()
        self.refusal: str | None = None
        """Why no request is taken; None while they are."""
        self._stepping = Turns()

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        if self.paused:
            return bool(self._aborted)
        waiting = len(self.waiting) or self._arrived or self._aborted
        return bool(self.running or waiting or self._flight)

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
            If a prompt can never fit in the KV cache, an adapter is gone, or the queue is full; no task is queued then.
        EngineError
            If no request is taken any more, see :attr:`refusal`.
        """
        for task in tasks:
            if len(task.prompt_ids) >= self.pool.capacity:
                raise RequestError(
                    f"prompt has {len(task.prompt_ids)} tokens, the KV cache holds {self.pool.capacity} for prompt "
                    "and completion; shorten it or give the cache more memory"
                )
        with self.work:
            if self.refusal is not None:
                raise EngineError(self.refusal)
            if gone := [task.adapter.name for task in tasks if task.adapter is not None and task.adapter.unloaded]:
                raise RequestError(f"adapter {gone[0]!r} is not loaded any more; load it again")
            if self.n_waiting + len(tasks) > self.config.max_waiting:
                raise RequestError(
                    f"{self.n_waiting} requests are waiting, max_waiting allows no more; try again later"
                )
            self._arrived.extend(tasks)
            self.work.notify_all()

    def pause(self) -> None:
        """Run no further step until :meth:`resume`; requests keep their pages, new ones queue up, aborted ones end."""
        with self._stepping:
            self._land()
            with self.work:
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
            tasks.extend(self._make_tasks(request, collect_into(slots)))
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
            self._land()
            if recompute:
                for task in self.running[::-1]:
                    self._preempt(task)
                self.pool.clear_prefix_cache()
            yield

    def alive(self) -> list[Task]:
        """List the tasks that have not ended; for whoever holds :meth:`between_steps` and :attr:`work`."""
        return [*self.running, *self.waiting, *self._arrived]

    def fail_all(self, error: str, refusal: str) -> None:
        """End everything with an error and refuse what comes; no request waits for ever."""
        with self._stepping:
            self._flight = None
            self.end_all(error, refusal)

    def end_all(self, error: str, refusal: str) -> None:
        """Do the same for whoever holds :meth:`between_steps`."""
        with self.work:
            self.refusal = refusal
        self._receive()
        self._retire([*self.running, *self.waiting], "error", error)

    def _step(self) -> bool:
        self._receive()
        if self.paused:
            return False
        if self._flight is not None and self._flight[0].must_be_read:
            self._land()
        batch = self._schedule()
        if not (batch.decodes or batch.chunks):
            return self._land()
        self.n_steps += 1
        try:
            if self._ahead is None:
                result = self.executor.run(batch)
            else:
                launched = self._ahead.launch(batch)
        except STEP_ERRORS as error:
            self._land()
            self._fail([item.task for item in batch.items if item.task.status != "finished"], error)
            return True
        advance(batch, self.pool)
        if self._ahead is None:
            accepted = deliver(batch, result, self.pool, self._release)
            if self.drafter is not None and accepted:
                self.drafter.counts.learn(batch, accepted)
            self._last_step_s = self._clock()
        else:
            self._land()
            self._flight = batch, launched
        return True

    def _land(self) -> bool:
        """Read the step in flight, if there is one, and hand its results out; return whether there was one."""
        if self._flight is None:
            return False
        (batch, launched), self._flight = self._flight, None
        try:
            result = launched.result()
        except STEP_ERRORS as error:  # what was launched since may build on it
            self._fail(self.running.copy(), error)
            self.pool.clear_prefix_cache()
            return True
        deliver(batch, result, self.pool, self._release)
        self._last_step_s = self._clock()
        return True

    def _fail(self, tasks: list[Task], error: Exception) -> None:
        """End the requests of a step that failed."""
        logger.error("step %d failed", self.n_steps, exc_info=error)
        first_line = str(error).partition("\n")[0]
        self._retire(tasks, "error", f"a step failed: {type(error).__name__}: {first_line}")

    def _receive(self) -> None:
        """Take over what other threads left in the inbox."""
        with self.work:
            arrived, self._arrived = self._arrived, []
            aborted, self._aborted = self._aborted, set()
        for task in arrived:
            self.waiting.push(task)
        if aborted:
            self._retire([task for task in (*self.running, *self.waiting) if task.request_id in aborted], "abort")

    def _schedule(self) -> Batch:
        """Choose the step's work and take the pages it needs."""
        decodes: list[Task] = []
        chunks: list[BatchItem] = []
        budget = self.config.max_batch_tokens
        prefilling = []
        extend = self.pool.extend
        for task in self.running.copy():
            n_tokens = len(task.token_ids) + task.pending_len
            if n_tokens == task.admitted_len:
                prefilling.append(task)
            elif task.pending_len and n_tokens >= task.end_len:
                continue  # the token that is on its way is the last one
            elif (row := task.row) is not None and (extend(row, 1) or self._make_room(task, 1)):
                decodes.append(task)
        budget -= len(decodes)
        if decodes and self.config.max_chunk_tokens is not None:
            budget = min(budget, self.config.max_chunk_tokens)
        for task in prefilling:
            n_tokens = min(task.remaining_len, budget)
            if task.row is not None and n_tokens and self._make_room(task, n_tokens):
                chunks.append(BatchItem(task, task.computed_len, n_tokens, n_tokens == task.remaining_len))
                budget -= n_tokens
        deferred: list[Task] = []
        # A deferred choice keeps its seat: nobody behind it in the queue takes the row that it will need.
        while budget and len(self.running) + len(deferred) < self.config.max_num_seqs:
            head = self.waiting.peek()
            if head is not None and self._awaits_first_choice(head):
                deferred.append(self.waiting.pop())
                continue
            if head is None or not self._admit(head):
                break
            n_tokens = min(head.remaining_len, budget)
            extended = self._make_room(head, n_tokens)
            assert extended, "admit promised room for everything the task has"
            chunks.append(BatchItem(head, head.computed_len, n_tokens, n_tokens == head.remaining_len))
            budget -= n_tokens
        for task in deferred:
            self.waiting.push(task)
        if self._left:  # what was chosen before its pages went to another
            decodes = [task for task in decodes if task.row is not None]
            chunks = [item for item in chunks if item.task.row is not None]
            self._left = False
        if self.drafter is not None and decodes and not chunks:
            return self.drafter.plan(decodes, self.pool, self.config.max_batch_tokens)
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
        namespace = self.weight_version, None if task.adapter is None else task.adapter.number
        admission = self.pool.admit(task.token_ids, namespace, match=task.params.prompt_logprobs is None)
        if admission is None:
            return False
        self.waiting.pop()
        task.row, task.computed_len = admission
        if task.n_preemptions == 0:  # what the request's own first choice computed was not there before the request
            first = task.first
            task.cached_len = task.computed_len if first is None else min(task.computed_len, first.cached_len)
        task.admitted_len = len(task.token_ids)
        task.status = "running"
        task.weight_version = self.weight_version
        insort(self.running, task, key=lambda task: task.order)
        try:
            self.executor.admit(task)
        except STEP_ERRORS as error:
            self._fail([task], error)
            return False
        return True

    def _make_room(self, task: Task, n_tokens: int) -> bool:
        """Extend a running task, preempting those served after it; return False if the task itself had to go.

        The step in flight is read first: it may end requests, and nobody is preempted whose newest token is unknown.
        """
        while task.row is not None and not self.pool.extend(task.row, n_tokens):
            if self._land():
                self._left = True
                continue
            victim = self.running[-1]
            assert len(self.running) > 1, "one request alone fits: its total length is bounded by the pool's capacity"
            self._preempt(victim)
        return task.row is not None

    def _preempt(self, task: Task) -> None:
        self._left = True
        self.n_preemptions += 1
        self._release(task)
        task.computed_len = task.draft_lag = 0
        task.n_preemptions += 1
        self.waiting.push(task)

    def _release(self, task: Task) -> None:
        assert task.row is not None, "a running task has a row"
        self.pool.release(task.row)
        task.row = None
        self.running.remove(task)

    def _retire(self, tasks: list[Task], reason: FinishReason, error: str | None = None) -> None:
        self.waiting.remove([task for task in tasks if task.row is None])
        for task in tasks:
            if task.row is not None:
                self._release(task)
            task.finish(reason, error=error)
        with ExitStack() as stack:  # it runs all, in reverse: all hear, also behind one that cannot take its answer
            for task in reversed(tasks):
                stack.callback(task.notify)
