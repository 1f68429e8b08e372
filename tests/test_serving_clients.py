"""langchain-openai and litellm against a live server, unmodified (rule 19 of serving; a floor of issue 7).

They stand here and not beside the wheel so that its own tests need little. Both are imported within a fixture: every
worker imports this file, which takes them seconds, and one worker runs it.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from astrai_infer.testing import small_engine, tiny_model
from astrai_infer.testing.server import LiveServer, Says, live_server, saying_engine

SAYS = Says("")
CALL = 'I look.<tool_call>{"name": "look", "arguments": {"at": "é"}}</tool_call>'
CALLS = CALL + '<tool_call>{"name": "look", "arguments": {"at": "sky"}}</tool_call>'
FORCED = '[{"name": "look", "arguments": {"at": "x"}}] and more'
PET = '{"kind": "cat", "legs": 4}'
PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
TOOLS: Any = [{"type": "function", "function": {"name": "look", "description": "See.", "parameters": PARAMETERS}}]


class Pet(BaseModel):
    """A pet."""

    kind: str
    legs: int


def look(at: str) -> str:
    """Look at something."""
    return f"seen {at}"


@pytest.fixture(scope="module", autouse=True)
def nothing_outside() -> Iterator[None]:
    """Fail if a client so much as asks where another machine is: for prices, telemetry, tokenizers."""
    asked = []
    resolve = socket.getaddrinfo

    def note(host: Any, *arguments: Any, **named: Any) -> Any:
        if host != "127.0.0.1":
            asked.append(host)
            raise OSError(f"the tests ask nobody outside, but {host!r} was")
        return resolve(host, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", note)
        patch.setenv("LANGSMITH_TRACING", "false")
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        yield
    assert asked == []


@pytest.fixture(scope="module")
def server(nothing_outside: None) -> Iterator[LiveServer]:
    with live_server(lambda: saying_engine(SAYS, "hermes"), api_key="secret") as live:
        yield live


@pytest.fixture(scope="module")
def embedder(nothing_outside: None) -> Iterator[LiveServer]:
    with live_server(lambda: small_engine(tiny_model())) as live:
        yield live


def joined(chunks: list[Any]) -> Any:
    """What langchain's own addition makes of a stream."""
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    return whole


