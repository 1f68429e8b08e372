"""What other threads and event loops do at the wrong moment (inference rules 7, 10, 12); nothing here waits for luck."""

from __future__ import annotations

import asyncio
import queue
import threading
from typing import Any

import pytest

from astrai_core import SamplingParams
from astrai_core.errors import EngineError
from astrai_core.types import Request
from astrai_infer import InferenceEngine
from astrai_infer import engine as engine_module
from astrai_infer import turns as turns_module
from astrai_infer.task import Delta
from astrai_infer.testing import ScriptedModel, small_engine
from astrai_infer.turns import Turns

GREEDY = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)


def engine_of_as(**config: Any) -> InferenceEngine:
    return small_engine(ScriptedModel(lambda token, position: 65), **config)


def thread(work: Any) -> threading.Thread:
    started = threading.Thread(target=work, daemon=True)
    started.start()
    return started


def test_turns_go_round():
    """Who waits is next, also if the thread that held them wants them again at once."""
    turns, order = Turns(), []

    def take(name: str) -> None:
        with turns:
            order.append(name)

    with turns:
        first = thread(lambda: take("first"))
        while turns.n_waiting < 1:
            pass
        second = thread(lambda: take("second"))
        while turns.n_waiting < 2:
            pass
    take("again")
    first.join()
    second.join()
    assert order == ["first", "second", "again"]


@pytest.mark.parametrize("has_come", [False, True], ids=["before", "after"])
def test_an_interrupt_while_waiting_loses_no_turn(has_come, monkeypatch):
    """Whether it comes before the turn or just after it, the next one gets in."""
    turns = Turns()
    release = threading.Event()
    lock = threading.Lock

    class Interrupted:
        def __init__(self) -> None:
            self.lock, self.n = lock(), 0

        def acquire(self) -> None:
            self.n += 1
            if self.n == 2:
                if has_come:
                    release.set()
                    self.lock.acquire()
                raise KeyboardInterrupt
            self.lock.acquire()

        def release(self) -> None:
            self.lock.release()

    def hold() -> None:
        with turns:
            holding.set()
            release.wait(10)

    holding = threading.Event()
    holder = thread(hold)
    holding.wait(10)
    monkeypatch.setattr(turns_module.threading, "Lock", Interrupted)
    with pytest.raises(KeyboardInterrupt), turns:
        pass
    monkeypatch.undo()
    release.set()
    holder.join(10)
    late = thread(lambda: turns.__enter__())
    late.join(10)
    assert not late.is_alive()


def test_a_step_has_its_turn_between_two_guests():
    """Who wants the engine between steps again and again, such as for embeddings, lets a step run in between."""
    subject = engine_of_as()
    scheduler = subject.scheduler
    scheduler.submit(subject.tasks.make(Request(prompt_token_ids=(1,), params=GREEDY), lambda delta: None))
    for n_steps in range(3):
        with scheduler.between_steps(recompute=False):
            assert scheduler.n_steps == n_steps
            stepper = thread(scheduler.step)
            while not scheduler._stepping.n_waiting:
                pass
        with scheduler.between_steps(recompute=False):
            assert scheduler.n_steps == n_steps + 1
        stepper.join(10)


def test_a_request_that_comes_while_the_engine_closes_is_refused():
    """Rule 10: between the check of the engine and the queue it closes; nobody is left to serve the request."""
    subject = engine_of_as()
    subject.generate([0], SamplingParams(max_tokens=1))
    make = subject.tasks.make

    def make_slowly(*arguments: Any, **more: Any) -> Any:
        tasks = make(*arguments, **more)
        subject.close()
        return tasks

    subject.tasks.make = make_slowly  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="the engine is closed"):
        subject.submit(Request(prompt_token_ids=(0,)), lambda delta: None)


def test_who_cannot_take_an_answer_keeps_nobody_waiting(monkeypatch):
    """Rule 10: it stops the engine, which says so to everybody, although one of them fails again."""
    monkeypatch.setattr(threading, "excepthook", lambda failure: None)
    ends: queue.SimpleQueue[Delta] = queue.SimpleQueue()

    def fail(delta: Delta) -> None:
        raise ArithmeticError("no room")

    with engine_of_as() as subject:
        subject.pause()
        for deliver in (fail, lambda delta: ends.put(delta) if delta.completion else None):
            subject.submit(Request(prompt_token_ids=(0,), params=GREEDY), deliver)
        subject.resume()
        completion = ends.get(timeout=10).completion
        assert completion.error == "the engine stopped: ArithmeticError: no room"


