"""What happens when clients leave, queues fill, engines die and servers stop (rules 10, 21-23)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import random
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from astrai_core.errors import EngineError, ModelNotFoundError
from astrai_core.types import Usage
from astrai_infer.client import EngineClient
from astrai_infer.engine import InferenceEngine
from astrai_infer.server import serving as serving_module
from astrai_infer.server.app import create_app
from astrai_infer.server.serving import Running, Serving
from astrai_infer.testing import small_engine, tiny_model
from astrai_infer.testing.server import Says, live_server, saying_engine, serving
from astrai_infer.wire import End, Piece

ASK = [{"role": "user", "content": "Hi!"}]
LONG = {"model": "tiny", "prompt": "a", "max_tokens": 200, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@contextlib.asynccontextmanager
async def local(engine: InferenceEngine, **config: Any) -> AsyncIterator[tuple[Serving, httpx.AsyncClient]]:
    async with serving(engine, **config) as served:
        transport = httpx.ASGITransport(create_app(served))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            yield served, http


def wait_for(truth: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait until something holds; fails if it does not."""
    end = time.monotonic() + seconds
    while not truth():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.01)


def post(url: str, body: dict[str, Any]) -> socket.socket:
    """Send a request and return the open connection."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    connection.sendall(f"{head}\r\n\r\n".encode() + data)
    return connection


class Slow(Says):
    """Takes twenty seconds and more for 4,000 tokens; picklable."""

    def __call__(self, token_id: int, position: int) -> int:
        time.sleep(0.005)
        return super().__call__(token_id, position)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_request(stream: bool) -> None:
    """Rule 21: the engine runs nothing within moments, and every page is back; streamed or not."""
    engine = small_engine(tiny_model(max_position_embeddings=100_000), n_pages=4096, max_num_seqs=4)
    with live_server(lambda: engine) as live:
        connection = post(live.url, {**LONG, "max_tokens": 60_000, "stream": stream})
        wait_for(lambda: engine.health().n_running == 1 and engine.health().n_steps > 3)
        connection.close()
        wait_for(lambda: engine.health().n_running == 0)
        health = engine.health()
        assert health.n_pages_used == 0 and health.n_steps < 50_000
        assert live.serving.metrics.finished == {"abort": 1} and live.serving.client.n_open == 0


def test_random_aborts_leave_the_pool_full() -> None:
    """Rule 7 over HTTP: 60 clients leave at random moments; nothing runs, no page is lost, the server goes on."""
    engine = small_engine(tiny_model(), n_pages=40, max_num_seqs=8)
    pages = engine.pool.n_free
    rng = random.Random(0)
    with live_server(lambda: engine) as live:
        for _ in range(60):
            connection = post(live.url, {**LONG, "stream": rng.random() < 0.5, "n": rng.choice([1, 3])})
            time.sleep(rng.random() * 0.03)
            connection.close()
        # One look at the engine: a request whose abort is still on its way may be between two of them.
        idle = lambda health: not (health.n_running or health.n_waiting or health.n_pages_used)
        wait_for(lambda: live.serving.client.n_open == 0 and idle(engine.health()), 30)
        health = engine.health()
        assert health.n_pages_free + health.n_pages_cached == pages
        assert httpx.post(f"{live.url}/v1/completions", json=LONG).status_code == 200


async def streamed(app: Any, body: dict[str, Any]) -> str:
    """Send one request past the sockets and return the text that is streamed."""
    parts: list[Any] = [{"type": "http.request", "body": json.dumps(body).encode()}]
    data = bytearray()

    async def receive() -> Any:
        return parts.pop() if parts else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        data.extend(message.get("body", b""))

    path, headers = "/v1/completions", [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
    await app(scope, receive, send)
    lines = [line[6:] for line in bytes(data).decode().split("\n\n") if line.startswith("data: {")]
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines)


@pytest.mark.anyio
@pytest.mark.parametrize("max_num_seqs", [64, 256])
async def test_many_streams_are_exact(max_num_seqs: int) -> None:
    """Rules 1, 23: 256 streams at once say what each says alone, and nothing holds the event loop for 50 ms; whether all
    of them run, or most wait for their turn.

    What is counted is the time that the loop's thread itself ran from one wake-up to the next, so that neither the
    engine beside it nor a busy machine is.
    """
    prompts = [f"prompt {i * i}" for i in range(256)]
    with small_engine(tiny_model(), max_num_seqs=64) as alone:
        expected = [c.text for c in alone.generate(prompts, _greedy(24))]  # type: ignore[union-attr]
    stalls: list[float] = []

    async def watch() -> None:
        while True:
            before = time.thread_time()
            await asyncio.sleep(0.001)
            stalls.append(time.thread_time() - before)

    async with serving(small_engine(tiny_model(), max_num_seqs=max_num_seqs), access_log=False) as served:
        app = create_app(served)
        body = {"model": "tiny", "max_tokens": 24, "temperature": 0, "stream": True}
        await streamed(app, {**body, "prompt": "warm"})
        gc.collect()
        gc.freeze()  # as `astrai serve` does
        watching = asyncio.create_task(watch())
        texts = await asyncio.gather(*(streamed(app, {**body, "prompt": prompt}) for prompt in prompts))
        watching.cancel()
        gc.unfreeze()
    assert texts == expected
    assert len(stalls) > 10 and max(stalls) < 0.05, sorted(stalls)[-5:]


def _greedy(n: int) -> Any:
    from astrai_core.types import SamplingParams

    return SamplingParams(temperature=0, max_tokens=n)


@pytest.mark.anyio
async def test_the_queue_is_bounded() -> None:
    """Rule 21: 429 with Retry-After when it is full; what could never fit is a 400."""
    engine = small_engine(tiny_model(), max_num_seqs=2)
    async with local(engine, max_queue=1) as (served, http):
        engine.pause()  # none of them ends before all have come
        tasks = [asyncio.create_task(http.post("/v1/completions", json=LONG)) for _ in range(3)]
        while served.client.n_open < 3:
            await asyncio.sleep(0)
        refused = await http.post("/v1/completions", json=LONG)
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        engine.resume()
        assert [answer.status_code for answer in await asyncio.gather(*tasks)] == [200] * 3
        assert (await http.post("/v1/completions", json={**LONG, "n": 4})).status_code == 400


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_takes_too_long_is_ended(stream: bool) -> None:
    engine = small_engine(tiny_model(max_position_embeddings=100_000), n_pages=4096, max_num_seqs=4)
    async with local(engine, request_timeout=0.3) as (served, http):
        answer = await http.post("/v1/completions", json={**LONG, "max_tokens": 60_000, "stream": stream})
        if stream:
            last = answer.text.removesuffix("\n\n").split("\n\n")[-1]
            error = json.loads(last.removeprefix("data: "))["error"]
        else:
            assert answer.status_code == 504
            error = answer.json()["error"]
        assert "took longer than the server allows" in error["message"]
        while served.client.health is None or served.client.health.n_running:
            await asyncio.sleep(0.01)
        assert served.client.n_open == 0


@pytest.mark.anyio
async def test_keys_sizes_and_ids() -> None:
    """Rule 22: API keys by either header, limits of bodies, request ids; probes are open."""
    async with local(saying_engine(Says("x")), api_key=("k1", "k2"), max_body_bytes=500) as (_, http):
        body = {"model": "tiny", "messages": ASK}
        for headers in ({}, {"Authorization": "Bearer k3"}, {"x-api-key": ""}, {"Authorization": "k1"}):
            refused = await http.post("/v1/chat/completions", json=body, headers=headers)
            assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
        for headers in ({"Authorization": "Bearer k1"}, {"x-api-key": "k2", "X-Request-Id": "mine-1"}):
            answer = await http.post("/v1/chat/completions", json=body, headers=headers)
            assert answer.status_code == 200
        assert answer.headers["x-request-id"] == "mine-1" and answer.json()["id"] == "chatcmpl-mine-1"
        evil = await http.get("/v1/models", headers={"x-api-key": "k1", "X-Request-Id": "a b"})
        assert len(evil.headers["x-request-id"]) == 24
        assert (await http.get("/health")).status_code == 200 and (await http.get("/metrics")).status_code == 401

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(60):
                yield b"0123456789"

        for content in (b"0" * 600, pieces()):
            large = await http.post("/v1/chat/completions", content=content, headers={"x-api-key": "k1"})
            assert large.status_code == 413 and "more than 500 bytes" in large.json()["error"]["message"]


@pytest.mark.anyio
async def test_metrics_tell_how_guesses_go() -> None:
    """Rule 22: vLLM's names of speculative decoding; a draft equal to the model is always right."""
    engine = small_engine(tiny_model(), draft_model=tiny_model(), speculation="draft", max_draft_tokens=4)
    async with local(engine) as (served, http):
        await http.post("/v1/completions", json={**LONG, "prompt": "x" * 40, "max_tokens": 21})
        while served.client.health is None or served.client.health.n_accepted < 16:
            await asyncio.sleep(0.01)
        text = (await http.get("/metrics")).text
    for name, count in (("drafts", 4), ("draft_tokens", 16), ("accepted_tokens", 16)):
        assert f'astrai:spec_decode_num_{name}_total{{model_name="tiny"}} {count}.0' in text


