"""OpenAI's routes in this process: answers, streams, refusals (rules 13-20)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from astrai_infer.config import EngineConfig
from astrai_infer.engine import InferenceEngine
from astrai_infer.server.app import create_app
from astrai_infer.testing import small_engine, tiny_model
from astrai_infer.testing.server import Says, chat_tokenizer, saying_engine, serving

ASK = [{"role": "user", "content": "Hi!"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"$ref": "#/$defs/City"}},
                "required": ["city"],
                "additionalProperties": False,
                "$defs": {"City": {"enum": ["Oslo", "Rome"]}},
            },
        },
    },
    {"type": "function", "function": {"name": "stop"}},
]
CALLS = (
    'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
    '<tool_call>{"name": "stop"}</tool_call>'
)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


pytestmark = pytest.mark.anyio


@asynccontextmanager
async def client(engine: InferenceEngine, **config: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(engine, **config) as served:
        transport = httpx.ASGITransport(create_app(served))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            yield http


async def chat(http: httpx.AsyncClient, status: int = 200, **body: Any) -> Any:
    answer = await http.post("/v1/chat/completions", json={"model": "tiny", "messages": ASK, **body})
    assert answer.status_code == status, answer.text
    return answer.json()


async def events(http: httpx.AsyncClient, path: str = "/v1/chat/completions", **body: Any) -> list[Any]:
    answer = await http.post(path, json={"model": "tiny", "stream": True, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("\n\n"), "every event ends with a blank line"
    lines = answer.text.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def joined(chunks: list[Any], n: int = 1) -> list[dict[str, Any]]:
    """The messages that a client puts together from a stream."""
    messages: list[dict[str, Any]] = [{} for _ in range(n)]
    for chunk in chunks:
        for choice in chunk["choices"]:
            message, delta = messages[choice["index"]], choice["delta"]
            for name in ("content", "reasoning_content"):
                if delta.get(name) is not None:
                    message[name] = message.get(name, "") + delta[name]
            for call in delta.get("tool_calls", ()):
                message.setdefault("calls", []).append((call["index"], call["function"]))
            message["finish_reason"] = choice["finish_reason"] or message.get("finish_reason")
    return messages


@pytest.mark.parametrize("kind", ["hermes", "think", "plain"])
async def test_a_stream_joins_to_the_whole_answer(kind: str) -> None:
    """Rules 13, 17: text, thoughts and calls, the same from both."""
    says = Says("<think>\nHm…\n</think>\n\nÄ: " + CALLS if kind == "think" else CALLS)
    async with client(saying_engine(says, kind)) as http:
        tools: dict[str, Any] = {"tools": TOOLS} if kind == "hermes" else {}
        whole = (await chat(http, messages=ASK, **tools))["choices"][0]
        stream = joined(await events(http, messages=ASK, **tools))[0]
    message = whole["message"]
    assert stream.get("content", "") == message["content"]
    assert stream.get("reasoning_content") == message.get("reasoning_content")
    assert stream["finish_reason"] == whole["finish_reason"]
    functions = [(i, call["function"]) for i, call in enumerate(message.get("tool_calls", ()))]
    assert stream.get("calls", []) == functions
    if kind == "hermes":
        assert message["content"] == "I look." and whole["finish_reason"] == "tool_calls"
        assert functions == [
            (0, {"name": "get_weather", "arguments": '{"city": "Oslo"}'}),
            (1, {"name": "stop", "arguments": "{}"}),
        ]
    elif kind == "think":
        assert message["reasoning_content"] == "Hm…" and message["content"] == "Ä: " + CALLS
        assert whole["finish_reason"] == "stop"


async def test_the_template_may_open_the_thought() -> None:
    async with client(saying_engine(Says("Hm.</think>Yes.", ord("\n")), "think_opened")) as http:
        message = (await chat(http))["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")


async def test_tools_that_a_client_does_not_want() -> None:
    """Rule 17: tool_choice none; parallel_tool_calls false keeps the first call."""
    async with client(saying_engine(Says(CALLS), "hermes")) as http:
        none = (await chat(http, tools=TOOLS, tool_choice="none"))["choices"][0]
        assert none["message"]["content"] == CALLS and none["finish_reason"] == "stop"
        one = (await chat(http, tools=TOOLS, parallel_tool_calls=False))["choices"][0]
        assert [call["function"]["name"] for call in one["message"]["tool_calls"]] == ["get_weather"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
async def test_a_call_can_be_required(choice: Any) -> None:
    """Rule 17: a random model, forced by a grammar; the arguments obey the function's schema, its $defs included."""
    tiny = tiny_model(max_position_embeddings=2048)
    asked = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "seed": 3, "max_tokens": 900}
    async with client(InferenceEngine(tiny, chat_tokenizer("hermes"), EngineConfig(max_num_seqs=4))) as http:
        answer = (await chat(http, **asked))["choices"][0]
        stream = joined(await events(http, messages=ASK, **asked))[0]
    calls = answer["message"]["tool_calls"]
    assert answer["finish_reason"] == "tool_calls" and answer["message"]["content"] is None
    assert stream["calls"] == [(i, call["function"]) for i, call in enumerate(calls)]
    for call in calls:
        arguments = json.loads(call["function"]["arguments"])
        if call["function"]["name"] == "get_weather":
            assert arguments in ({"city": "Oslo"}, {"city": "Rome"})
    if isinstance(choice, dict):
        assert [call["function"]["name"] for call in calls] == ["get_weather"]


