"""What takes an engine's prompts: one or many, waited for, streamed, or for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Literal, overload

from astrai_core.errors import AstraiError
from astrai_core.types import Request
from astrai_infer.call import (
    AdapterNames,
    Call,
    Params,
    Prompt,
    Prompts,
    Result,
    adapters_for,
    new_call,
    params_for,
    refusal,
)
from astrai_infer.task import Delta


class PromptFront(ABC):
    """Turns calls into requests, and their deltas into results."""

    def __init__(self) -> None:
        self._request_numbers = itertools.count(1)

    @abstractmethod
    def encode(self, prompt: Prompt) -> list[int]:
        """Turn one prompt into token ids."""

    @abstractmethod
    def submit(self, request: Request, deliver: Callable[[Delta], None], prompt_index: int = 0) -> None:
        """Queue one request and return; `deliver` gets its deltas."""

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """End a request. Idempotent."""

    @abstractmethod
    def check_alive(self) -> None:
        """Raise EngineError if no request can be served."""

    @overload
    def generate(
        self, prompts: Prompts, params: Params = None, *, adapter: AdapterNames = None, stream: Literal[True]
    ) -> Iterator[Delta]: ...
    @overload
    def generate(
        self, prompts: Prompts, params: Params = None, *, adapter: AdapterNames = None, stream: Literal[False] = False
    ) -> Result | list[Result]: ...
    def generate(
        self, prompts: Prompts, params: Params = None, *, adapter: AdapterNames = None, stream: bool = False
    ) -> Result | list[Result] | Iterator[Delta]:
        """Complete one prompt or many.

        Parameters
        ----------
        prompts
            Text, a conversation, token ids, or a list of these.
        params
            For all prompts, or a list with one entry per prompt.
        adapter
            Name of the adapter, for all prompts or as a list; None is the model itself.
        stream
            Return an iterator of :class:`~astrai_infer.task.Delta`; the last delta of each choice carries the
            completion. Dropping the iterator aborts what is left.

        Returns
        -------
        A completion per prompt (a list of n of them where ``params.n > 1``): one result for one prompt, a list for a
        list. In a list, a prompt that cannot be served yields a completion with ``finish_reason == "error"``.

        Raises
        ------
        RequestError
            If a single prompt is malformed or does not fit.
        EngineError
            If the engine failed.
        """
        inbox: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        call = new_call(prompts, params)
        self._start(call, prompts, params, adapter, inbox.put)
        deltas = self._drain(call, inbox)
        return deltas if stream else call.results(list(deltas))

    @overload
    def generate_async(
        self, prompts: Prompts, params: Params = None, *, adapter: AdapterNames = None, stream: Literal[True]
    ) -> AsyncIterator[Delta]: ...
    @overload
    def generate_async(
        self, prompts: Prompts, params: Params = None, *, adapter: AdapterNames = None, stream: Literal[False] = False
    ) -> Awaitable[Result | list[Result]]: ...
    def generate_async(
        self, prompts: Prompts, params: Params = None, *, adapter: AdapterNames = None, stream: bool = False
    ) -> Awaitable[Result | list[Result]] | AsyncIterator[Delta]:
        """Do the same for asyncio: await the result, or iterate with ``async for`` when streaming."""
        deltas = self._stream_async(prompts, params, adapter)
        return deltas if stream else self._collect_async(prompts, params, deltas)

    def _start(
        self, call: Call, prompts: Any, params: Any, adapter: AdapterNames, deliver: Callable[[Delta], None]
    ) -> None:
        """Queue all prompts of a call; a list's bad prompts are answered at once with an error completion."""
        self.check_alive()
        listed: list[Prompt] = [prompts] if call.single else list(prompts)
        each, names = params_for(params, len(listed)), adapters_for(adapter, len(listed))
        for i, (prompt, sampling, own) in enumerate(zip(listed, each, names, strict=True)):
            request_id = f"req-{next(self._request_numbers)}"
            try:
                ids = tuple(self.encode(prompt))
                request = Request(prompt_token_ids=ids, params=sampling, request_id=request_id, adapter=own)
                self.submit(request, deliver, i)
                call.request_ids.append(request_id)
            except AstraiError as error:
                if call.single:
                    raise
                for choice in range(sampling.n):
                    deliver(refusal(str(error), request_id, choice, i))
            if call.abandoned:  # meanwhile, by another thread, which may not have seen this id
                self.abort(request_id)
                return

    def _drain(self, call: Call, inbox: queue.SimpleQueue[Delta]) -> Iterator[Delta]:
        try:
            while call.n_open:
                yield call.take(inbox.get())
        finally:
            self._abandon(call)

    async def _stream_async(self, prompts: Any, params: Any, adapter: AdapterNames) -> AsyncIterator[Delta]:
        call = new_call(prompts, params)
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[Delta] = asyncio.Queue()

        def deliver(delta: Delta) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody listens
                loop.call_soon_threadsafe(inbox.put_nowait, delta)

        try:
            await asyncio.to_thread(self._start, call, prompts, params, adapter, deliver)
            while call.n_open:
                yield call.take(await inbox.get())
        finally:
            self._abandon(call)

    async def _collect_async(self, prompts: Any, params: Any, deltas: AsyncIterator[Delta]) -> Result | list[Result]:
        return new_call(prompts, params).results([delta async for delta in deltas])

    def _abandon(self, call: Call) -> None:
        call.abandoned = True
        if call.n_open:
            for request_id in call.request_ids:
                self.abort(request_id)
