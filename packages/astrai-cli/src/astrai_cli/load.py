"""Load on a server that speaks OpenAI's API: when requests are sent, and what their clients see. Sending needs httpx."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import random
import string
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from multiprocessing.synchronize import Barrier
from statistics import fmean, quantiles
from typing import TYPE_CHECKING, Any

from astrai_core.errors import ConfigError, EngineError

if TYPE_CHECKING:
    import httpx

SAMPLE = (
    "Every morning the keeper of the lighthouse climbs two hundred stairs, cleans the lens, and writes down which ships "
    "have passed. Rain or snow, he never misses one; his daughter keeps the older books in a wooden box near the stove. "
    "Nobody reads them, but when a storm takes the telegraph away they are all that the island knows about the world."
)
"""Prompts are drawn from the tokens of this text and of the printable characters."""


@dataclass(frozen=True)
class Plan:
    """What is sent.

    Attributes
    ----------
    n_requests
        Completions to ask for.
    rate
        Mean arrivals per second, exponentially spaced (a Poisson process); None sends all at once.
    prompt_len, new_tokens
        Shortest and longest, in tokens; drawn evenly.
    seed
        Of arrivals, lengths and prompts.
    """

    n_requests: int
    rate: float | None
    prompt_len: tuple[int, int]
    new_tokens: tuple[int, int]
    seed: int

    def jobs(self, token_ids: Sequence[int]) -> list[Job]:
        """Draw the requests; their prompts are made of `token_ids`."""
        draw, due_s, jobs = random.Random(self.seed), 0.0, []
        for _ in range(self.n_requests):
            prompt = draw.choices(token_ids, k=draw.randint(*self.prompt_len))
            jobs.append(Job(due_s, prompt, draw.randint(*self.new_tokens)))
            due_s += 0.0 if self.rate is None else draw.expovariate(self.rate)
        return jobs


@dataclass(frozen=True)
class Job:
    """One request: when it is due, in seconds from the start, and what it asks for."""

    due_s: float
    prompt: list[int]
    new_tokens: int


@dataclass
class Record:
    """What became of a job. Times are seconds from the start of the load.

    Attributes
    ----------
    gaps
        (seconds per token, tokens) of each piece after the first.
    """

    due_s: float
    sent_s: float
    ended_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    first_s: float | None = None
    gaps: list[tuple[float, int]] = field(default_factory=list)
    error: str | None = None


@dataclass(frozen=True)
class Server:
    """Where requests go.

    Attributes
    ----------
    timeout_s
        A request that gets nothing for so long has failed.
    """

    url: str
    api_key: str | None
    timeout_s: float

    def client(self) -> httpx.AsyncClient:
        """Return a client without a limit of its own on connections.

        Raises
        ------
        ConfigError
            If the URL is none.
        """
        import httpx

        headers = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        try:
            url = httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise ConfigError(f"field 'url': {self.url!r} is not a URL ({error}); write http://HOST:PORT") from None
        return httpx.AsyncClient(base_url=url, headers=headers, timeout=self.timeout_s, limits=limits, trust_env=False)


class Target:
    """A model on a server.

    Parameters
    ----------
    http
        Its ``base_url`` is the server's.
    model
        The name to ask for.
    stream
        Without it there is neither a first token nor a time between tokens.
    """

    def __init__(self, http: httpx.AsyncClient, model: str, *, stream: bool = True) -> None:
        self._http = http
        self.model = model
        self._stream = stream

    @classmethod
    async def find(cls, http: httpx.AsyncClient, model: str | None, *, stream: bool = True) -> Target:
        """Ask the server what it serves; by default the first model is taken.

        Raises
        ------
        EngineError
            If there is no such server, or it refuses.
        """
        listed = [each["id"] for each in (await _ask(http, "GET", "/v1/models"))["data"]]
        if model is not None and model not in listed:
            raise EngineError(f"{http.base_url} does not serve {model!r}; ask for one of {', '.join(listed)}")
        return cls(http, model or listed[0], stream=stream)

    async def token_ids(self) -> list[int]:
        """Return different ids of the model's vocabulary, by the server's own tokenizer.

        Raises
        ------
        EngineError
            If the server cannot tokenize.
        """
        body = {"model": self.model, "prompt": SAMPLE + string.printable, "add_special_tokens": False}
        return sorted(set((await _ask(self._http, "POST", "/tokenize", body))["tokens"]))

    async def run(self, jobs: Sequence[Job], concurrency: int | None = None) -> list[Record]:
        """Send each job when it is due, at most `concurrency` at once; return when all have ended."""
        import httpx

        loop = asyncio.get_running_loop()
        slots = contextlib.nullcontext() if concurrency is None else asyncio.Semaphore(concurrency)
        start_s = loop.time()

        async def one(job: Job) -> Record:
            await asyncio.sleep(start_s + job.due_s - loop.time())
            async with slots:
                record = Record(job.due_s, loop.time() - start_s)
                try:
                    await self._complete(job, record, start_s)
                except httpx.HTTPError as error:
                    record.error = f"{type(error).__name__}: {error}".rstrip(": ")
                record.ended_s = loop.time() - start_s
                return record

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(job)) for job in jobs]
        return [task.result() for task in tasks]

    async def _complete(self, job: Job, record: Record, start_s: float) -> None:
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": job.prompt,
            "max_tokens": job.new_tokens,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        if self._stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                record.error = f"{response.status_code}: {_message(await response.aread())}"
            elif self._stream:
                await self._follow(response, record, start_s)
            else:
                _count(record, json.loads(await response.aread())["usage"])

    async def _follow(self, response: httpx.Response, record: Record, start_s: float) -> None:
        loop, last_s, complete = asyncio.get_running_loop(), 0.0, False
        async for events in _events(response):
            now_s, n_tokens = loop.time() - start_s, 0
            for event in events:
                if event == b"[DONE]":
                    complete = True
                    continue
                chunk = json.loads(event)
                if "error" in chunk:
                    record.error = chunk["error"]["message"]
                    return
                if chunk.get("usage"):
                    _count(record, chunk["usage"])
                for choice in chunk["choices"]:
                    # A server that does not tell token ids sends a piece for each token.
                    n_tokens += len(choice.get("token_ids") or choice["text"][:1])
            if n_tokens and record.first_s is None:
                record.first_s = now_s
            elif n_tokens:
                record.gaps.append(((now_s - last_s) / n_tokens, n_tokens))
            last_s = now_s if n_tokens else last_s
        if not complete:
            record.error = "the stream ended before [DONE]"


def send(
    server: Server, model: str, stream: bool, jobs: Sequence[Job], concurrency: int | None, n_processes: int = 1
) -> list[Record]:
    """Send the jobs, from several processes if one cannot keep up; they start together.

    One process reads about 10,000 pieces a second. Each takes every n-th job, and its share of the concurrency.
    """
    if n_processes == 1:
        return asyncio.run(_send(server, model, stream, jobs, concurrency))
    context = multiprocessing.get_context("spawn")
    shares = [
        (server, model, stream, jobs[i::n_processes], concurrency and (concurrency + i) // n_processes)
        for i in range(n_processes)
    ]
    barrier = context.Barrier(n_processes)
    with context.Pool(n_processes, initializer=_meet, initargs=(barrier,)) as pool:
        return [record for records in pool.starmap(send, shares, chunksize=1) for record in records]


def _meet(barrier: Barrier) -> None:
    """Wait for the other processes, with all that is needed imported."""
    import httpx  # noqa: F401

    barrier.wait()


async def _send(server: Server, model: str, stream: bool, jobs: Sequence[Job], concurrency: int | None) -> list[Record]:
    async with server.client() as http:
        return await Target(http, model, stream=stream).run(jobs, concurrency)


async def _events(response: httpx.Response) -> AsyncIterator[list[bytes]]:
    """Yield the data of the events that arrived together."""
    rest = b""
    async for data in response.aiter_bytes():
        *events, rest = (rest + data).split(b"\n\n")
        yield [event.removeprefix(b"data: ") for event in events]


async def _ask(http: httpx.AsyncClient, method: str, path: str, body: Any = None) -> Any:
    import httpx

    try:
        answer = await http.request(method, path, json=body)
    except httpx.HTTPError as error:
        raise EngineError(
            f"{http.base_url} cannot be reached ({type(error).__name__}); start a server with `astrai serve`,"
            " or name another --url"
        ) from error
    if answer.status_code != 200:
        raise EngineError(f"{http.base_url} refused {path} with {answer.status_code}: {_message(answer.content)}")
    return answer.json()


def _count(record: Record, usage: dict[str, Any]) -> None:
    record.prompt_tokens, record.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]


def _message(body: bytes) -> str:
    """The message of an error's envelope, or the body's beginning."""
    try:
        return json.loads(body)["error"]["message"]
    except (ValueError, TypeError, KeyError):
        return body[:200].decode("utf-8", errors="replace")


@dataclass(frozen=True)
class Spread:
    """Percentiles (linear interpolation between ranks), mean and maximum, in seconds."""

    p50: float
    p90: float
    p99: float
    mean: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """Summarise values; None of none."""
        if not values:
            return None
        ranks = quantiles(values, n=100, method="inclusive") if len(values) > 1 else [values[0]] * 99
        return cls(ranks[49], ranks[89], ranks[98], fmean(values), max(values))


@dataclass(frozen=True)
class LoadReport:
    """What a load came to. Tokens and times are those of the requests that succeeded.

    Attributes
    ----------
    errors
        Message -> how many requests ended with it.
    duration_s
        From the first request sent to the last one ended.
    peak_concurrency
        Most requests in flight at once.
    ttft_s
        From sending a request to its first token.
    itl_s
        Between tokens; tokens that came together share the time since those before.
    latency_s
        From sending a request to its end.
    wait_s
        From when a request was due until it was sent: what a limit on concurrency hides from the other times.
    """

    n_requests: int
    n_failed: int
    errors: dict[str, int]
    duration_s: float
    peak_concurrency: int
    requests_per_s: float
    prompt_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_s: Spread | None
    itl_s: Spread | None
    latency_s: Spread | None
    wait_s: Spread | None

    @classmethod
    def of(cls, records: Sequence[Record]) -> LoadReport:
        """Summarise at least one record."""
        good = [record for record in records if record.error is None]
        duration_s = max(record.ended_s for record in records) - min(record.sent_s for record in records)
        prompt, output = sum(r.prompt_tokens for r in good), sum(r.output_tokens for r in good)
        per_s = lambda amount: amount / duration_s if duration_s else 0.0
        return cls(
            n_requests=len(records),
            n_failed=len(records) - len(good),
            errors=dict(Counter(record.error for record in records if record.error is not None).most_common()),
            duration_s=duration_s,
            peak_concurrency=_peak(records),
            requests_per_s=per_s(len(good)),
            prompt_tokens=prompt,
            output_tokens=output,
            output_tokens_per_s=per_s(output),
            total_tokens_per_s=per_s(prompt + output),
            ttft_s=Spread.of([r.first_s - r.sent_s for r in good if r.first_s is not None]),
            itl_s=Spread.of([gap for record in good for gap, n in record.gaps for _ in range(n)]),
            latency_s=Spread.of([r.ended_s - r.sent_s for r in good]),
            wait_s=Spread.of([r.sent_s - r.due_s for r in records]),
        )


def _peak(records: Sequence[Record]) -> int:
    """Most records whose times overlap; one that ends when another is sent does not overlap it."""
    changes = sorted([(r.sent_s, 1) for r in records] + [(r.ended_s, -1) for r in records])
    return max(accumulate(change for _, change in changes))
