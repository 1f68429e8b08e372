"""What the fields of a request and the flags of parsers do over HTTP (rules 3, 11, 16-19)."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from astrai_core.tokenizer.chat_template import ChatTemplate
from astrai_core.types import Request
from astrai_infer.engine import InferenceEngine
from astrai_infer.server.app import create_app
from astrai_infer.server.openai_schema import ChatRequest, CompletionRequest, Sampling
from astrai_infer.server.serving import Serving
from astrai_infer.testing import small_engine, tiny_model
from astrai_infer.testing.server import Says, saying_engine, serving

ASK = [{"role": "user", "content": "Hi!"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]

SAMPLED: dict[str, tuple[Any, Any]] = {
    **{name: (value, value) for name, value in {"temperature": 0.5, "top_p": 0.9, "n": 2, "seed": 7}.items()},
    **{name: (value, value) for name, value in {"presence_penalty": 0.5, "frequency_penalty": -0.5}.items()},
    **{name: (value, value) for name, value in {"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.5}.items()},
    **{name: (value, value) for name, value in {"rep_window": 9, "min_tokens": 2, "ignore_eos": True}.items()},
    "stop": ("x", ("x",)),
    "stop_token_ids": ([5, 6], (5, 6)),
    "logit_bias": ({"5": 1.5}, {5: 1.5}),
    "include_stop_str_in_output": (True, True),
    "skip_special_tokens": (False, False),
    "logprobs_mode": ("processed", "processed"),
}
"""Field of both of OpenAI's routes -> what is sent, what SamplingParams then holds."""
TOLD_OTHERWISE = {"model", "stream", "stream_options", "user", "return_token_ids", "priority", "structured_outputs"}
MEANS_NOTHING = {"store", "service_tier"}
"""Only the values that ask for what happens anyway are taken."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


pytestmark = pytest.mark.anyio


@asynccontextmanager
async def local(engine: InferenceEngine, **config: Any) -> AsyncIterator[tuple[Serving, httpx.AsyncClient]]:
    async with serving(engine, **config) as served:
        transport = httpx.ASGITransport(create_app(served))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            yield served, http


async def message(http: httpx.AsyncClient, **body: Any) -> Any:
    answer = await http.post("/v1/chat/completions", json={"model": "tiny", "messages": ASK, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


async def test_every_field_reaches_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 19: a field that the schema knows is honoured. One that is added to it must be named here."""
    assert set(Sampling.model_fields) == SAMPLED.keys() | TOLD_OTHERWISE | MEANS_NOTHING
    engine = small_engine(tiny_model())
    asked: list[Request] = []
    submit = engine.submit

    def note(request: Request, deliver: Any) -> None:
        asked.append(request)
        submit(request, deliver)

    monkeypatch.setattr(engine, "submit", note)
    body = {"model": "tiny", "max_tokens": 5, "priority": 4, **{name: sent for name, (sent, _) in SAMPLED.items()}}
    async with local(engine) as (_, http):
        for path, more in (
            ("/v1/completions", {"prompt": "a", "logprobs": 2}),
            ("/v1/chat/completions", {"messages": ASK, "logprobs": True, "top_logprobs": 2}),
        ):
            answer = await http.post(path, json={**body, **more})
            assert answer.status_code == 200, answer.text
    for request in asked:
        held = {name: getattr(request.params, name) for name in SAMPLED}
        assert held == {name: expected for name, (_, expected) in SAMPLED.items()}
        assert (request.params.max_tokens, request.params.logprobs, request.priority) == (5, 2, 4)
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("language", "pattern"),
    [
        ({"regex": "[ab]{3}c"}, "[ab]{3}c"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'start: "x" ("y" | "z") "!"'}, "x[yz]!"),
        (
            {"json": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2}},
            r"\[\s*[12]\s*,\s*[12]\s*\]",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_text_belongs_to_the_language(language: Any, pattern: str, stream: bool) -> None:
    """Rule 18: a random model, both routes; each choice of several obeys."""
    body = {"model": "tiny", "structured_outputs": language, "seed": 1, "n": 2, "max_tokens": 100, "stream": stream}
    async with local(small_engine(tiny_model(max_position_embeddings=2048), n_pages=64)) as (_, http):
        for path, more in (("/v1/completions", {"prompt": "abc"}), ("/v1/chat/completions", {"messages": ASK})):
            answer = await http.post(path, json={**body, **more})
            assert answer.status_code == 200, answer.text
            texts = ["", ""]
            lines = answer.text.split("\n\n")[:-2] if stream else [f"data: {answer.text}"]
            for choice in (each for line in lines for each in json.loads(line[6:])["choices"]):
                said = choice.get("message") or choice.get("delta") or choice
                texts[choice["index"]] += said.get("content") or said.get("text") or ""
            assert all(re.fullmatch(pattern, text) for text in texts), texts