@pytest.mark.anyio
async def test_metrics_and_stats_tell_what_happened() -> None:
    """Rule 22: vLLM's names under both prefixes; totals and the last tasks."""
    async with local(small_engine(tiny_model()), vllm_metrics=True) as (_, http):
        for _ in range(2):
            await http.post("/v1/completions", json={**LONG, "prompt": "x" * 40, "max_tokens": 20})
        text = (await http.get("/metrics")).text
        stats = (await http.get("/stats")).json()
    for prefix in ("astrai", "vllm"):
        assert f'{prefix}:request_success_total{{finished_reason="length",model_name="tiny"}} 2.0' in text
        assert f'{prefix}:prompt_tokens_total{{model_name="tiny"}} 80.0' in text
        assert f'{prefix}:generation_tokens_total{{model_name="tiny"}} 40.0' in text
        assert f'{prefix}:prefix_cache_hits_total{{model_name="tiny"}} 32.0' in text
        assert f'{prefix}:time_to_first_token_seconds_count{{model_name="tiny"}} 2.0' in text
        assert f'{prefix}:inter_token_latency_seconds_count{{model_name="tiny"}} ' in text
        assert f'{prefix}:num_requests_running{{model_name="tiny"}} 0.0' in text
        assert f'{prefix}:kv_cache_usage_perc{{model_name="tiny"}} 0.0' in text
    assert stats["finished"] == {"length": 2} and [task["cached_tokens"] for task in stats["last"]] == [0, 32]
    assert stats["mean_ttft_s"] > 0 and stats["generation_tokens"] == 40


