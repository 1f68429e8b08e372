"""Many clients for a while, most of which leave: nothing is lost, nothing goes on, nobody gets a wrong answer."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from astrai_core.types import SamplingParams
from astrai_infer.testing import small_engine, tiny_model
from astrai_infer.testing.server import LiveServer, live_server

N_STREAMS = 256
N_ABORTS = int(os.environ.get("ASTRAI_SOAK_ABORTS", "1000"))
"""More make a longer soak."""

LONG, SHORT = 64, 16
N_PAGES = 240
"""Too few for 64 completions of the longest kind, so that some are preempted."""

PROMPTS = [f"{i * i}" * (1 + i % 12) for i in range(1, 33)]


@dataclass
class Soak:
    """What the clients of one run share."""

    live: LiveServer
    expected: dict[tuple[str, int], list[int]]
    """(prompt, length) -> its tokens."""
    jobs: list[tuple[str, int, bool]]
    """(prompt, length, whether the client leaves); taken from the end."""
    draw: random.Random
    n_whole: int = 0
    wrong: list[Any] = field(default_factory=list)

    async def client(self) -> None:
        """Send one request after the other, each on a connection of its own."""
        while self.jobs:
            prompt, length, leaves = self.jobs.pop()
            body = {"model": "tiny", "prompt": prompt, "max_tokens": length, "temperature": 0, "ignore_eos": True}
            data = json.dumps({**body, "stream": True, "return_token_ids": True}).encode()
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
            )
            reader, writer = await asyncio.open_connection("127.0.0.1", int(self.live.url.rpartition(":")[2]))
            try:
                if leaves:
                    await self.leave(reader, writer, head.encode() + data)
                else:
                    writer.write(head.encode() + data)
                    found = tokens_of(await reader.read())
                    self.n_whole += 1
                    if found != self.expected[prompt, length]:
                        self.wrong.append((prompt, length, found))
            finally:
                writer.transport.abort() if self.draw.random() < 0.5 else writer.close()

    async def leave(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
        """Go away within the request, before the answer, or after some of it."""
        moment = self.draw.choices(("cut", "at once", "soon", "within"), (1, 1, 3, 5))[0]
        writer.write(request[: self.draw.randrange(len(request))] if moment == "cut" else request)
        await writer.drain()
        if moment == "soon":
            await asyncio.sleep(self.draw.random() * 0.2)
        elif moment == "within":
            n_bytes = self.draw.randrange(1, 1000)  # events hold several tokens while the server is busy
            while n_bytes > 0 and (piece := await reader.read(n_bytes)):
                n_bytes -= len(piece)


def tokens_of(answer: bytes) -> Any:
    """The token ids of a whole streamed answer; what it says instead if it is none."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    if b" 200 " not in head.split(b"\r\n")[0] or not body.endswith(b"data: [DONE]\n\n"):
        return answer.decode()
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in body.split(b"\n\n")[:-2]]
    return [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", ())]


async def _run(soak: Soak, go: Callable[[], object]) -> None:
    """Run all clients, and call `go` when each has a request in the engine."""
    n_clients = min(N_STREAMS, len(soak.jobs))
    async with asyncio.timeout(300), asyncio.TaskGroup() as group:
        for _ in range(n_clients):
            group.create_task(soak.client())
        while soak.live.serving.client.n_open < n_clients:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(go)


@pytest.mark.slow
def test_clients_that_leave_cost_nobody_anything() -> None:
    """Floors of issue 7 and rules 1, 6, 7, 21, 23: 256 streams at once and 1,000 aborts at random moments, with the engine
    in its own process and too few pages; then the pool is full, nothing runs, and every whole answer was exact.
    """
    with small_engine(tiny_model(), max_num_seqs=32) as alone:
        expected = {
            (prompt, length): list(completion.token_ids)
            for length in (SHORT, LONG)
            for prompt, completion in zip(
                PROMPTS,
                alone.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)),  # type: ignore[arg-type]
                strict=True,
            )
        }
    draw = random.Random(0)
    first = [(draw.choice(PROMPTS), LONG, False) for _ in range(N_STREAMS)]
    rest = [
        (draw.choice(PROMPTS), LONG if i < N_ABORTS else SHORT, i < N_ABORTS) for i in range(N_ABORTS + N_ABORTS // 4)
    ]
    draw.shuffle(rest)
    make = functools.partial(small_engine, tiny_model(), n_pages=N_PAGES, max_num_seqs=64)
    with live_server(make, in_process=True, access_log=False, admin_key="root") as live:

        def admin(what: str) -> None:
            httpx.post(f"{live.url}/{what}", headers={"Authorization": "Bearer root"}).raise_for_status()

        client = live.serving.client
        admin("pause")  # so that all are there at once
        soak = Soak(live, expected, rest + first, draw)
        asyncio.run(_run(soak, lambda: admin("resume")))
        assert soak.wrong == [] and soak.n_whole == N_STREAMS + N_ABORTS // 4
        end = time.monotonic() + 20
        while True:  # the server hears of clients that left a little later
            health = client.health
            if not (client.n_open or live.serving.n_active or health is None or health.n_running or health.n_waiting):
                break
            assert time.monotonic() < end, (client.n_open, live.serving.n_active, health)
            time.sleep(0.05)
        assert health.n_pages_used == 0 and health.n_pages_free + health.n_pages_cached == N_PAGES
        assert health.status == "ok" and health.n_preemptions > 0 and live.serving.trouble() is None
        finished = live.serving.metrics.finished
        assert set(finished) == {"length", "abort"} and finished["length"] >= soak.n_whole
        assert finished["abort"] > N_ABORTS / 4 and finished.total() <= soak.n_whole + N_ABORTS
        admin("pause")
        soak.jobs = [(prompt, SHORT, False) for prompt in PROMPTS]
        asyncio.run(_run(soak, lambda: admin("resume")))
        assert soak.wrong == []