@pytest.mark.parametrize("how", ["pause", "sleep"])
def test_an_abort_ends_a_request_of_an_engine_that_is_paused(how):
    """Rule 7: running and queued ones hear at once, and their pages come back; the others wait for the engine."""
    subject = engine_of_as(max_num_seqs=2)
    scheduler, heard = subject.scheduler, {}

    def submit(name: str) -> None:
        request = Request(prompt_token_ids=(1, 2), params=GREEDY, request_id=name)
        scheduler.submit(subject.tasks.make(request, lambda delta: heard.setdefault(name, []).append(delta)))

    for name in ("running", "neighbour", "queued"):
        submit(name)
    for _ in range(3):
        scheduler.step()
    getattr(subject, how)()
    submit("later")
    n_steps = scheduler.n_steps
    assert not scheduler.has_work
    for name in ("running", "queued", "later"):
        subject.abort(name)
    assert scheduler.has_work
    assert not scheduler.step()
    assert not scheduler.has_work
    assert scheduler.n_steps == n_steps
    for name in ("running", "queued", "later"):
        assert [delta.finish_reason for delta in heard[name] if delta.completion] == ["abort"]
    assert [task.request_id for task in scheduler.alive()] == ["neighbour"]
    assert subject.pool.n_used == (1 if how == "pause" else 0)
    subject.resume()
    while scheduler.step():
        pass
    assert heard["neighbour"][-1].finish_reason == "length"


def test_nobody_wakes_an_engine_that_falls_asleep():
    """The one who resumes waits until the memory is gone, and takes it again; no step runs without it."""
    subject = engine_of_as()
    states = []

    def forget() -> None:
        waker = thread(subject.resume)
        waker.join(0.05)
        states.append((waker.is_alive(), subject.scheduler.paused))
        wakers.append(waker)

    wakers: list[threading.Thread] = []
    subject._executor.forget = forget  # type: ignore[method-assign]
    subject.sleep()
    wakers[0].join(10)
    assert states == [(True, True)]
    assert not subject.scheduler.paused
    assert all(group.storage.k_buffer.shape[1] for group in subject.pool.groups)


def test_a_call_that_is_cancelled_while_its_prompts_are_queued_is_aborted():
    """Rule 7: the thread that queues them goes on for a while; what it has queued and what it queues yet ends."""
    with engine_of_as() as subject:
        encode, asked, go = subject.encode, [], threading.Event()
        subject.pause()

        def encode_slowly(prompt: Any) -> list[int]:
            asked.append(prompt)
            if len(asked) == 2:
                loop.call_soon_threadsafe(reached.set)
                assert go.wait(10)
            return encode(prompt)

        subject.encode = encode_slowly  # type: ignore[method-assign]

        async def main() -> None:
            nonlocal loop, reached
            loop, reached = asyncio.get_running_loop(), asyncio.Event()
            call = asyncio.ensure_future(subject.generate_async([[0], [1], [2]], GREEDY))
            await reached.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            go.set()

        loop: Any = None
        reached: Any = None
        asyncio.run(main())  # waits for the thread
        assert asked == [[0], [1]], "nobody waits for the third"
        while subject.scheduler.has_work:
            subject.scheduler.step()
        assert subject.scheduler.alive() == []


def test_an_event_loop_that_is_closed_under_a_stream_hurts_nobody_else():
    """Rule 10: a loop says so when a delta is handed to it; the engine and its other requests go on."""

    def refuse(*arguments: Any) -> None:
        raise RuntimeError("Event loop is closed")

    async def main() -> None:
        subject.pause()
        stream = subject.generate_async([0], GREEDY, stream=True)
        first = asyncio.ensure_future(stream.__anext__())
        while not subject.scheduler.n_waiting:
            await asyncio.sleep(0)
        loop: Any = asyncio.get_running_loop()
        loop.call_soon_threadsafe = refuse
        subject.resume()
        try:
            assert subject.generate([0], SamplingParams(temperature=0.0, max_tokens=5)).text == "AAAAA"
            assert subject.health().status == "ok"
        finally:
            del loop.call_soon_threadsafe
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)

    with engine_of_as() as subject:
        asyncio.run(main())


def test_a_request_waits_for_new_weights_that_are_on_their_way(monkeypatch):
    """Rule 12: it is neither refused nor computed with half of them."""
    subject = engine_of_as()
    ends: queue.SimpleQueue[Delta] = queue.SimpleQueue()

    def load(*arguments: Any) -> None:
        subject.submit(
            Request(prompt_token_ids=(0,), params=GREEDY), lambda delta: ends.put(delta) if delta.completion else None
        )

    monkeypatch.setattr(engine_module, "load_tensors", load)
    with subject:
        subject.update_weights([], version=3)
        completion = ends.get(timeout=10).completion
    assert (completion.weight_version, completion.error) == (3, None)
