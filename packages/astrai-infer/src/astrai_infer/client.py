"""The server's end of the channel to an engine, for one asyncio loop. No torch here.

The engine lives in a process of its own, so that its steps and the server's JSON never share an interpreter lock; for
tests it lives in a thread. Either way it is reached through the same socket.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

from astrai_core import errors
from astrai_core.errors import EngineError
from astrai_core.types import Request, SamplingParams
from astrai_infer.metrics import Health
from astrai_infer.wire import (
    Abort,
    Accepted,
    Batch,
    Call,
    EngineInfo,
    Failed,
    Piece,
    Ready,
    Receiver,
    Refused,
    Reply,
    Returned,
    Submit,
    pack,
    request_id,
)

if TYPE_CHECKING:
    from astrai_infer.engine import InferenceEngine

AT_ONCE = 32
"""Readers that are woken in one turn of the event loop: each writes to a socket."""

STOP_S = 10.0
"""How long a closed engine may take to end before its process is killed."""


class Worker(Protocol):
    """What an engine runs in: a process or a thread."""

    def start(self) -> None: ...
    def join(self, timeout: float | None = None) -> None: ...
    def is_alive(self) -> bool: ...


class Generation:
    """The pieces of some requests as they come: ``async for pieces in generation`` yields lists, never empty.

    Choices are numbered through, in the order in which the requests were added.
    """

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._first_choice: dict[int, int] = {}  # of each request, by key
        self._pieces: list[Piece] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: str | None = None
        self.n_choices = 0
        self.n_open = 0
        """Choices whose end has not come."""

    def add(self, key: int, n_choices: int) -> None:
        """Expect the pieces of one more request."""
        self._first_choice[key] = self.n_choices
        self.n_choices += n_choices
        self.n_open += n_choices

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Piece]:
        """Return all pieces that are there, at least one.

        Raises
        ------
        EngineError
            If the engine is gone; a choice that a failed step ended says so in its :class:`~astrai_infer.wire.End`.
        """
        while not self._pieces:
            if self._error is not None:
                raise EngineError(self._error)
            if not self.n_open:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        pieces, self._pieces = self._pieces, []
        return pieces

    def close(self) -> None:
        """Abort what is still running and expect nothing more. Idempotent."""
        for key in self._first_choice:
            self._client.forget(key, abort=True)

    def put(self, piece: Piece) -> None:
        """Take a piece from the channel; :meth:`wake` follows."""
        first = self._first_choice[piece.key]
        self._pieces.append(piece._replace(choice=first + piece.choice) if first else piece)
        self.n_open -= piece.end is not None

    def wake(self) -> None:
        """Tell the reader that there is something to read."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, message: str) -> None:
        """Wake the reader with an error."""
        self._error = message
        self.wake()


