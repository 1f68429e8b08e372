"""Ranks on this machine, started and watched by one process: if one fails, all end, and one message says which."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import FrameType, TracebackType
from typing import Any, Generic, TypeVar

import torch
from torch import distributed

from astrai_core.errors import AstraiError, ConfigError, TrainingError

T = TypeVar("T")

GRACE_SECONDS = 5.0
"""How long the other ranks may take to end by themselves after one has failed."""

ABORT_SECONDS = 0.5
"""Within this time of a rank's abort, what others tell is taken for its consequence."""


@dataclass(frozen=True)
class _Failure:
    """What a rank tells of its end."""

    at: float
    """Seconds since the epoch: ranks that fail because another has gone do so later."""
    error: AstraiError
    trace: str


@dataclass
class _Rank(Generic[T]):
    """A rank as its starter sees it."""

    number: int
    process: SpawnProcess
    reports: Connection
    heard: bool = False
    result: tuple[T] | None = None
    failure: _Failure | None = None

    def hear(self) -> None:
        """Take in what the rank tells, which may be nothing if it was killed."""
        self.heard = True
        try:
            told = self.reports.recv()
        except (EOFError, OSError):  # it ended without a word, or in the middle of one
            return
        if isinstance(told, _Failure):
            self.failure = told
        else:
            self.result = told

    def end(self) -> None:
        """Take in how a rank that has ended was ended."""
        self.process.join()
        if not self.heard:
            self.hear()
        if self.failure is None and self.result is None and self.process.exitcode:
            # Whoever was killed was first: nobody else knew of it before. But abort is also how torch's watchdog ends a rank
            # whose GPU waits for one that has gone; whom an abort takes along tells of it at once.
            at = time.time() - ABORT_SECONDS if self.process.exitcode == -signal.SIGABRT else 0.0
            self.failure = _Failure(at, TrainingError(_ending(self.process.exitcode)), "")


class RankError(Exception):
    """Carries the traceback of another process, as the cause of an error."""


def launch(work: Callable[[], T], nprocs: int, *, set_up: Callable[[], None] | None = None) -> T:
    """Run `work` on `nprocs` ranks of this machine, in processes of their own, and wait for all.

    The ranks find each other as under torchrun. SIGINT and SIGTERM are passed on to all of them. If this process is
    killed, they end too.

    Parameters
    ----------
    work
        What every rank does; it and its result must be picklable.
    set_up
        Called first in every rank, for logging and the like; picklable.

    Returns
    -------
    What rank 0 returned.

    Raises
    ------
    ConfigError
        If `nprocs` is not positive, or this process is a rank itself.
    AstraiError
        What the first rank that failed raised, with the rank in front unless all raised the same; a `TrainingError` for
        a rank that was killed or failed unforeseen. All ranks have ended by then.
    KeyboardInterrupt
        If the ranks were interrupted before they could save.
    """
    if nprocs < 1:
        raise ConfigError(f"--nprocs must be at least 1, got {nprocs}")
    if "RANK" in os.environ:
        raise ConfigError("--nprocs starts ranks, but this process is one already (torchrun); leave it out")
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    context = multiprocessing.get_context("spawn")
    ranks: list[_Rank[T]] = []
    with _passing_on(ranks) as interrupted:
        try:
            for number in range(nprocs):
                if interrupted:
                    raise KeyboardInterrupt
                receiver, sender = context.Pipe(duplex=False)
                environment = {
                    "RANK": str(number),
                    "LOCAL_RANK": str(number),
                    "WORLD_SIZE": str(nprocs),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(store.port),
                    "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is this process's, no rank opens another
                }
                process = context.Process(
                    target=_enter, args=(environment, work, set_up, sender), name=f"rank {number}"
                )
                process.start()
                sender.close()
                ranks.append(_Rank(number, process, receiver))
            if interrupted:  # a rank that was being started has not heard of it
                raise KeyboardInterrupt
            failed = _watch(ranks)
        finally:
            for rank in ranks:
                rank.process.kill()
                rank.process.join()
                rank.reports.close()
    if failed is None:
        assert ranks[0].result is not None, "a rank that ends without a failure has told its result"
        return ranks[0].result[0]
    if interrupted and failed.failure is not None and not failed.failure.trace:
        raise KeyboardInterrupt
    return _raise(ranks, failed)


