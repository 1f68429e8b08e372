"""Large bodies are read beside the event loop, and mean what small ones mean (rules 11, 19, 23)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astrai_infer.server import body as body_module
from astrai_infer.server.app import create_app
from astrai_infer.server.body import LARGE, MAX_VALUES, check_values
from astrai_infer.server.errors import ApiError
from astrai_infer.testing.server import Says, saying_engine, serving

ASK = [{"role": "user", "content": "Hi!"}]
LONG = "x" * LARGE
"""Stands in a field that changes nothing, and makes a body large."""

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet=',[]{}"\\ab\n'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet=',[{"\\'), inner),
    max_leaves=8,
)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@contextlib.asynccontextmanager
async def local(**config: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(saying_engine(Says("fine")), **config) as served:
        transport = httpx.ASGITransport(create_app(served), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            yield http


def n_values(value: Any) -> int:
    """Commas, colons and opening brackets of a value's JSON, by walking over it."""
    if not isinstance(value, (list, dict)):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    n_keys = len(value) if isinstance(value, dict) else 0
    return 1 + max(len(value) - 1, 0) + n_keys + sum(map(n_values, inner))


@settings(max_examples=60)
@given(VALUES, st.booleans(), st.integers(1, 5))
def test_values_are_counted_outside_of_texts(value: Any, ascii: bool, at_once: int) -> None:
    """Whatever texts hold, quotes and backslashes too, the limit is met exactly."""
    body, count = json.dumps(value, ensure_ascii=ascii).encode(), n_values(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_module, "_TEXTS_AT_ONCE", at_once)
        patch.setattr(body_module, "MAX_VALUES", count)
        check_values(body)
        if count:
            patch.setattr(body_module, "MAX_VALUES", count - 1)
            with pytest.raises(ApiError, match="numbers, texts and lists; send fewer"):
                check_values(body)


@pytest.mark.parametrize("body", [b'"' + b"\\" * (1 << 20), b'["' + b"a," * (1 << 19), b"[" * (1 << 20)])
def test_what_is_no_json_is_counted_in_one_pass(body: bytes) -> None:
    """A text that does not end makes the search neither quadratic nor deep; the parser then says what is wrong."""
    with contextlib.suppress(ApiError):
        check_values(body)
    with pytest.raises((json.JSONDecodeError, RecursionError)):
        json.loads(body)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": ASK}),
        ("/v1/chat/completions", {"messages": ASK, "bogus": 1}),
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/chat/completions", {"messages": ASK, "temperature": "1"}),
        ("/v1/completions", {"prompt": [-1]}),
        ("/v1/completions", {"prompt": "a", "stop": [1]}),
        ("/v1/messages", {"messages": ASK, "max_tokens": 5}),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 5}),
        ("/tokenize", {"prompt": "abc"}),
        ("/tokenize", {"prompt": "abc", "messages": ASK}),
        ("/detokenize", {"tokens": [97, None]}),
    ],
)
async def test_a_large_body_is_answered_as_a_small_one(path: str, body: dict[str, Any]) -> None:
    """Rule 19: the same answer or refusal. White space makes one of them large."""
    small = json.dumps({"model": "tiny", **body}).encode()
    answers = []
    async with local() as http:
        for content in (small, small + b" " * LARGE):
            headers = {"Content-Type": "application/json", "X-Request-Id": "same"}
            answer = await http.post(path, content=content, headers=headers)
            told = answer.json()
            told.pop("created", None)
            told.pop("usage", None)  # what is cached by now
            answers.append((answer.status_code, told))
    assert answers[0] == answers[1]


@pytest.mark.anyio
async def test_a_large_body_that_is_no_json_is_refused_as_a_small_one() -> None:
    headers = {"Content-Type": "application/json"}
    async with local() as http:
        for content in (
            b'{"model": ',
            b'{"model": ' + b" " * LARGE,
            b"[" * (MAX_VALUES // 2),
            b'{"a": "' + b"\\" * LARGE,
        ):
            answer = await http.post("/v1/completions", content=content, headers=headers)
            assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.anyio
async def test_large_bodies_are_read_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 23: neither the parser, the checks nor the conversation of a large body run in the event loop's thread."""
    here, seen = threading.get_ident(), []
    checked = body_module.check_values

    def check(body: bytes) -> None:
        seen.append(threading.get_ident())
        checked(body)

    monkeypatch.setattr(body_module, "check_values", check)
    async with local() as http:
        body = {"model": "tiny", "messages": [*ASK * 300, {"role": "system", "content": LONG}]}
        long = await http.post("/v1/chat/completions", json=body)
        body["messages"] = ASK
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
    assert len(seen) == 1 and seen[0] != here
    assert long.status_code == 400 and "max_seq_len is 4096" in long.json()["error"]["message"]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [1] * (MAX_VALUES + 9)}),
        ("/v1/embeddings", {"input": [[1]] * (MAX_VALUES // 2 + 9)}),
        ("/v1/chat/completions", {"messages": ASK * (MAX_VALUES // 3 + 9)}),
        ("/detokenize", {"tokens": [1] * (MAX_VALUES + 9)}),
    ],
)
async def test_values_are_bounded(path: str, body: dict[str, Any]) -> None:
    """The parser holds the interpreter lock while it runs: what would take it long is refused before."""
    async with local() as http:
        answer = await http.post(path, json={"model": "tiny", **body})
    assert answer.status_code == 413 and f"more than {MAX_VALUES} numbers" in answer.json()["error"]["message"]


@pytest.mark.anyio
async def test_long_texts_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that is sent as text is no list; its ids are written in parts, which join to what a small answer says."""
    monkeypatch.setattr(body_module, "MAX_VALUES", 100)
    async with local() as http:
        answer = await http.post("/tokenize", json={"prompt": "[1,{" * LARGE, "return_token_strs": True})
    told = answer.json()
    assert answer.status_code == 200 and told["count"] == 4 * LARGE
    assert told["tokens"] == [*b"[1,{"] * LARGE and told["token_strs"] == [*"[1,{"] * LARGE


@pytest.mark.anyio
async def test_what_can_never_be_served_stays_here() -> None:
    """Rules 6, 21: too long a prompt, or too many, are refused before the engine, or the tokenizer, is asked."""
    async with serving(saying_engine(Says("x"), max_num_seqs=2), max_queue=1) as served:
        asked: list[Any] = []

        async def never(*arguments: Any, **named: Any) -> Any:
            asked.append(arguments)
            await asyncio.Event().wait()

        served.client.submit = served.encode = never  # type: ignore[method-assign]
        transport = httpx.ASGITransport(create_app(served))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            for prompt, said in (
                ([1] * 4097, "prompt[0] has 4097 tokens, max_seq_len is 4096"),
                ([[1], [1] * 4097], "prompt[1] has 4097 tokens, max_seq_len is 4096"),
                (["a"] * 4, "asks for 4 completions, the server takes 3"),
                ([[1]] * 4, "asks for 4 completions, the server takes 3"),
            ):
                answer = await http.post("/v1/completions", json={"model": "tiny", "prompt": prompt})
                assert answer.status_code == 400 and said in answer.json()["error"]["message"]
    assert asked == []