class TestLangChain:
    @pytest.fixture(scope="class")
    def model(self, server: LiveServer) -> Any:
        from langchain_openai import ChatOpenAI

        return ChatOpenAI(base_url=f"{server.url}/v1", api_key="secret", model="tiny", max_retries=0, stream_usage=True)

    def test_invoke_and_stream_say_the_same(self, model: Any) -> None:
        """Rules 13, 20: text, how it ended, and the tokens of both."""
        SAYS.text = "Grüß dich 👋, world"
        asked = [("system", "Be kind."), ("human", "Hi!")]
        whole, chunks = model.invoke(asked), list(model.stream(asked))
        stream = joined(chunks)
        assert whole.content == stream.content == SAYS.text
        assert whole.response_metadata["finish_reason"] == stream.response_metadata["finish_reason"] == "stop"
        for message in (whole, stream):
            usage = message.usage_metadata
            assert usage["input_tokens"] == len("<system>Be kind.<user>Hi!<assistant>\x01")
            assert usage["output_tokens"] == len(SAYS.text.encode()) + 1
            assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        assert stream.usage_metadata["input_token_details"]["cache_read"] == 32, "two pages of what came before"

    def test_the_settings_of_a_chat_model_are_honoured(self, model: Any) -> None:
        from langchain_core.messages import HumanMessage

        SAYS.text = "one two three"
        settings = {"temperature": 0.0, "top_p": 0.9, "seed": 3, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        assert model.bind(**settings, stop=["two"]).invoke("Hi!").content == "one "
        cut = model.bind(max_tokens=3, logprobs=True, top_logprobs=2).invoke("Hi!")
        assert cut.content == "one" and cut.response_metadata["finish_reason"] == "length"
        content = cut.response_metadata["logprobs"]["content"]
        assert [entry["token"] for entry in content] == ["o", "n", "e"]
        assert all(len(entry["top_logprobs"]) >= 2 for entry in content)
        (two,) = model.generate([[HumanMessage("Hi!")]], n=2).generations
        assert [each.text for each in two] == [SAYS.text] * 2

    def test_batches_and_coroutines(self, model: Any) -> None:
        SAYS.text = "fine"
        assert [answer.content for answer in model.batch(["a", "b", "c"])] == ["fine"] * 3

        async def both() -> tuple[Any, list[Any]]:
            return await model.ainvoke("a"), [chunk async for chunk in model.astream("b")]

        whole, chunks = asyncio.run(both())
        assert whole.content == "".join(chunk.content for chunk in chunks) == "fine"

    @pytest.mark.parametrize("stream", [False, True])
    def test_tools_are_called_and_their_results_come_back(self, model: Any, stream: bool) -> None:
        """Rule 17: the calls of a stream are those of a whole answer; the conversation goes on with the results."""
        from langchain_core.messages import HumanMessage, ToolMessage

        SAYS.text = CALLS
        bound = model.bind_tools([look])
        turns: list[Any] = [HumanMessage("Look!")]
        answer = joined(list(bound.stream(turns))) if stream else bound.invoke(turns)
        assert answer.content == "I look." and answer.response_metadata["finish_reason"] == "tool_calls"
        made = [(call["name"], call["args"]) for call in answer.tool_calls]
        assert made == [("look", {"at": "é"}), ("look", {"at": "sky"})] and answer.invalid_tool_calls == []
        turns += [answer, *(ToolMessage(look(**call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls)]
        SAYS.text = "Done"
        assert bound.invoke(turns).content == "Done"

    @pytest.mark.parametrize("choice", ["any", "look"])
    def test_a_call_is_forced(self, model: Any, choice: str) -> None:
        SAYS.text = FORCED
        answer = model.bind_tools([look], tool_choice=choice).invoke("Hi!")
        assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("look", {"at": "x"})]
        assert answer.content == ""

    @pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
    def test_structured_output(self, model: Any, method: str) -> None:
        """Rule 18: a model that wants to go on writing cannot."""
        SAYS.text = f'[{{"name": "Pet", "arguments": {PET}}}] or so' if method == "function_calling" else f"{PET} or so"
        assert model.with_structured_output(Pet, method=method).invoke("Which pet?") == Pet(kind="cat", legs=4)

    def test_embeddings(self, embedder: LiveServer) -> None:
        from langchain_openai import OpenAIEmbeddings

        # Its own check of lengths would ask OpenAI's tokenizer, which is not this model's.
        base_url = f"{embedder.url}/v1"
        embed = OpenAIEmbeddings(base_url=base_url, api_key="none", model="tiny", check_embedding_ctx_length=False)
        documents, query = embed.embed_documents(["one", "two", "three"]), embed.embed_query("two")
        assert len(documents) == 3 and {len(vector) for vector in documents} == {32}
        assert query == pytest.approx(documents[1], abs=1e-6) and query != pytest.approx(documents[0], abs=1e-2)
        assert sum(x * x for x in query) == pytest.approx(1, abs=1e-5)

    def test_a_refusal_reaches_the_caller(self, model: Any) -> None:
        with pytest.raises(openai.BadRequestError, match="bogus is not supported"):
            model.bind(extra_body={"bogus": 1}).invoke("Hi!")


class TestLiteLLM:
    @pytest.fixture(scope="class")
    def litellm(self, nothing_outside: None) -> Any:
        import litellm

        litellm.telemetry = False
        litellm.suppress_debug_info = True  # it prints where to get help
        return litellm

    @pytest.fixture(scope="class", params=["openai", "hosted_vllm", "anthropic"])
    def asked(self, server: LiveServer, request: pytest.FixtureRequest) -> dict[str, Any]:
        """Arguments of a completion; the last road is Anthropic's protocol."""
        base = server.url if request.param == "anthropic" else f"{server.url}/v1"
        turns = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi!"}]
        given = {"model": f"{request.param}/tiny", "api_base": base, "api_key": "secret", "max_tokens": 200}
        return {**given, "messages": turns, "num_retries": 0}

    def test_whole_and_streamed_say_the_same(self, litellm: Any, asked: dict[str, Any]) -> None:
        SAYS.text = "Grüß dich 👋, world"
        whole = litellm.completion(**asked)
        chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
        stream = litellm.stream_chunk_builder(chunks)
        for answer in (whole, stream):
            (choice,) = answer.choices
            assert (choice.message.content, choice.finish_reason) == (SAYS.text, "stop")
            assert answer.usage.completion_tokens == len(SAYS.text.encode()) + 1
            assert answer.usage.prompt_tokens == len("<system>Be kind.<user>Hi!<assistant>\x01")
        assert stream.usage.prompt_tokens_details.cached_tokens == 32
        settings = {"temperature": 0.5, "top_p": 0.9, "stop": ["dich"]}
        assert litellm.completion(**asked, **settings).choices[0].message.content == "Grüß "

    @pytest.mark.parametrize("stream", [False, True])
    def test_tools_round_trip(self, litellm: Any, asked: dict[str, Any], stream: bool) -> None:
        SAYS.text = CALLS
        answer = litellm.completion(**asked, tools=TOOLS, stream=stream)
        if stream:
            answer = litellm.stream_chunk_builder(list(answer))
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls" and choice.message.content == "I look."
        made = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
        assert made == [("look", {"at": "é"}), ("look", {"at": "sky"})]
        results = [{"role": "tool", "tool_call_id": call.id, "content": "seen"} for call in choice.message.tool_calls]
        SAYS.text = "Done"
        turns = [*asked["messages"], choice.message, *results]
        after = litellm.completion(**{**asked, "messages": turns}, tools=TOOLS)
        assert after.choices[0].message.content == "Done"

    def test_a_call_is_forced(self, litellm: Any, asked: dict[str, Any]) -> None:
        SAYS.text = FORCED
        choice = {"type": "function", "function": {"name": "look"}}
        message = litellm.completion(**asked, tools=TOOLS, tool_choice=choice).choices[0].message
        assert [json.loads(call.function.arguments) for call in message.tool_calls] == [{"at": "x"}]

    def test_errors_are_those_of_their_status(self, litellm: Any, asked: dict[str, Any]) -> None:
        SAYS.text = "fine"
        with pytest.raises(litellm.BadRequestError, match="bogus is not supported"):
            litellm.completion(**asked, bogus=1)
        with pytest.raises(litellm.NotFoundError, match="not served here"):
            litellm.completion(**{**asked, "model": asked["model"] + "2"})
        with pytest.raises(litellm.AuthenticationError, match="API key is missing or wrong"):
            litellm.completion(**{**asked, "api_key": "no"})

    @pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
    def test_structured_output(self, litellm: Any, server: LiveServer, provider: str) -> None:
        """Anthropic's road makes a tool of the schema, as litellm does for models that it does not know."""
        SAYS.text = f"{PET} or so"
        base: Any = {"api_base": f"{server.url}/v1", "api_key": "secret", "model": f"{provider}/tiny"}
        turns = [{"role": "user", "content": "Which pet?"}]
        answer = litellm.completion(**base, messages=turns, response_format=Pet)
        assert Pet.model_validate_json(answer.choices[0].message.content) == Pet(kind="cat", legs=4)

    def test_the_other_roads(self, litellm: Any, server: LiveServer, embedder: LiveServer) -> None:
        """Text completions, Anthropic's messages as they are, several at once, embeddings."""
        SAYS.text = "fine"
        base: Any = {"api_base": f"{server.url}/v1", "api_key": "secret"}
        turns: Any = [{"role": "user", "content": "Hi!"}]
        text = litellm.text_completion(**base, model="text-completion-openai/tiny", prompt="x\x01", max_tokens=8)
        assert text.choices[0].text == "fine"
        both = litellm.batch_completion(**base, model="openai/tiny", messages=[turns, turns])
        assert [answer.choices[0].message.content for answer in both] == ["fine"] * 2
        passed_on = {"api_base": server.url, "api_key": "secret", "model": "anthropic/tiny", "max_tokens": 20}
        message = asyncio.run(litellm.anthropic.messages.acreate(**passed_on, messages=turns))
        assert message["content"] == [{"type": "text", "text": "fine"}] and message["stop_reason"] == "end_turn"
        asked = {"api_base": f"{embedder.url}/v1", "api_key": "none", "model": "openai/tiny"}
        found = litellm.embedding(**asked, input=["one", "two"])
        assert [len(each["embedding"]) for each in found.data] == [32, 32] and found.usage.prompt_tokens == 6
