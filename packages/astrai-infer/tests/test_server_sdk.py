"""The official SDKs against a live server, unmodified, streamed and not (rule 19)."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from astrai_infer.testing import small_engine, tiny_model
from astrai_infer.testing.server import LiveServer, Says, live_server, saying_engine

SAYS = Says("")
ASK: Any = [{"role": "user", "content": "Hi!"}]
CALL = 'I look.<tool_call>{"name": "look", "arguments": {"at": "é"}}</tool_call>'
PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}]


class Pet(BaseModel):
    kind: str
    legs: int


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(lambda: saying_engine(SAYS, "hermes"), api_key="secret") as live:
        yield live


@pytest.fixture(scope="module")
def oai(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(server: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0) as client:
        yield client


def test_openai_chat(oai: openai.OpenAI) -> None:
    SAYS.text = "Grüß dich 👋, world"
    whole = oai.chat.completions.create(model="tiny", messages=ASK)
    assert whole.choices[0].message.content == SAYS.text and whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None and whole.usage.completion_tokens == len(SAYS.text.encode()) + 1
    chunks = list(
        oai.chat.completions.create(model="tiny", messages=ASK, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == SAYS.text
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 16


def test_openai_tools_round_trip(oai: openai.OpenAI) -> None:
    """The SDK's own accumulation of a stream equals the whole answer; the answer goes back as it came."""
    SAYS.text = CALL
    whole = oai.chat.completions.create(model="tiny", messages=ASK, tools=TOOLS).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.tool_calls is not None
    with oai.chat.completions.stream(model="tiny", messages=ASK, tools=TOOLS) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.message.tool_calls is not None and streamed.finish_reason == "tool_calls"
    call, again = whole.message.tool_calls[0], streamed.message.tool_calls[0]
    assert call.type == "function" and again.type == "function"
    assert json.loads(call.function.arguments) == {"at": "é"} == json.loads(again.function.arguments)
    assert whole.message.content == streamed.message.content == "I look."
    SAYS.text = "Done"
    result = {"role": "tool", "tool_call_id": call.id, "content": "seen"}
    after = oai.chat.completions.create(model="tiny", messages=[*ASK, whole.message, result], tools=TOOLS)
    assert after.choices[0].message.content == "Done"


def test_openai_structured_output(oai: openai.OpenAI) -> None:
    """The SDK's strict schemas; a model that wants to write something else cannot."""
    SAYS.text = '{"kind":"cat","legs":4} or so'
    parsed = oai.chat.completions.parse(model="tiny", messages=ASK, response_format=Pet).choices[0].message.parsed
    assert parsed == Pet(kind="cat", legs=4)


def test_openai_other_routes(oai: openai.OpenAI) -> None:
    SAYS.text = "abc"
    assert [model.id for model in oai.models.list()] == ["tiny"]
    assert oai.models.retrieve("tiny").id == "tiny"
    assert oai.completions.create(model="tiny", prompt="x\x01", max_tokens=8).choices[0].text == "abc"
    pieces = oai.completions.create(model="tiny", prompt="x\x01", max_tokens=8, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == "abc"


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_openai_embeddings(encoding: Any) -> None:
    """Both encodings say the same; the SDK asks for base64 where its user asks for none."""
    with live_server(lambda: small_engine(tiny_model())) as live:
        client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)
        default = client.embeddings.create(model="tiny", input=["one", "two"])
        (vector,) = client.embeddings.create(model="tiny", input="two", encoding_format=encoding).data
    if encoding == "base64":
        data = base64.b64decode(vector.embedding)  # type: ignore[arg-type]
        vector.embedding = list(struct.unpack(f"<{len(data) // 4}f", data))
    assert vector.embedding == pytest.approx(default.data[1].embedding, abs=1e-6)
    assert vector.embedding != pytest.approx(default.data[0].embedding, abs=1e-2)
    assert default.usage.prompt_tokens == 6


def test_openai_errors(server: LiveServer, oai: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="bogus is not supported") as caught:
        oai.chat.completions.create(model="tiny", messages=ASK, extra_body={"bogus": 1})
    assert caught.value.param == "bogus"
    with pytest.raises(openai.NotFoundError, match="not served here"):
        oai.chat.completions.create(model="other", messages=ASK)
    with pytest.raises(openai.AuthenticationError, match="API key is missing or wrong"):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="no").models.list()


def test_anthropic_messages(claude: anthropic.Anthropic) -> None:
    SAYS.text = "Grüß dich 👋"
    whole = claude.messages.create(model="tiny", max_tokens=50, messages=ASK, system="Be kind.")
    assert whole.content[0].type == "text" and whole.content[0].text == SAYS.text
    assert (whole.stop_reason, whole.usage.output_tokens) == ("end_turn", len(SAYS.text.encode()) + 1)
    with claude.messages.stream(model="tiny", max_tokens=50, messages=ASK, system="Be kind.") as stream:
        assert "".join(stream.text_stream) == SAYS.text
        final = stream.get_final_message()
    assert final.stop_reason == "end_turn"
    total = final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0)
    counted = claude.messages.count_tokens(model="tiny", messages=ASK, system="Be kind.").input_tokens
    assert total == counted == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


