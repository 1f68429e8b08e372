"""Bodies of requests: small ones are read where FastAPI reads them, large ones beside the event loop (rule 23)."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine
from typing import Any, get_type_hints

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.responses import Response

from astrai_infer.server.errors import ApiError

LARGE = 32 << 10
"""Bytes of a body that is read in a thread: as many cost the event loop up to 10 ms."""

MAX_VALUES = 200_000
"""JSON values and keys in a body. json.loads holds the interpreter lock from its beginning to its end, whatever thread it
runs in: 30 ms for so many numbers, and 0.6 s for the lists that 4 MB can hold."""

_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_TEXTS_AT_ONCE = 10_000
"""Texts that are taken out in one call, 3 ms; between two calls other threads run."""
_MARKS = (b",", b":", b"[", b"{")


def check_values(body: bytes) -> None:
    """Refuse a body of more than :data:`MAX_VALUES` values; what stands within a text does not count.

    Raises
    ------
    ApiError
        Status 413.
    """
    if sum(map(body.count, _MARKS)) <= MAX_VALUES:  # 6 ms for 4 MB
        return
    n_texts, n = 0, _TEXTS_AT_ONCE
    while n == _TEXTS_AT_ONCE and n_texts <= MAX_VALUES + 1:  # the first text needs no comma
        body, n = _TEXT.subn(b"", body, count=_TEXTS_AT_ONCE)
        n_texts += n
    if n_texts > MAX_VALUES + 1 or sum(map(body.count, _MARKS)) > MAX_VALUES:
        raise ApiError(413, f"the body holds more than {MAX_VALUES} numbers, texts and lists; send fewer at once")


class BodyRequest(Request):
    """A request whose large body comes as the model that the route takes, which FastAPI then passes on as it is."""

    model: type[BaseModel]

    async def json(self) -> Any:
        """Return what a small body holds, and the model that a large one makes.

        Raises
        ------
        ApiError
            If a large body holds too many values.
        json.JSONDecodeError
            If it is no JSON.
        RequestValidationError
            If a large body is not what the route takes.
        """
        body = await self.body()
        if len(body) < LARGE:
            return await super().json()
        try:
            return await asyncio.to_thread(self._read, body)
        except ValidationError as error:
            raise RequestValidationError(error.errors(include_url=False)) from None

    def _read(self, body: bytes) -> BaseModel:
        check_values(body)
        return self.model.model_validate(json.loads(body))


class BodyRoute(APIRoute):
    """A route whose function takes its body as `body`, if it takes one."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler behind one that hands it a :class:`BodyRequest`."""
        handle, model = super().get_route_handler(), get_type_hints(self.endpoint).get("body")
        if model is None:
            return handle

        async def read(request: Request) -> Response:
            replaced = BodyRequest(request.scope, request.receive)
            replaced.model = model
            return await handle(replaced)

        return read