def told(entry: dict[str, Any]) -> Any:
    """A token and its likeliest neighbours; a prompt that was cached is computed in another order of sums."""
    return (
        entry["bytes"],
        round(entry["logprob"], 4),
        [(t["bytes"], round(t["logprob"], 4)) for t in entry["top_logprobs"]],
    )


async def test_logprobs_choices_and_usage() -> None:
    """Rules 4, 20: the chosen token is in the top list; usage is told once, and only when asked."""
    asked = {
        "max_tokens": 6,
        "temperature": 1.0,
        "seed": 5,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 3,
        "logit_bias": {"256": -100},
    }
    async with client(small_engine(tiny_model())) as http:
        whole = await chat(http, **asked)
        silent = await events(http, messages=ASK, **asked)
        counted = await events(http, messages=ASK, stream_options={"include_usage": True}, **asked)
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert [m["content"] for m in joined(silent, 2)] == texts == [m["content"] for m in joined(counted, 2)]
    assert len(set(texts)) == 2, "choices differ"
    for i, choice in enumerate(whole["choices"]):
        entries = choice["logprobs"]["content"]
        assert len(entries) == 6
        assert all(entry["token"] in [top["token"] for top in entry["top_logprobs"]] for entry in entries)
        data = b"".join(bytes(entry["bytes"]) for entry in entries)
        assert data.decode("utf-8", "replace") == choice["message"]["content"]
        streamed = [
            entry
            for chunk in silent
            for each in chunk["choices"]
            if each["index"] == i and each["logprobs"]
            for entry in each["logprobs"]["content"]
        ]
        assert [told(entry) for entry in streamed] == [told(entry) for entry in entries]
    assert not any("usage" in chunk for chunk in silent)
    assert counted[-1]["choices"] == [] and all(chunk["usage"] is None for chunk in counted[:-1])
    assert counted[-1]["usage"]["completion_tokens"] == 12 == whole["usage"]["completion_tokens"]
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert counted[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}, "a page, from the answer before"


