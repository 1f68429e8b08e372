"""The device's executor when steps fail, requests leave, and many prompts come at once (rules 7, 9, 10), on a CPU."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar
from weakref import WeakSet

import pytest
import torch

from astrai_core import SamplingParams
from astrai_core.types import Request
from astrai_infer import InferenceEngine
from astrai_infer.runtime.device import DeviceExecutor
from astrai_infer.runtime.graph import CudaCapture, CudaGraphContext
from astrai_infer.runtime.packed import Packed, Staging
from astrai_infer.runtime.shapes import MOST_CHUNKS
from astrai_infer.scheduler import InferenceScheduler
from astrai_infer.task import Task
from astrai_infer.testing import small_engine, tiny_model


def device_engine(**config: Any) -> InferenceEngine:
    """An engine whose executor is the device's, with tables that follow the host's only by what a step sends along."""
    engine = small_engine(tiny_model(), **config)
    executor = DeviceExecutor(
        engine.model,
        engine.pool,
        engine.scheduler.executor.backend,
        engine.config.max_num_seqs,
        engine.config.max_batch_tokens,
        None,
    )
    for group in engine.pool.groups:
        group.req_to_token.table = group.req_to_token.table.clone()
    engine._executor = executor
    engine.scheduler = InferenceScheduler(engine.config, engine.pool, executor, engine.tasks.make)
    return engine


def request(i: int, n_tokens: int = 12, prompt_len: int | None = None) -> Request:
    length = 3 + 5 * i % 17 if prompt_len is None else prompt_len
    params = SamplingParams(max_tokens=n_tokens, temperature=0.0 if i % 2 else 0.8, seed=i, ignore_eos=True)
    return Request(prompt_token_ids=tuple(range(i, i + length)), params=params, request_id=str(i))


def alone(requests: list[Request]) -> dict[str, tuple[int, ...]]:
    """Each request's tokens in a plain engine."""
    with small_engine(tiny_model(), max_num_seqs=1) as engine:
        return {done.request_id: tuple(done.token_ids) for done in engine.scheduler.run_batch(requests)}


def submit(engine: InferenceEngine, asked: Request, told: list[Any]) -> list[Task]:
    tasks: list[Task] = engine.tasks.make(asked, told.append)
    engine.scheduler.submit(tasks)
    return tasks


def test_inputs_of_a_failed_step_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 10: a step that fails behind the copy of its inputs leaves that copy in the queue, and the memory that it reads
    is filled anew only when it has ended."""
    engine = device_engine(max_num_seqs=3, max_batch_tokens=24)
    log: list[tuple[str, int]] = []
    send, record, take = Packed.send, Staging.record, Packed.next

    def logged_send(packed: Packed, staging: Staging, *rest: Any) -> Any:
        log.append(("send", id(staging)))
        return send(packed, staging, *rest)

    def logged_record(staging: Staging) -> None:
        log.append(("record", id(staging)))
        record(staging)

    def logged_next(packed: Packed) -> Staging:
        staging = take(packed)
        log.append(("next", id(staging)))
        return staging

    for owner, name, logged in (
        (Packed, "send", logged_send),
        (Packed, "next", logged_next),
        (Staging, "record", logged_record),
    ):
        monkeypatch.setattr(owner, name, logged)
    forward, n_calls = engine.model.forward_paged, 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        if n_calls % 4 == 0:
            raise RuntimeError("scripted failure of a launch")
        return forward(*args, **kwargs)

    monkeypatch.setattr(engine.model, "forward_paged", failing)
    told: list[Any] = []
    for i in range(12):
        submit(engine, request(i), told)
    while engine.scheduler.step():
        pass
    assert len([delta for delta in told if delta.completion]) == 12
    sent: set[int] = set()
    n_reused = 0
    for what, staging in log:
        if what == "next":
            assert staging not in sent, "memory is filled while a copy may read it"
            n_reused += 1
        elif what == "send":
            sent.add(staging)
        else:
            sent.discard(staging)
    assert n_calls >= 8 and n_reused > 8
    engine.close()


def test_after_a_failed_step_others_get_their_answers() -> None:
    """Rule 10: tokens on the device, tables and rows of the failed step's requests reach nobody else."""
    requests = [request(i) for i in range(8)]
    expected = alone(requests)
    engine = device_engine(max_num_seqs=3, max_batch_tokens=24)
    forward, n_calls = engine.model.forward_paged, 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        if n_calls in (3, 9):
            raise RuntimeError("scripted failure of a launch")
        return forward(*args, **kwargs)

    engine.model.forward_paged = failing
    told: list[Any] = []
    for asked in requests:
        submit(engine, asked, told)
    while engine.scheduler.step():
        pass
    done = [delta.completion for delta in told if delta.completion]
    assert len(done) == 8
    answered = [completion for completion in done if completion.error is None]
    assert 0 < len(answered) < 8
    for completion in answered:
        assert tuple(completion.token_ids) == expected[completion.request_id]
    assert engine.pool.n_used == 0
    engine.close()