def _watch(ranks: list[_Rank[T]]) -> _Rank[T] | None:
    """Wait until all have ended, and no longer than the grace once one has failed; return the first that failed.

    What a rank tells is heard before it ends: with others waiting for it on its GPU, one that has failed may be unable to.
    """
    running = {rank.process.sentinel: rank for rank in ranks}
    deadline: float | None = None
    while running:
        silent = {rank.reports: rank for rank in running.values() if not rank.heard}
        ready = wait([*running, *silent], None if deadline is None else max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for source in ready:
            if isinstance(source, Connection):
                silent[source].hear()
        for source in ready:
            if isinstance(source, int):
                running.pop(source).end()
        if deadline is None and any(rank.failure is not None for rank in ranks):
            deadline = time.monotonic() + GRACE_SECONDS
    failures = [rank for rank in ranks if rank.failure is not None]
    return min(failures, key=lambda rank: rank.failure.at if rank.failure else 0.0, default=None)


def _raise(ranks: list[_Rank[T]], failed: _Rank[T]) -> T:
    """Raise what a rank told, with its number in front unless all of them told the same."""
    assert failed.failure is not None, "the caller has looked"
    message = str(failed.failure.error)
    if any(rank.failure is None or str(rank.failure.error) != message for rank in ranks):
        message = f"rank {failed.number}: {message}"
    trace = failed.failure.trace
    raise type(failed.failure.error)(message) from (RankError(trace) if trace else None)


def _ending(code: int) -> str:
    if code > 0:
        return f"ended with exit code {code}; the run can be resumed from its last checkpoint"
    name = signal.Signals(-code).name
    hint = " (the system may be out of memory)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}; the run can be resumed from its last checkpoint"


@contextmanager
def _passing_on(ranks: list[_Rank[T]]) -> Iterator[list[int]]:
    """Send SIGINT and SIGTERM on to the ranks, which decide; yield the signals that came."""
    came: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        came.append(number)
        for rank in ranks:
            if rank.process.pid is not None and rank.process.exitcode is None:
                os.kill(rank.process.pid, number)

    if threading.current_thread() is not threading.main_thread():  # handlers are the main thread's alone
        yield came
        return
    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _enter(
    environment: dict[str, str], work: Callable[[], Any], set_up: Callable[[], None] | None, reports: Connection
) -> None:
    """Be a rank."""
    os.setpgid(0, 0)  # a terminal's Ctrl-C reaches the starter alone, which passes it on once
    threading.Thread(target=_end_with_starter, daemon=True).start()
    os.environ.update(environment)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // int(environment["WORLD_SIZE"])))
    if set_up is not None:
        set_up()
    with _Reporting(reports):
        result = work()
        if distributed.is_initialized():  # NCCL's threads, left alone, may keep a process from ending
            distributed.destroy_process_group()
        reports.send((result,))


class _Reporting:
    """Hands the error that ends its body to the starter, which raises it: printed here, the ranks' lines would mix."""

    def __init__(self, reports: Connection) -> None:
        self._reports = reports

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            return False
        text = "" if isinstance(error, KeyboardInterrupt) else "".join(traceback.format_exception(error))
        told = error if isinstance(error, AstraiError) else _unforeseen(error)
        self._reports.send(_Failure(time.time(), told, text))
        return True


def _unforeseen(error: BaseException) -> TrainingError:
    if isinstance(error, KeyboardInterrupt):
        return TrainingError("was interrupted")
    first_line = str(error).partition("\n")[0]
    return TrainingError(f"{type(error).__name__}: {first_line} (run with --debug for the traceback)")


def _end_with_starter() -> None:
    starter = multiprocessing.parent_process()
    assert starter is not None, "a rank is started by another process"
    wait([starter.sentinel])
    os._exit(1)
