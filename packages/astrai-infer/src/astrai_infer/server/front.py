"""What every request passes first: request id, drain, API key, size of the body, access log."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import secrets
import time
from collections import deque
from collections.abc import MutableMapping
from typing import Any
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from astrai_infer.server import admin, docs, page
from astrai_infer.server.errors import ApiError
from astrai_infer.server.serving import Serving

access_log = logging.getLogger("astrai_infer.server.access")

OPEN_PATHS = {"/health", "/ready"}
"""Probes need no key, and are answered while the server drains."""

WATCHED_PATHS = OPEN_PATHS | {"/metrics", "/stats"}
"""Neither counted as work nor refused while the server drains."""

KEYLESS_PATHS = OPEN_PATHS | {page.PATH} | docs.PATHS | admin.PATHS
"""The chat page holds no data, and asks for the key itself; the API's description is the same everywhere; the owner's
routes ask for a key of their own."""

BEGUN_AT_ONCE = 4
"""Requests that begin in one turn of the event loop. Reading and checking one takes 1 ms, and hundreds may come at once,
while others wait for their next token."""

_REQUEST_ID = re.compile(r"[\w.:-]{1,128}")


class Front:
    """ASGI middleware; puts ``request_id`` into the request's state."""

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        self._app = app
        self._serving = serving
        self._keys = [key.encode() for key in serving.config.api_key]
        self._n_begun = 0  # in this turn of the event loop
        self._queue: deque[asyncio.Future[None]] = deque()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        serving, path = self._serving, scope["path"]
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        given = headers.get(b"x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(12)
        scope.setdefault("state", {})["request_id"] = request_id
        started, status = time.monotonic(), 0

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                names = (b"x-request-id", b"request-id")  # OpenAI's and Anthropic's
                message["headers"] = [*message.get("headers", ()), *((name, request_id.encode()) for name in names)]
            await send(message)

        counted = path not in WATCHED_PATHS
        serving.n_active += counted
        try:
            refusal = self._refusal(path, headers)
            if refusal is None:
                await self._turn()
                limited = BodyLimit(receive, serving.config.max_body_bytes)
                await self._app(scope, limited, send_on)
            else:
                await refusal.response(path, request_id)(scope, receive, send_on)
        finally:
            serving.n_active -= counted
            if serving.config.access_log and counted:
                client = scope.get("client") or ("-", 0)
                access_log.info(
                    "%s %s %s %d %.1f ms %s%s",
                    client[0],
                    scope["method"],
                    quote(path),  # which may hold line ends
                    status,
                    1000 * (time.monotonic() - started),
                    request_id,
                    f" user {user!r}" if (user := scope["state"].get("user")) else "",
                )

    async def _turn(self) -> None:
        """Wait until the event loop has time for one more request."""
        loop = asyncio.get_running_loop()
        if not self._n_begun:
            loop.call_soon(self._next_turn)
        self._n_begun += 1
        if self._n_begun > BEGUN_AT_ONCE:
            self._queue.append(loop.create_future())
            await self._queue[-1]

    def _next_turn(self) -> None:
        for _ in range(min(BEGUN_AT_ONCE, len(self._queue))):
            turn = self._queue.popleft()
            if not turn.done():  # else its request was cancelled
                turn.set_result(None)
        self._n_begun = len(self._queue) and BEGUN_AT_ONCE
        if self._n_begun:
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _refusal(self, path: str, headers: MutableMapping[bytes, str]) -> ApiError | None:
        serving = self._serving
        if serving.draining and path not in WATCHED_PATHS:
            return ApiError(503, "the server is shutting down; try another one", retry_after_s=5)
        guarded = path not in KEYLESS_PATHS
        if self._keys and guarded and not self._knows(headers):
            return ApiError(
                401, "the API key is missing or wrong; send it as `Authorization: Bearer KEY`", code="invalid_api_key"
            )
        length = headers.get(b"content-length", "")
        if length.isdecimal() and int(length) > serving.config.max_body_bytes:
            return too_large(serving.config.max_body_bytes)
        return None

    def _knows(self, headers: MutableMapping[bytes, str]) -> bool:
        bearer = headers.get(b"authorization", "")
        given = bearer[7:] if bearer[:7].lower() == "bearer " else headers.get(b"x-api-key", "")
        found = [hmac.compare_digest(given.encode("latin-1"), key) for key in self._keys]
        return any(found)


class BodyLimit:
    """Counts a body that comes in pieces, and ends it when it is too long."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive = receive
        self._limit = limit
        self._seen = 0

    async def __call__(self) -> MutableMapping[str, Any]:
        """Receive the next message.

        Raises
        ------
        ApiError
            Status 413.
        """
        message = await self._receive()
        if message["type"] == "http.request":
            self._seen += len(message.get("body", b""))
            if self._seen > self._limit:
                raise too_large(self._limit)
        return message


def too_large(limit: int) -> ApiError:
    """The answer to a body that is too long."""
    return ApiError(413, f"the body has more than {limit} bytes; send less, or raise --max-body-bytes")