@pytest.mark.parametrize("seed", range(3))
def test_rows_of_aborted_requests_leave_no_token_behind(seed: int) -> None:
    """Rule 7: requests leave at random while a step with them is in flight; who gets their rows and pages answers right."""
    chance = random.Random(seed)
    requests = [request(i, n_tokens=chance.randint(2, 20)) for i in range(14)]
    expected = alone(requests)
    engine = device_engine(max_num_seqs=3, max_batch_tokens=16, prefix_cache=False)
    told: list[Any] = []
    waiting, aborted = list(requests), set()
    while engine.scheduler.step() or waiting:
        if waiting and chance.random() < 0.5:
            submit(engine, waiting.pop(0), told)
        if engine.scheduler.running and chance.random() < 0.15:
            gone = chance.choice(engine.scheduler.running).request_id
            engine.scheduler.abort(gone)
            aborted.add(gone)
    done = {delta.completion.request_id: delta.completion for delta in told if delta.completion}
    assert len(done) == 14 and aborted
    for name, completion in done.items():
        tokens = tuple(completion.token_ids)
        if completion.finish_reason == "abort":
            assert name in aborted
            tokens = (*tokens, *expected[name][len(tokens) :])
        assert tokens == expected[name]
    assert engine.pool.n_used == 0
    engine.close()


def test_more_chunks_than_any_bucket_has() -> None:
    """Rule 9: out of range a step runs as it is, and answers as ever."""
    requests = [request(i, n_tokens=6, prompt_len=2 + i % 5) for i in range(MOST_CHUNKS + 5)]
    expected = alone(requests)
    engine = device_engine(max_num_seqs=len(requests), max_batch_tokens=200)
    launch, n_chunks = engine._executor.launch, []

    def counted(batch: Any) -> Any:
        n_chunks.append(len(batch.chunks))
        return launch(batch)

    engine._executor.launch = counted
    for done in engine.scheduler.run_batch(requests):
        assert tuple(done.token_ids) == expected[done.request_id]
    assert max(n_chunks) > MOST_CHUNKS
    engine.close()


def test_a_request_that_there_is_no_memory_to_admit_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 10: the first request with penalties allocates their history, and running out of memory there costs it alone."""
    requests = [request(i) for i in range(5)]
    expected = alone(requests)
    engine = device_engine(max_num_seqs=3, max_batch_tokens=24)
    admit = engine._executor.admit

    def short_of_memory(task: Task) -> None:
        if task.request_id == "2":
            raise torch.OutOfMemoryError("scripted")
        admit(task)

    monkeypatch.setattr(engine._executor, "admit", short_of_memory)
    told: list[Any] = []
    for asked in requests:
        submit(engine, asked, told)
    while engine.scheduler.has_work:
        engine.scheduler.step()
    done = {delta.completion.request_id: delta.completion for delta in told if delta.completion}
    assert done.pop("2").error == "a step failed: OutOfMemoryError: scripted"
    assert {name: tuple(completion.token_ids) for name, completion in done.items()} == {
        name: tokens for name, tokens in expected.items() if name != "2"
    }
    assert engine.pool.n_used == 0
    engine.close()


class Graph:
    """Stands in for torch.cuda.CUDAGraph."""

    alive: ClassVar[WeakSet[Graph]] = WeakSet()

    def __init__(self) -> None:
        Graph.alive.add(self)

    def replay(self) -> None: ...


@dataclass
class Captures:
    """What was captured, with stand-ins for whatever needs a device."""

    pools: list[int] = field(default_factory=list)
    """The pool of each."""
    failing: int | None = None
    """The one that there is no memory for."""


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Captures:
    found, handles = Captures(), iter(range(100))

    @contextmanager
    def capturing(graph: Graph, pool: int, **_: Any) -> Iterator[None]:
        found.pools.append(pool)
        if len(found.pools) - 1 == found.failing:
            raise torch.OutOfMemoryError("scripted")
        yield

    for name, stand_in in (
        ("Stream", lambda device: None),
        ("graph_pool_handle", lambda: next(handles)),
        ("CUDAGraph", Graph),
        ("graph", capturing),
    ):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return found


def capture_all(context: CudaGraphContext, keys: str) -> None:
    """Do work of each key twice: the second time it is captured."""
    for key in keys:
        for _ in range(2):
            context.run(key, lambda: None)
    gc.collect()


def test_graphs_share_a_pool_until_all_are_gone(captures: Captures) -> None:
    """G1: after a sleep, what is captured anew has a pool of its own: torch asserts that a shared one has a graph."""
    context = CudaGraphContext(CudaCapture(torch.device("cpu")))
    for _ in range(2):
        capture_all(context, "ab")
        context.forget()
    assert captures.pools == [0, 0, 1, 1]


def test_a_graph_that_failed_stays_as_long_as_the_others(captures: Captures) -> None:
    """Rule 10: torch frees the workspaces of a stream with each graph captured on it, and the others still use them."""
    context = CudaGraphContext(CudaCapture(torch.device("cpu")))
    captures.failing = 1
    capture_all(context, "abc")
    assert [context.has_graph(key) for key in "abc"] == [True, False, True]
    assert len(Graph.alive) == 3
    context.forget()
    capture_all(context, "a")
    assert captures.pools == [0, 0, 0, 1]
    assert len(Graph.alive) == 1, "the graph that failed went with the others"
