"""The channel between server and engine: frames in whatever parts they come, and who is woken by them (rules 13, 23)."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astrai_core.types import SamplingParams, Usage
from astrai_infer import client as client_module
from astrai_infer.client import EngineClient, Generation
from astrai_infer.metrics import Health
from astrai_infer.testing.server import Says, saying_engine
from astrai_infer.wire import Batch, End, Piece, Receiver, Reply, pack

USAGE = Usage(prompt_tokens=1, completion_tokens=2, cached_tokens=0)
DONE = End("stop", None, USAGE, None, 0, None)


@given(st.lists(st.text()), st.lists(st.integers(0, 400), max_size=40))
def test_messages_do_not_depend_on_how_they_were_cut(messages: list[str], cuts: list[int]) -> None:
    """Rule 13, below the text: every message comes once, in order, whole."""
    data = b"".join(map(pack, messages))
    bounds = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    parts = [data[start:end] for start, end in itertools.pairwise(bounds)]

    async def read() -> list[Any]:
        reader, found = asyncio.StreamReader(), []
        receiver = Receiver(reader)

        async def feed() -> None:
            for part in parts:
                reader.feed_data(part)
                await asyncio.sleep(0)
            reader.feed_eof()

        feeding = asyncio.create_task(feed())
        with pytest.raises(EOFError):
            while True:
                some = await receiver.receive()
                assert some
                found += some
        await feeding
        return found

    assert asyncio.run(read()) == messages


def test_what_has_come_is_read_at_once() -> None:
    async def read() -> list[Any]:
        reader = asyncio.StreamReader()
        reader.feed_data(b"".join(map(pack, ("a", "b", "c")))[:-1])
        return await Receiver(reader).receive()

    assert asyncio.run(read()) == ["a", "b"]


@pytest.mark.parametrize("at_once", [1, 32])
def test_a_reader_that_is_behind_gets_all_its_pieces_together(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 23: it is woken once for a batch, however many steps that holds; what it reads is in order and complete."""
    monkeypatch.setattr(client_module, "AT_ONCE", at_once)
    health = Health.__new__(Health)
    pieces: list[Reply] = [
        Piece(key, 0, f"{step}", (step,), (), DONE if step == 4 else None) for step in range(5) for key in (1, 2, 3)
    ]

    class Channel:
        batches = [[Batch(pieces[:7], health), Batch(pieces[7:], health)]]  # noqa: RUF012

        async def receive(self) -> list[Batch]:
            if self.batches:
                return self.batches.pop()
            await asyncio.Event().wait()
            raise AssertionError("it waits for ever")

    async def run() -> dict[int, list[list[str]]]:
        engine = saying_engine(Says("x"))
        client = await EngineClient.start_thread(lambda: engine)
        try:
            assert client._task is not None
            client._task.cancel()
            await asyncio.gather(client._task, return_exceptions=True)
            client.error, client._receiver = None, Channel()  # type: ignore[assignment]
            seen: dict[int, list[list[str]]] = {1: [], 2: [], 3: []}

            async def read(key: int, generation: Generation) -> None:
                async for some in generation:
                    seen[key].append([piece.text for piece in some])

            tasks = []
            for key in seen:
                generation = Generation(client)
                generation.add(key, 1)
                client._generations[key], client._open[key] = generation, 1
                tasks.append(asyncio.create_task(read(key, generation)))
            await asyncio.sleep(0)  # all wait by now
            client._task = asyncio.create_task(client._listen())
            await asyncio.gather(*tasks)
            assert client.n_open == 0 and client._generations == {}
            return seen
        finally:
            await client.close()

    assert asyncio.run(run()) == {key: [["0", "1", "2", "3", "4"]] for key in (1, 2, 3)}


def test_a_request_is_answered_through_the_channel() -> None:
    """A generation's pieces join to the text, and end once."""

    async def run() -> list[Piece]:
        engine = saying_engine(Says("some text"))
        client = await EngineClient.start_thread(lambda: engine)
        try:
            generation = Generation(client)
            await client.submit(generation, [1], SamplingParams(max_tokens=50, temperature=0))
            return [piece async for pieces in generation for piece in pieces]
        finally:
            await client.close()

    pieces = asyncio.run(run())
    assert "".join(piece.text for piece in pieces) == "some text"
    assert [piece.end is not None for piece in pieces].count(True) == 1 and pieces[-1].end is not None