class EngineClient:
    """Talks to one engine; made by :meth:`start_process` or :meth:`start_thread`.

    Attributes
    ----------
    info
        What the engine said when it was ready.
    health
        Its last state; see :meth:`silent_s` for how old it is.
    error
        Why it is gone, None while it lives.
    """

    def __init__(self, worker: Worker, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.worker = worker
        self._receiver = Receiver(reader)
        self._writer = writer
        self.info: EngineInfo
        self.health: Health | None = None
        self.error: str | None = None
        self._heard_s = time.monotonic()
        self._keys = itertools.count(1)
        self._generations: dict[int, Generation] = {}
        self._open: dict[int, int] = {}  # choices without an end, of each request
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def start_process(cls, make_engine: Callable[[], InferenceEngine]) -> Self:
        """Start a process with an engine in it and wait until that is loaded.

        Parameters
        ----------
        make_engine
            Builds the engine there; picklable, such as ``functools.partial(InferenceEngine.from_pretrained, ...)``.

        Raises
        ------
        AstraiError
            What `make_engine` raised; EngineError if the process died or the cause was another one.
        """
        from astrai_infer.host import host_main

        context = multiprocessing.get_context("spawn")  # a forked CUDA context or thread pool would not work
        return await cls._start(
            lambda channel: context.Process(
                target=host_main, args=(make_engine, channel), name="astrai-engine", daemon=True
            )
        )

    @classmethod
    async def start_thread(cls, make_engine: Callable[[], InferenceEngine]) -> Self:
        """Do the same with a thread of this process; for tests."""
        from astrai_infer.host import load_and_serve

        return await cls._start(
            lambda channel: threading.Thread(
                target=load_and_serve, args=(make_engine, channel.dup()), name="astrai-host", daemon=True
            )
        )

    @classmethod
    async def _start(cls, worker_for: Callable[[socket.socket], Worker]) -> Self:
        ours, theirs = socket.socketpair()
        with theirs:  # the worker has a duplicate: the channel ends when the worker does
            worker = worker_for(theirs)
            await asyncio.to_thread(worker.start)
        ours.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=ours)
        client = cls(worker, reader, writer)
        try:
            await client._wait_until_ready()
        except BaseException:
            await client.close()
            raise
        client._task = asyncio.create_task(client._listen(), name="astrai-client")
        return client

    async def _wait_until_ready(self) -> None:
        try:
            batches: list[Batch] = await self._receiver.receive()
        except (EOFError, ConnectionError):
            raise EngineError("the engine's process ended while it was loading; see its output above") from None
        first, *rest = [reply for batch in batches for reply in batch.replies]
        if isinstance(first, Failed):
            raise _error(first.kind, first.message)
        assert isinstance(first, Ready), "the first reply says how loading went"
        self.info, self.health, self._heard_s = first.info, batches[-1].health, time.monotonic()
        assert not rest, "nothing was asked yet"

    @property
    def n_open(self) -> int:
        """Choices that are not finished."""
        return sum(self._open.values())

    @property
    def silent_s(self) -> float:
        """Seconds since the engine was last heard of; it speaks several times a second."""
        return time.monotonic() - self._heard_s

    async def submit(
        self,
        generation: Generation,
        prompt: Sequence[int],
        params: SamplingParams,
        priority: int = 0,
        adapter: str | None = None,
    ) -> None:
        """Queue a request; returns when the engine has taken it.

        Parameters
        ----------
        generation
            Gets the pieces.
        prompt
            Token ids.
        priority
            Smaller is served first.
        adapter
            Name of the adapter; None is the model itself.

        Raises
        ------
        RequestError
            If it can never be served, or the engine's queue is full.
        EngineError
            If the engine is gone.
        """
        key = next(self._keys)
        request = Request(
            prompt_token_ids=tuple(prompt),
            params=params,
            request_id=request_id(key),
            priority=priority,
            adapter=adapter,
        )
        generation.add(key, params.n)
        self._generations[key] = generation
        self._open[key] = params.n
        try:
            await self._ask(key, Submit(key, request))
        except BaseException:
            generation.n_open -= self._open.get(key, 0)  # some may have ended by now
            self.forget(key, abort=True)
            raise

    async def call(self, name: str, *arguments: Any) -> Any:
        """Run one of :data:`astrai_infer.host.CALLS` beside the steps and return its value.

        Raises
        ------
        AstraiError
            What it raised.
        EngineError
            If the engine is gone.
        """
        key = next(self._keys)
        return await self._ask(key, Call(key, name, arguments))

    def forget(self, key: int, *, abort: bool) -> None:
        """Expect no more pieces of a request, and end it if it runs. Idempotent."""
        if self._open.pop(key, None) is not None:
            del self._generations[key]
            if abort and self.error is None:
                self._writer.write(pack(Abort(key)))

    async def close(self) -> None:
        """End the engine's process or thread; what is running fails. Idempotent."""
        self._fail("the engine was closed")
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._writer.close()
        await asyncio.to_thread(self.worker.join, STOP_S)
        if isinstance(self.worker, multiprocessing.process.BaseProcess) and self.worker.is_alive():
            self.worker.kill()
            await asyncio.to_thread(self.worker.join)

    async def _ask(self, key: int, message: Submit | Call) -> Any:
        if self.error is not None:
            raise EngineError(self.error)
        answer = self._answers[key] = asyncio.get_running_loop().create_future()
        self._writer.write(pack(message))
        try:
            return await answer
        finally:
            del self._answers[key]

    async def _listen(self) -> None:
        try:
            while True:
                batches: list[Batch] = await self._receiver.receive()
                self._heard_s = time.monotonic()
                self.health = batches[-1].health
                # All is handed out before anybody is woken: a reader then finds all its pieces, and writes once.
                found = [self._dispatch(reply) for batch in batches for reply in batch.replies]
                for i, generation in enumerate(dict.fromkeys(found), 1):
                    if generation is not None:
                        generation.wake()
                    if not i % AT_ONCE:
                        await asyncio.sleep(0)
        except (EOFError, ConnectionError):
            self._fail("the engine's process ended; restart the server")
        finally:
            self._fail("the server stopped listening to the engine; restart it")  # nobody waits for ever

    def _dispatch(self, reply: Reply) -> Generation | None:
        """Hand a reply to who waits for it; return the generation whose reader is to be woken."""
        if isinstance(reply, Piece):
            generation = self._generations.get(reply.key)
            if generation is not None:
                generation.put(reply)
                if reply.end is not None:
                    self._open[reply.key] -= 1
                    if not self._open[reply.key]:
                        self.forget(reply.key, abort=False)
            return generation
        if isinstance(reply, (Accepted, Returned, Refused)):
            answer = self._answers.get(reply.key)
            if answer is None or answer.done():
                return None
            if isinstance(reply, Refused):
                answer.set_exception(_error(reply.kind, reply.message))
            else:
                answer.set_result(reply.value if isinstance(reply, Returned) else None)
        return None

    def _fail(self, message: str) -> None:
        """Fail all that wait, now and later."""
        if self.error is not None:
            return
        self.error = message
        for generation in list(self._generations.values()):
            generation.fail(message)
        for answer in list(self._answers.values()):
            if not answer.done():
                answer.set_exception(EngineError(message))


def _error(kind: str, message: str) -> errors.AstraiError:
    raised: type[errors.AstraiError] = getattr(errors, kind)
    return raised(message)
