"""Anthropic's routes in this process (rules 13-20)."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from astrai_infer.server.app import create_app
from astrai_infer.testing.server import Says, saying_engine, serving

ASK = [{"role": "user", "content": "Hi!"}]
TOOLS = [{"name": "look", "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}}}]
CALL = 'I look.<tool_call>{"name": "look", "arguments": {"at": "é"}}</tool_call>'


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


pytestmark = pytest.mark.anyio


async def ask(says: str, kind: str = "plain", path: str = "/v1/messages", **body: Any) -> httpx.Response:
    """One request to a server that says this."""
    async with serving(saying_engine(Says(says), kind)) as served:
        transport = httpx.ASGITransport(create_app(served))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            return await http.post(path, json={"model": "tiny", "messages": ASK, **body})


def put_together(text: str) -> dict[str, Any]:
    """The message that a client builds from the events; checks their order."""
    message: dict[str, Any] = {}
    open_block = None
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert open_block is None and event["index"] == len(message["content"])
                open_block = event["index"]
                message["content"].append(event["content_block"])
            case "content_block_delta":
                assert event["index"] == open_block
                delta, block_body = event["delta"], message["content"][-1]
                if delta["type"] == "input_json_delta":
                    block_body["input"] = json.loads(delta["partial_json"])
                else:
                    field = delta["type"].removesuffix("_delta")
                    block_body[field] += delta[field]
            case "content_block_stop":
                assert event["index"] == open_block
                open_block = None
            case "message_delta":
                assert open_block is None
                message |= event["delta"]
                message["usage"] |= event["usage"]
            case "message_stop":
                message["stopped"] = True
    assert message.pop("stopped")
    return message


@pytest.mark.parametrize(
    ("says", "kind", "content", "stop"),
    [
        ("Hello", "plain", [{"type": "text", "text": "Hello"}], "end_turn"),
        (
            "<think>Hm</think>Yes",
            "think",
            [{"type": "thinking", "thinking": "Hm", "signature": ""}, {"type": "text", "text": "Yes"}],
            "end_turn",
        ),
        (
            CALL,
            "hermes",
            [{"type": "text", "text": "I look."}, {"type": "tool_use", "name": "look", "input": {"at": "é"}}],
            "tool_use",
        ),
    ],
)
async def test_streamed_and_whole_are_the_same(says: str, kind: str, content: Any, stop: str) -> None:
    tools = {"tools": TOOLS} if kind == "hermes" else {}
    whole = (await ask(says, kind, max_tokens=200, **tools)).json()
    streamed = put_together((await ask(says, kind, max_tokens=200, stream=True, **tools)).text)
    for message in (whole, streamed):
        for block in message["content"]:
            if block["type"] == "tool_use":
                assert block.pop("id").startswith("toolu_")
        assert (message["content"], message["stop_reason"]) == (content, stop)
    assert streamed["usage"] == whole["usage"] and whole["usage"]["output_tokens"] == len(says.encode()) + 1


async def test_how_it_ends() -> None:
    cut = (await ask("one two", max_tokens=3)).json()
    assert (cut["stop_reason"], cut["content"][0]["text"]) == ("max_tokens", "one")
    stopped = (await ask("one two", max_tokens=30, stop_sequences=["two"])).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "two")


async def test_blocks_become_messages_that_templates_know() -> None:
    """tool_use and tool_result keep their place; a last assistant message is gone on with."""
    body = {
        "system": [{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "U"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": 1}}]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": "R"},
                    {"type": "text", "text": "V"},
                ],
            },
            {"role": "assistant", "content": "So"},
        ],
    }  # fmt: skip
    counted = (await ask("x", path="/v1/messages/count_tokens", **body)).json()
    assert counted == {"input_tokens": len('<system>S<user>U<assistant>[look {"at": 1}]<tool>R<user>V<assistant>So')}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "max_tokens is required"),
        ({"max_tokens": 5, "bogus": 1}, "bogus is not supported by this server; leave it out"),
        ({"max_tokens": 5, "temperature": 1.5}, "temperature: input should be less than or equal to 1"),
        ({"max_tokens": 5, "thinking": {"type": "enabled", "budget_tokens": 99}}, "thinking"),
        ({"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "content.0"),
        ({"max_tokens": 5, "tool_choice": {"type": "tool"}}, "name is given with type 'tool'"),
    ],
)
async def test_what_is_wrong_is_named_in_anthropics_envelope(body: Any, said: str) -> None:
    answer = await ask("x", **body)
    assert answer.status_code == 400
    told = answer.json()
    assert told["type"] == "error" and told["error"]["type"] == "invalid_request_error"
    assert said in told["error"]["message"] and told["request_id"] == answer.headers["x-request-id"]