def test_anthropic_tools_round_trip(claude: anthropic.Anthropic) -> None:
    tools: Any = [{"name": "look", "description": "See.", "input_schema": PARAMETERS}]
    SAYS.text = CALL
    whole = claude.messages.create(model="tiny", max_tokens=100, messages=ASK, tools=tools)
    with claude.messages.stream(model="tiny", max_tokens=100, messages=ASK, tools=tools) as stream:
        final = stream.get_final_message()
    for message in (whole, final):
        text, use = message.content
        assert text.type == "text" and text.text == "I look." and message.stop_reason == "tool_use"
        assert use.type == "tool_use" and use.input == {"at": "é"}
    SAYS.text = "Done"
    result = {"type": "tool_result", "tool_use_id": whole.content[1].id, "content": "seen"}  # type: ignore[union-attr]
    turns: Any = [*ASK, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    after = claude.messages.create(model="tiny", max_tokens=100, messages=turns, tools=tools)
    assert after.content[0].type == "text" and after.content[0].text == "Done"


def test_anthropic_errors(server: LiveServer, claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        claude.messages.create(model="tiny", max_tokens=0, messages=ASK)
    with pytest.raises(anthropic.NotFoundError, match="not served here"):
        claude.messages.create(model="other", max_tokens=5, messages=ASK)
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=server.url, api_key="no").messages.create(model="tiny", max_tokens=5, messages=ASK)


# ---- random answers ----

PIECES = st.sampled_from(
    [
        *(
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            "[TOOL_CALLS]",
            "<|python_tag|>",
            "[ARGS]",
            ";",
            "\n",
            " ",
        ),
        *(
            '{"name": "look", "arguments": {"at": "é}"}}',
            '[{"name": "look"}]',
            "look",
            "{}",
            '{"name": 1}',
            '"',
            "[TOOL",
        ),
        *(
            '<tool_call>{"name": "look"}</tool_call>',
            "<think>\nHm</think>\n\n",
            '[TOOL_CALLS]look{"at": "x"}',
            "text",
            "👋",
        ),
    ]
) | st.binary(max_size=3).map(lambda data: data.replace(b"\x01", b"").decode(errors="surrogateescape"))
"""The bytes are mostly no UTF-8; 1 ends a prompt."""


@pytest.fixture(scope="module", params=["hermes", "llama3_json", "mistral", "think"])
def clients(request: pytest.FixtureRequest) -> Iterator[tuple[Says, bool, openai.OpenAI, anthropic.Anthropic]]:
    """What the model says, whether it knows tools, and a client of each protocol."""
    says = Says("")
    with (
        live_server(lambda: saying_engine(says, request.param), access_log=False) as live,
        openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as oai,
        anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0) as claude,
    ):
        yield says, request.param != "think", oai, claude


@settings(max_examples=40, deadline=None)
@given(
    text=st.lists(PIECES, max_size=10).map("".join),
    stop=st.lists(st.sampled_from(["</", "text", "}}", "é", "\n", "\ufffd"]), max_size=2),
    max_tokens=st.integers(1, 120),
)
def test_what_the_sdks_join_is_the_whole_answer(clients: Any, text: str, stop: list[str], max_tokens: int) -> None:
    """Rules 13 to 17 and a floor of issue 7: random tokens, stops, calls and thoughts, through both protocols."""
    says, knows_tools, oai, claude = clients
    says.text = text
    asked: dict[str, Any] = {"model": "tiny", "messages": ASK, "max_tokens": max_tokens}
    tools = {"tools": TOOLS} if knows_tools else {}
    whole = oai.chat.completions.create(**asked, **tools, stop=stop)
    with oai.chat.completions.stream(**asked, **tools, stop=stop, stream_options={"include_usage": True}) as stream:
        try:
            joined: Any = stream.get_final_completion()
        except openai.LengthFinishReasonError as cut:  # how the SDK hands out an answer without its end
            joined = cut.completion
    for answer in (whole, joined):
        assert answer.usage is not None and answer.usage.completion_tokens <= max_tokens
    assert _told(joined.choices[0]) == _told(whole.choices[0])
    assert joined.usage.completion_tokens == whole.usage.completion_tokens
    tools = {"tools": [{"name": "look", "input_schema": PARAMETERS}]} if knows_tools else {}
    message = claude.messages.create(**asked, **tools, stop_sequences=stop)
    with claude.messages.stream(**asked, **tools, stop_sequences=stop) as events:
        final = events.get_final_message()
    same = {"content", "stop_reason", "stop_sequence"}
    plain = [each.model_dump(include=same, exclude={"content": {"__all__": {"id"}}}) for each in (message, final)]
    assert plain[0] == plain[1] and message.usage.output_tokens == final.usage.output_tokens


def _told(choice: Any) -> Any:
    """What a choice says, but for random ids."""
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    thoughts = (choice.message.model_extra or {}).get("reasoning_content")
    return choice.message.content or "", thoughts, calls, choice.finish_reason


def test_the_api_is_described(server: LiveServer) -> None:
    described = httpx.get(f"{server.url}/openapi.json", headers={"Authorization": "Bearer secret"}).json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/embeddings"} <= set(described["paths"])
    fields = described["components"]["schemas"]["ChatRequest"]
    assert "min_p" in fields["properties"] and fields["additionalProperties"] is False