@pytest.mark.parametrize("choice", [{"response_format": {"type": "json_object"}}, {"tool_choice": "required"}])
async def test_one_language_at_a_time(choice: Any) -> None:
    body = {"model": "tiny", "messages": ASK, "tools": TOOLS, "structured_outputs": {"regex": "a"}, **choice}
    async with local(saying_engine(Says("x"), "hermes")) as (_, http):
        answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400 and "exclude each other" in answer.json()["error"]["message"]


CALLS = {
    "hermes": '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>',
    "llama3_json": '<|python_tag|>{"name": "f", "parameters": {"x": 1}}',
    "mistral": '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}]',
}


@pytest.mark.parametrize("written", CALLS)
@pytest.mark.parametrize("flag", ["auto", *CALLS])
@pytest.mark.parametrize("template", ["hermes", "mistral"])
async def test_the_format_of_calls_is_the_flag_s_else_the_template_s(written: str, flag: str, template: str) -> None:
    """Issue 7, deliver 2: what is written in another format is content."""
    async with local(saying_engine(Says(CALLS[written]), template), tool_call_parser=flag) as (_, http):
        said = await message(http, tools=TOOLS)
    if written == (template if flag == "auto" else flag):
        assert [call["function"] for call in said["tool_calls"]] == [{"name": "f", "arguments": '{"x": 1}'}]
        assert said["content"] is None
    else:
        assert said["content"] == CALLS[written] and "tool_calls" not in said


async def test_a_server_without_a_parser_takes_no_tools() -> None:
    async with local(saying_engine(Says("x"), "hermes"), tool_call_parser="none") as (_, http):
        answer = await http.post("/v1/chat/completions", json={"model": "tiny", "messages": ASK, "tools": TOOLS})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools"


@pytest.mark.parametrize(("flag", "kind", "split"), [("think", "plain", True), ("none", "think", False)])
async def test_thoughts_are_split_if_the_flag_says_so(flag: str, kind: str, split: bool) -> None:
    async with local(saying_engine(Says("<think>Hm</think>Yes"), kind), reasoning_parser=flag) as (_, http):
        said = await message(http)
    assert (said["content"], said.get("reasoning_content")) == (
        ("Yes", "Hm") if split else ("<think>Hm</think>Yes", None)
    )


async def test_token_ids_come_with_a_chat() -> None:
    """The extension, streamed and not: ids of the prompt and of all that was made, the end of text included."""
    async with local(saying_engine(Says("é!"))) as (_, http):
        body = {"model": "tiny", "messages": ASK, "return_token_ids": True}
        whole = (await http.post("/v1/chat/completions", json=body)).json()
        lines = (await http.post("/v1/chat/completions", json={**body, "stream": True})).text.split("\n\n")[:-2]
        prompt = (await http.post("/tokenize", json={"messages": ASK})).json()["tokens"]
    choices = [json.loads(line[6:])["choices"][0] for line in lines]
    assert whole["prompt_token_ids"] == prompt
    assert (
        whole["choices"][0]["token_ids"]
        == [i for each in choices for i in each.get("token_ids", ())]
        == [*"é!".encode(), 256]
    )


@pytest.mark.parametrize(
    ("path", "more"), [("/v1/chat/completions", {}), ("/v1/messages", {"max_tokens": 5}), ("/tokenize", {})]
)
async def test_what_a_template_refuses_is_told_in_its_words(path: str, more: Any) -> None:
    """Rule 16: a template's error is the caller's, with the template's message."""
    engine = saying_engine(Says("x"))
    engine.tokenizer.chat_template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    async with local(engine) as (_, http):
        answer = await http.post(path, json={"model": "tiny", "messages": ASK, **more})
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"
    assert "roles must alternate" in answer.json()["error"]["message"]


@pytest.mark.parametrize("schema", [ChatRequest, CompletionRequest])
def test_fields_of_one_value_take_no_other(schema: Any) -> None:
    """Rule 19: what would not be honoured is refused."""
    for field, value in (("store", True), ("service_tier", "priority")):
        with pytest.raises(ValueError, match=field):
            schema.model_validate({"model": "m", "messages": ASK, "prompt": "a", field: value})