@pytest.mark.anyio
async def test_a_failing_step_ends_its_request_and_nothing_else() -> None:
    """Rule 10."""
    says = Says("fine")
    engine = saying_engine(says)
    good = engine.model.script

    def breaks(token: int, position: int) -> int:
        raise RuntimeError("the device is out of memory")

    async with local(engine) as (_, http):
        body = {"model": "tiny", "messages": ASK}
        engine.model.script = breaks  # type: ignore[assignment]
        failed = await http.post("/v1/chat/completions", json=body)
        assert failed.status_code == 500 and "out of memory" in failed.json()["error"]["message"]
        streamed = (await http.post("/v1/chat/completions", json={**body, "stream": True})).text
        assert "out of memory" in json.loads(streamed.removeprefix("data: "))["error"]["message"]
        engine.model.script = good
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
        assert (await http.get("/health")).status_code == 200


@pytest.mark.anyio
async def test_what_was_made_before_a_failure_is_given_out() -> None:
    """Rule 10: pieces that come at once with the error reach the client before it, also those of the other choices."""
    usage = Usage(prompt_tokens=1, completion_tokens=2, cached_tokens=0)
    failed = End("error", None, usage, None, 0, "the device is gone")
    done = failed._replace(finish_reason="stop", error=None)
    async with serving(saying_engine(Says("x"))) as served:
        running = Running(served, "r", [[1]], 2)
        generation = running._generation
        generation.add(7, 2)
        for choice, text, end in ((0, "fi", None), (1, "all", done), (0, "n", failed)):
            generation.put(Piece(7, choice, text, (), (), end))
        taken = []
        with pytest.raises(EngineError, match="the device is gone"):
            async for pieces in running:
                taken += [(piece.choice, piece.text, piece.end) for piece in pieces]
        assert taken == [(0, "fi", None), (1, "all", done), (0, "n", None)]


