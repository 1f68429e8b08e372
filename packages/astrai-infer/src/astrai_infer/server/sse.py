"""Answers that end when the client goes away: whole ones, and streams of server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from astrai_core.errors import AstraiError
from astrai_infer.server.errors import ApiError, as_api_error

T = TypeVar("T")

STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
"""Of the API's description: an answer that may be a stream."""

LAST_WORD_S = 5.0
"""How long a client that may have stopped reading is given to take the last event."""


def event(data: Any, name: str | None = None) -> bytes:
    """Return one server-sent event; it ends with a blank line."""
    body = to_json(data)  # 1.4 us for a chunk of chat; json's encoder takes 4.5
    return b"data: %b\n\n" % body if name is None else b"event: %b\ndata: %b\n\n" % (name.encode(), body)


async def until_disconnect(receive: Receive) -> None:
    """Wait until the client has gone. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Run `work`, cancelled when the client goes away; None then."""
    task, watch = asyncio.create_task(work), asyncio.create_task(until_disconnect(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, watch):
            if not each.done():
                each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


class Closable(Protocol):
    """What must be closed when an answer ends, for whatever reason, and by when."""

    deadline_s: float

    def close(self) -> None: ...


async def whole(request: Request, running: Closable, work: Coroutine[Any, Any, Response]) -> Response:
    """Answer with what `work` returns, or with nothing if the client has gone."""
    try:
        async with asyncio.timeout_at(running.deadline_s):
            response = await while_connected(request.receive, work)
    finally:
        running.close()
    return Response(status_code=499) if response is None else response


class EventStream(Response):
    """A stream of server-sent events.

    Parameters
    ----------
    events
        Each item is one or several whole events.
    running
        Closed when the stream ends, for whatever reason.
    on_error
        An error raised on purpose -> the last event.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], running: Closable, on_error: Callable[[ApiError], bytes]) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events
        self._running = running
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events as they come."""
        try:
            await while_connected(receive, self._run(send))
        finally:
            self._running.close()

    async def _run(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        write: Callable[[bytes, bool], Awaitable[None]] = lambda data, more: send(
            {"type": "http.response.body", "body": data, "more_body": more}
        )
        try:
            async with asyncio.timeout_at(self._running.deadline_s):
                async for data in self._events:
                    await write(data, True)
        except (AstraiError, ApiError, TimeoutError) as error:
            self._running.close()
            with contextlib.suppress(TimeoutError):  # it does not read: the server then closes the connection
                async with asyncio.timeout(LAST_WORD_S):
                    await write(self._on_error(as_api_error(error)), True)
                    await write(b"", False)
            return
        await write(b"", False)
