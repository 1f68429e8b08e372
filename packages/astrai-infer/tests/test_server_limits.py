"""What a server takes without stopping, stalling or dropping what others asked (rules 10, 17, 19-23)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from astrai_core.errors import EngineError
from astrai_core.types import SamplingParams, Usage
from astrai_infer.client import EngineClient, Generation
from astrai_infer.engine import InferenceEngine
from astrai_infer.server import docs, front, sse
from astrai_infer.server.app import create_app
from astrai_infer.server.metrics import Clock
from astrai_infer.server.openai_schema import MAX_BIASES
from astrai_infer.server.serving import Serving
from astrai_infer.testing import small_engine, tiny_model
from astrai_infer.testing.server import Held, Says, live_server, saying_engine, serving
from astrai_infer.wire import End, Piece, pack, read_messages

ASK = [{"role": "user", "content": "Hi!"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]
SURROGATE = '<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>'


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


pytestmark = pytest.mark.anyio


@contextlib.asynccontextmanager
async def local(engine: InferenceEngine, **config: Any) -> AsyncIterator[tuple[Serving, httpx.AsyncClient]]:
    async with serving(engine, **config) as served:
        transport = httpx.ASGITransport(create_app(served), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            yield served, http


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": [-1] * 100_000}, "prompt.0"),
        ("/v1/completions", {"prompt": [[None] * 100_000]}, "prompt.0.0"),
        ("/v1/completions", {"prompt": "a", "stop": [1] * 100_000}, "stop.0"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {str(i): "x" for i in range(90_000)}}, "logit_bias"),
        ("/v1/chat/completions", {"messages": [1] * 100_000}, "messages.0"),
        ("/v1/chat/completions", {"messages": ASK, "tools": [1] * 100_000}, "tools.0"),
        ("/v1/chat/completions", {"messages": ASK, **{f"x{i}": 1 for i in range(90_000)}}, "body"),
        ("/v1/messages", {"messages": [{"role": "user", "content": [1] * 100_000}], "max_tokens": 1}, None),
        ("/v1/embeddings", {"input": [None] * 100_000}, "input.0"),
    ],
)
async def test_many_mistakes_cost_no_more_than_one(path: str, body: Any, param: str | None) -> None:
    """Rules 11, 23: a body full of mistakes is refused in a moment; to list them all took half a minute."""
    async with local(saying_engine(Says("x"))) as (_, http):
        before = time.process_time()
        answer = await http.post(path, json={"model": "tiny", **body})
        assert time.process_time() - before < 1.5
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert len(error["message"]) < 200 and (param is None or error["param"] == param)


async def test_stop_strings_and_biases_are_bounded() -> None:
    """The thread that steps for everyone searches each new piece of text for all stop strings, and biases each row."""
    async with local(saying_engine(Says("x"))) as (_, http):
        many = await http.post(
            "/v1/chat/completions", json={"model": "tiny", "messages": ASK, "stop": [str(i) for i in range(65)]}
        )
        body = {"model": "tiny", "messages": ASK, "max_tokens": 5, "stop_sequences": ["y"] * 65}
        also = await http.post("/v1/messages", json=body)
        biases = {str(i): 1 for i in range(MAX_BIASES + 1)}
        biased = await http.post("/v1/completions", json={"model": "tiny", "prompt": "a", "logit_bias": biases})
    assert biased.status_code == 400 and "send fewer" in biased.json()["error"]["message"]
    for answer in (many, also):
        assert answer.status_code == 400 and "at most 64 items" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_half_a_surrogate_pair_is_no_call(stream: bool) -> None:
    """Rule 17: JSON can escape what UTF-8 cannot say; such a call is content, for both protocols, never a 500."""
    async with local(saying_engine(Says(SURROGATE), "hermes")) as (_, http):
        body = {"model": "tiny", "messages": ASK, "max_tokens": 200, "stream": stream}
        chat = await http.post("/v1/chat/completions", json={**body, "tools": TOOLS})
        tools = [{"name": "f", "input_schema": {"type": "object"}}]
        message = await http.post("/v1/messages", json={**body, "tools": tools})
    for answer, end in ((chat, "stop"), (message, "end_turn")):
        assert answer.status_code == 200 and "tool_use" not in answer.text and "tool_calls" not in answer.text
        assert f'"{end}"' in answer.text
        assert "".join(answer.text.split()).count("ud800") == 1


async def test_no_variable_of_the_template_breaks_the_call() -> None:
    async with local(saying_engine(Says("x"))) as (_, http):
        body = {"model": "tiny", "messages": ASK, "chat_template_kwargs": {"self": 1}}
        answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400 and "self is not a variable of yours" in answer.json()["error"]["message"]


async def test_a_call_that_fails_ends_alone() -> None:
    """Rule 10: a fault nobody foresaw, in a call beside the steps, fails that call and not the server."""
    async with local(saying_engine(Says("fine"))) as (served, http):  # its model has no hidden states
        failed = await http.post("/v1/embeddings", json={"model": "tiny", "input": "a"})
        assert failed.status_code == 500 and "embed failed: AttributeError" in failed.json()["error"]["message"]
        assert (await http.post("/v1/chat/completions", json={"model": "tiny", "messages": ASK})).status_code == 200
        assert served.n_embedding == 0


async def test_requests_for_embeddings_are_bounded() -> None:
    """Rule 21: they wait in the same queue as completions; what is too long is named by its place in the request."""
    async with local(small_engine(tiny_model(), max_num_seqs=2), max_queue=1) as (served, http):
        body = {"model": "tiny", "input": "a"}
        served.client._writer.transport.pause_reading()  # type: ignore[attr-defined]  # answers do not arrive
        tasks = [asyncio.create_task(http.post("/v1/embeddings", json=body)) for _ in range(3)]
        while served.n_embedding < 3:
            await asyncio.sleep(0)
        for path, asked in (("/v1/embeddings", body), ("/v1/completions", {"model": "tiny", "prompt": "a"})):
            refused = await http.post(path, json=asked)
            assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        served.client._writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert [answer.status_code for answer in await asyncio.gather(*tasks)] == [200] * 3
        assert served.n_embedding == 0
        long = await http.post("/v1/embeddings", json={"model": "tiny", "input": ["a"] * 20 + ["b" * 300]})
    assert long.status_code == 400 and "input[20] has 300 tokens" in long.json()["error"]["message"]


async def test_failed_completions_are_counted() -> None:
    """Rule 22: the totals know of every end."""
    engine = saying_engine(Says("x"))

    def breaks(token: int, position: int) -> int:
        raise RuntimeError("broken")

    engine.model.script = breaks  # type: ignore[assignment]
    async with local(engine) as (_, http):
        answer = await http.post("/v1/completions", json={"model": "tiny", "prompt": "abc", "n": 2, "max_tokens": 4})
        assert answer.status_code == 500
        finished = (await http.get("/stats")).json()["finished"]
        assert finished in ({"error": 2}, {"error": 1, "abort": 1})  # the other's end may come after the answer


@pytest.mark.parametrize("stream", [False, True])
def test_a_closed_connection_aborts_within_two_steps(stream: bool) -> None:
    """Rule 21: counted from the step in which the client leaves, whatever the time that a step takes."""
    says = Held("x" * 3000, 20)
    engine = saying_engine(says)
    with live_server(lambda: engine, admin_key="root") as live:
        data = json.dumps({"model": "tiny", "messages": ASK, "stream": stream}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", int(live.url.rpartition(":")[2]))) as connection:
            connection.sendall(head.encode() + data)
            assert says.reached.wait(60)
            before = engine.health().n_steps
        end = time.monotonic() + 20
        while live.serving.client.n_open:
            assert time.monotonic() < end, "the server has not heard of it"
            time.sleep(0.001)
        # The engine reads what it is told in turn, so that when it refuses this it knows of the abort.
        wrong = {"path": "/nowhere", "version": 1}
        refused = httpx.post(f"{live.url}/update_weights", json=wrong, headers={"Authorization": "Bearer root"})
        assert refused.status_code == 400
        says.go.set()
        while engine.health().n_running:
            assert time.monotonic() < end, "it goes on"
            time.sleep(0.001)
        assert engine.health().n_steps - before <= 2
        assert live.serving.metrics.finished == {"abort": 1} and engine.health().n_pages_used == 0


async def test_the_deadline_holds_for_a_client_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 21: its completions end and its connection is given up, though nothing can be sent to it."""
    monkeypatch.setattr(sse, "LAST_WORD_S", 0.05)
    closed = []

    class Endless:
        deadline_s = asyncio.get_running_loop().time() + 0.1

        def close(self) -> None:
            closed.append(asyncio.get_running_loop().time())

    async def events() -> AsyncIterator[bytes]:
        while True:
            yield b"data: x\n\n"

    async def receive() -> Any:
        await asyncio.Event().wait()

    n_sent = 0

    async def send(message: Any) -> None:
        nonlocal n_sent
        n_sent += 1
        if n_sent > 3:
            await asyncio.Event().wait()  # its window is full

    stream = sse.EventStream(events(), Endless(), lambda error: b"data: late\n\n")
    async with asyncio.timeout(5):
        await stream({"type": "http"}, receive, send)
    assert closed and closed[0] < Endless.deadline_s + 1