@pytest.mark.anyio
async def test_health_is_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules 10, 22: an engine whose steps hang, or whose loop died, is not healthy."""
    engine = saying_engine(Says("x" * 300))
    async with local(engine) as (served, http):
        assert (await http.get("/health")).json()["status"] == "ok"
        assert (await http.get("/ready")).json() == {"ready": True}
        monkeypatch.setattr(serving_module, "SILENT_S", -1.0)
        silent = await http.get("/health")
        assert silent.status_code == 503 and "said nothing" in silent.json()["reason"]
        monkeypatch.undo()
        served.draining = True
        assert (await http.get("/ready")).status_code == 503 and (await http.get("/health")).status_code == 200
        refused = await http.post("/v1/completions", json=LONG)
        assert refused.status_code == 503 and "shutting down" in refused.json()["error"]["message"]
        served.draining = False
        engine.close()
        while served.client.error is None:
            await asyncio.sleep(0.01)
        assert (await http.get("/health")).status_code == 503
        assert (await http.post("/v1/completions", json=LONG)).status_code == 503


def test_sigterm_finishes_what_runs_and_refuses_the_new() -> None:
    """Rule 21: the server goes on listening while it drains, then stops."""
    engine = small_engine(tiny_model(max_position_embeddings=8192), n_pages=1024, max_num_seqs=4)
    with live_server(lambda: engine) as live:
        running = post(live.url, {**LONG, "max_tokens": 400})
        wait_for(lambda: engine.health().n_running == 1)
        engine.pause()  # it cannot have ended before the next one comes
        live.server.handle_exit(signal.SIGTERM, None)
        refused = httpx.post(f"{live.url}/v1/completions", json=LONG)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
        engine.resume()
        data = b""
        while piece := running.recv(65536):
            data += piece
        assert b'"finish_reason":"length"' in data and b'"completion_tokens":400' in data
        assert live.stopped.wait(10)


def test_the_death_of_the_engine_fails_waiters_at_once() -> None:
    """Rule 10: kill -9 of the engine's process; waiters get an error within moments, health says so."""
    make = functools.partial(saying_engine, Slow("x" * 4000), max_num_seqs=4)
    with live_server(make, in_process=True) as live, httpx.Client(base_url=live.url, timeout=30) as http:
        worker: Any = live.serving.client.worker
        body = {**LONG, "prompt": "a\x01", "max_tokens": 4000, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: {")
            worker.kill()
            rest = [line for line in lines if line.startswith("data: ")]
        told = json.loads(rest[-1].removeprefix("data: "))
        assert "process ended" in told["error"]["message"]
        wait_for(lambda: live.serving.client.error is not None)
        health = http.get("/health")
        assert health.status_code == 503 and "process ended" in health.json()["reason"]
        refused = http.post("/v1/completions", json=LONG)
        assert refused.status_code == 503 and "process ended" in refused.json()["error"]["message"]


@pytest.mark.anyio
async def test_an_engine_that_cannot_be_made_says_why() -> None:
    make = functools.partial(InferenceEngine.from_pretrained, "./nowhere")
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        await EngineClient.start_thread(make)


@pytest.mark.anyio
async def test_admin_routes_need_their_key(tmp_path: Any) -> None:
    """Rule 12 over HTTP: pause, resume, sleep, wake and new weights, for the holder of the admin key alone."""
    from astrai_core import save_pretrained

    new = tiny_model(seed=1)
    save_pretrained(new, tmp_path / "new")
    ask = {"model": "tiny", "prompt": "abc", "max_tokens": 12, "temperature": 0}
    with small_engine(new) as engine:
        expected = engine.generate("abc", _greedy(12))
    async with local(small_engine(tiny_model())) as (_, http):
        assert (await http.post("/pause")).status_code == 404
    async with local(small_engine(tiny_model()), admin_key="root", api_key="user") as (served, http):
        user, root = {"Authorization": "Bearer user"}, {"Authorization": "Bearer root"}
        for headers in ({}, user):
            assert (await http.post("/pause", headers=headers)).status_code == 401
        old = (await http.post("/v1/completions", json=ask, headers=user)).json()["choices"][0]["text"]
        for stop, go in (("pause", "resume"), ("sleep", "wake")):
            assert (await http.post(f"/{stop}", headers=root)).json()["status"] == "paused"
            waiting = asyncio.create_task(http.post("/v1/completions", json=ask, headers=user))
            while not served.client.n_open:
                await asyncio.sleep(0)
            assert not (await asyncio.wait([waiting], timeout=0.05))[0]
            assert (await http.post(f"/{go}", headers=root)).json()["status"] == "ok"
            assert (await waiting).json()["choices"][0]["text"] == old
        body = {"path": str(tmp_path / "new"), "version": 7}
        assert (await http.post("/update_weights", json=body, headers=root)).json()["weight_version"] == 7
        text = (await http.post("/v1/completions", json=ask, headers=user)).json()["choices"][0]["text"]
        assert text == expected.text != old  # type: ignore[union-attr]
        for wrong in ({**body, "version": 7}, {**body, "path": "smollm2", "version": 8}):
            assert (await http.post("/update_weights", json=wrong, headers=root)).status_code == 400