async def test_stop_strings_and_ids() -> None:
    """Rule 15: finish reasons are exact."""
    async with client(saying_engine(Says("one two three"))) as http:
        assert (await chat(http, stop=" three"))["choices"][0]["message"]["content"] == "one two"
        stopped = (await chat(http, stop=["zzz", "wo"]))["choices"][0]
        assert (stopped["message"]["content"], stopped["finish_reason"], stopped["stop_reason"]) == (
            "one t",
            "stop",
            "wo",
        )
        assert (await chat(http, stop_token_ids=[ord("t")]))["choices"][0]["stop_reason"] == ord("t")
        cut = (await chat(http, max_completion_tokens=3))["choices"][0]
        assert (cut["message"]["content"], cut["finish_reason"]) == ("one", "length")
        kept = await chat(http, stop="two", include_stop_str_in_output=True)
        assert kept["choices"][0]["message"]["content"] == "one two"
        biased = await chat(http, logit_bias={str(ord("o")): -100}, max_tokens=1, temperature=0)
        assert biased["choices"][0]["message"]["content"] != "o"


async def test_completions_echo_and_logprobs() -> None:
    """Echo gives the prompt back, with its log-probabilities; max_tokens 0 scores it."""
    async with client(small_engine(tiny_model())) as http:

        async def complete(**body: Any) -> Any:
            answer = await http.post("/v1/completions", json={"model": "tiny", "temperature": 0, **body})
            assert answer.status_code == 200, answer.text
            return answer.json()

        plain = await complete(prompt="abc", max_tokens=4)
        echoed = (await complete(prompt="abc", max_tokens=4, echo=True, logprobs=2))["choices"][0]
        assert echoed["text"] == "abc" + plain["choices"][0]["text"]
        told = echoed["logprobs"]
        assert told["tokens"][:3] == ["a", "b", "c"] and len(told["tokens"]) == 7 == len(told["text_offset"])
        assert told["token_logprobs"][0] is None and all(value < 0 for value in told["token_logprobs"][1:])
        assert [len("".join(told["tokens"][:i])) for i in range(7)] == told["text_offset"]
        scored = await complete(prompt="abc", max_tokens=0, echo=True, logprobs=2)
        assert scored["choices"][0]["text"] == "abc" and scored["usage"]["completion_tokens"] == 0
        assert scored["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx(told["token_logprobs"][:3], abs=1e-4)
        many = await complete(prompt=["abc", "xyz"], max_tokens=4, n=2, seed=1, return_token_ids=True)
        assert [choice["index"] for choice in many["choices"]] == [0, 1, 2, 3]
        assert many["choices"][1]["text"] == plain["choices"][0]["text"]
        assert many["choices"][3]["prompt_token_ids"] == list(b"xyz")
        assert many["usage"]["prompt_tokens"] == 6 and many["usage"]["completion_tokens"] == 16
        ids = await complete(prompt=list(b"abc"), max_tokens=4)
        assert ids["choices"][0]["text"] == plain["choices"][0]["text"]
        chunks = await events(http, "/v1/completions", prompt=["abc", "xyz"], max_tokens=4, temperature=0, echo=True)
        texts = ["", ""]
        for chunk in chunks:
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert texts[0] == echoed["text"] and texts[1].startswith("xyz")


@pytest.mark.parametrize("pooling", ["mean", "last"])
async def test_embeddings(pooling: str) -> None:
    """A decoder's hidden states, pooled; parity with the model itself."""
    import torch
    from torch.nn.functional import cosine_similarity

    model = tiny_model()
    hidden = model.hidden_states(torch.tensor([list(b"abc")]))[0]
    expected = hidden.mean(0) if pooling == "mean" else hidden[-1]
    async with client(small_engine(model), pooling=pooling) as http:
        answer = await http.post("/v1/embeddings", json={"model": "tiny", "input": ["abc", "zz"]})
        again = await http.post("/v1/embeddings", json={"model": "tiny", "input": list(b"abc")})
        bad = await http.post("/v1/embeddings", json={"model": "tiny", "input": ["abc", ""]})
    vectors = [item["embedding"] for item in answer.json()["data"]]
    assert cosine_similarity(torch.tensor(vectors[0]), expected, dim=0).item() == pytest.approx(1, abs=1e-5)
    assert torch.tensor(vectors[0]).norm().item() == pytest.approx(1, abs=1e-5) and vectors[0] != vectors[1]
    assert again.json()["data"][0]["embedding"] == vectors[0] and answer.json()["usage"]["prompt_tokens"] == 5
    assert bad.status_code == 400 and "input[1] is empty" in bad.json()["error"]["message"]


async def test_tokenize_and_detokenize() -> None:
    """Token ids in and out; one BOS at most in a templated prompt (rule 16)."""
    async with client(saying_engine(Says("x"))) as http:
        found = (await http.post("/tokenize", json={"prompt": "aé", "return_token_strs": True})).json()
        assert found["tokens"] == list("aé".encode()) and found["count"] == 3 and len(found["token_strs"]) == 3
        messages = (await http.post("/tokenize", json={"messages": ASK})).json()
        text = (await http.post("/detokenize", json={"tokens": messages["tokens"]})).json()
        assert text == {"prompt": "<user>Hi!<assistant>\x01"}
        assert (await chat(http))["usage"]["prompt_tokens"] == messages["count"]


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"bogus": 1}, "bogus", "bogus is not supported by this server; leave it out"),
        ({"best_of": 2}, "best_of", "not supported"),
        ({"top_p": 1.5}, "top_p", "less than or equal to 1 (got 1.5)"),
        ({"temperature": "0.5"}, "temperature", "should be a valid number"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"logit_bias": {"999": 1}}, None, "token id 999 is outside the vocabulary of 257"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "'a' is no token id"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "user"}]}, None, "messages[0].content is missing"),
        ({"messages": [{"role": "alien", "content": "x"}]}, "messages.0.role", "should be 'system'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content.0.type",
            "should be 'text'",
        ),
        ({"stream_options": {"include_usage": True}}, None, "stream_options needs stream: true"),
        ({"tools": TOOLS}, "tools", "chat template shows no tools"),
        ({"tool_choice": "required"}, None, "there are no tools"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema is given with"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "y"}}}},
            None,
            "json_schema cannot be used",
        ),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs", "not a variable of yours"),
        ({"n": 10_000}, "n", "less than or equal to 128"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, None, "max_seq_len is 4096"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_wrong_is_named(body: dict[str, Any], param: str | None, said: str, stream: bool) -> None:
    """Rule 19: a field that is not honoured is refused by name, in OpenAI's envelope, streamed or not."""
    if stream and "stream_options" in body:
        return
    async with client(saying_engine(Says("x"))) as http:
        error = (await chat(http, 400, **{"stream": stream, **body}))["error"]
    assert said in error["message"] and error["type"] == "invalid_request_error"
    assert error["param"] == param or param is None


async def test_defaults_come_from_the_model() -> None:
    """A request's own value, else generation_config.json, else the protocol's; rep_window is 0 over HTTP (rule 3)."""
    engine = saying_engine(Says("x"))
    engine.generation_config = {"do_sample": True, "temperature": 0.5, "top_k": 7, "eos_token_id": 256}
    async with serving(engine) as served:
        plain = served.sampling({"top_p": None})
        own = served.sampling({"top_k": 0, "temperature": 0.0})
    assert (plain.temperature, plain.top_k, plain.top_p, plain.rep_window) == (0.5, 7, 1.0, 0)
    assert (own.temperature, own.top_k) == (0.0, 0)


async def test_the_model_must_be_served_here() -> None:
    async with client(saying_engine(Says("x")), served_model_name=("a", "b")) as http:
        listed = (await http.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["a", "b"]
        assert (await http.get("/v1/models/b")).json()["max_model_len"] == 4096
        error = (await chat(http, 404))["error"]
        assert error["code"] == "model_not_found" and "ask for 'a'" in error["message"]