def test_a_channel_that_is_reset_has_ended() -> None:
    """The server may leave without having read all that the engine said."""
    ours, theirs = socket.socketpair()
    theirs.sendall(pack("the last"))
    ours.sendall(b"unread")
    theirs.close()  # with data it has not read: the next read is a reset
    with ours:
        assert list(read_messages(ours)) == ["the last"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("end", ["client", "host"])
async def test_a_channel_that_breaks_fails_waiters(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 10: whichever end breaks and however, nobody waits for ever."""
    engine = saying_engine(Says("x"))
    client = await EngineClient.start_thread(lambda: engine)

    def breaks(*_: Any) -> Any:
        raise ZeroDivisionError

    try:
        if end == "client":
            monkeypatch.setattr(client, "_dispatch", breaks)
        else:
            monkeypatch.setattr(engine, "health", breaks)
        async with asyncio.timeout(10):
            with pytest.raises(EngineError, match=r"stopped listening|process ended"):
                await client.submit(Generation(client), [1], SamplingParams(max_tokens=1))
        assert client.error is not None
    finally:
        monkeypatch.undo()
        await client.close()


async def test_each_sdk_finds_its_request_id_and_lines_cannot_be_forged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="astrai_infer.server.access")
    async with local(saying_engine(Says("x"))) as (_, http):
        answer = await http.get("/x%0AGET /y 200", headers={"X-Request-Id": "mine"})
    assert answer.headers["request-id"] == answer.headers["x-request-id"] == "mine"
    (record,) = [r for r in caplog.records if r.name == "astrai_infer.server.access"]
    assert "GET /x%0AGET%20/y%20200 404" in record.getMessage() and "\n" not in record.getMessage()


async def test_a_failed_tool_is_told_as_such() -> None:
    """Rule 19: is_error is honoured."""
    counts = []
    async with local(saying_engine(Says("x"))) as (_, http):
        for is_error in (False, True):
            result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "R", "is_error": is_error}
            use = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}
            turns = [*ASK, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
            counted = await http.post("/v1/messages/count_tokens", json={"model": "tiny", "messages": turns})
            counts.append(counted.json()["input_tokens"])
    assert counts[1] - counts[0] == len("Error: ")


async def test_the_api_is_described_without_outside_requests() -> None:
    """Rule 22: /docs is one file without scripts, open to all, and names every route and field."""
    async with local(saying_engine(Says("x")), api_key="k", admin_key="r") as (_, http):
        page = await http.get("/docs")
        document = (await http.get("/openapi.json")).json()
        assert (await http.get("/redoc")).status_code == 401
    assert page.status_code == 200 and page.headers["content-security-policy"] == docs.POLICY
    html = page.text
    assert not any(each in html for each in ("http:", "https:", "<script", "src=", "@import", "url("))
    for path in document["paths"]:
        assert f" {path}</code>" in html
    for name, schema in document["components"]["schemas"].items():
        assert all(f"<td><code>{field}</code></td>" in html for field in schema.get("properties", ()))
        assert f'href="#{name}"' not in html or f'id="{name}"' in html, "links lead somewhere"
    assert docs.describe({"info": {"title": "<b>", "version": "1"}, "paths": {}}).count("<b>") == 0


async def test_a_burst_of_requests_begins_little_by_little() -> None:
    """Rule 23: between two turns of the event loop only a few of many requests begin."""
    begun: list[int] = []
    turn = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.append(turn)

    async with serving(saying_engine(Says("x")), access_log=False) as served:
        middleware = front.Front(app, served)
        scope = {"type": "http", "path": "/v1/models", "method": "GET", "headers": []}
        nothing: Callable[..., Any] = lambda *_: None
        tasks = [asyncio.create_task(middleware(dict(scope), nothing, nothing)) for _ in range(50)]
        while len(begun) < 50:
            await asyncio.sleep(0)
            turn += 1
        await asyncio.gather(*tasks)
        assert served.n_active == 0
    assert max(begun.count(each) for each in begun) <= 2 * front.BEGUN_AT_ONCE


async def test_the_rate_of_decoding_counts_what_came_after_the_first_piece() -> None:
    """Rule 22: also where pieces hold several tokens, or all of an answer comes at once."""
    usage = Usage(prompt_tokens=1, completion_tokens=5, cached_tokens=0)
    async with serving(saying_engine(Says("x"))) as served:
        counted = served.metrics.of("tiny")
        clock = Clock("r", 2, counted, started_s=time.monotonic() - 9)
        clock.on_pieces([Piece(7, 0, "all", (1, 2, 3, 4, 5), (), End("stop", None, usage, None, 0, None))])
        assert served.metrics.stats()["decode_tokens_per_s_per_request"] is None
        clock.on_pieces([Piece(7, 1, "ab", (1, 2), (), None)])
        clock.last_s[1] -= 3
        clock.on_pieces([Piece(7, 1, "c", (3,), (), None), Piece(7, 1, "de", (4, 5), (), None)])
        rate = served.metrics.stats()["decode_tokens_per_s_per_request"]
        assert counted.n_decoded == 3 and counted.decode_s >= 3 and 0 < rate <= 1
        assert counted.n_generated == 10 and counted.ttft.count == 2
