"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from astrai_core.types import TokenLogprobs
from astrai_infer.server.body import BodyRoute
from astrai_infer.server.chat import Conversation, Prompt, ToolChoice, prepare
from astrai_infer.server.openai_schema import ChatRequest, NamedToolChoice
from astrai_infer.server.serving import Running, Serving
from astrai_infer.server.sse import STREAMED, EventStream, event, whole
from astrai_infer.text.answer import AnswerParser
from astrai_infer.text.events import Content, Event, Reasoning, ToolCall
from astrai_infer.wire import End, Piece

router = APIRouter(tags=["OpenAI"], route_class=BodyRoute)


@router.post("/v1/chat/completions", responses=STREAMED)
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    serving: Serving = request.app.state.serving
    adapter = serving.check_model(body.model)
    prompt = await prepare(serving, lambda: _conversation(body))
    params = serving.sampling(
        {
            "max_tokens": body.max_tokens if body.max_tokens is not None else body.max_completion_tokens,
            "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
            "structured": prompt.structured,
            **body.sampling(),
            **({} if prompt.skip_special_tokens else {"skip_special_tokens": False}),
        }
    )
    request_id: str = request.state.request_id
    request.state.user = body.user
    running = await serving.start(request_id, [prompt.token_ids], params, body.priority, adapter=adapter)
    answer = ChatAnswer(serving, body, prompt, running, f"chatcmpl-{request_id}", params.n)
    if body.stream:
        return EventStream(answer.stream(), running, lambda error: event(error.body("", request_id)))
    return await whole(request, running, answer.whole())


def _conversation(body: ChatRequest) -> Conversation:
    parallel = body.parallel_tool_calls is not False
    choice = body.tool_choice or ("auto" if body.tools else "none")
    if isinstance(choice, NamedToolChoice):
        tool_choice = ToolChoice("required", choice.function.name, parallel)
    else:
        tool_choice = ToolChoice(choice, None, parallel)
    return Conversation(
        messages=[message.plain() for message in body.messages],
        tools=[tool.model_dump(exclude_none=True) for tool in body.tools or ()],
        choice=tool_choice,
        structured=body.structure(),
        variables=body.chat_template_kwargs or {},
        continue_final_message=body.continue_final_message,
    )


@dataclass
class Choice:
    """One answer as it grows."""

    parser: AnswerParser
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    end: End | None = None

    @property
    def finish_reason(self) -> str:
        """OpenAI's word for how it ended."""
        assert self.end is not None, "asked of finished choices"
        reason = self.end.finish_reason
        return "tool_calls" if self.calls and reason == "stop" else reason


class ChatAnswer:
    """The road from pieces to what a client gets; streamed and whole answers are made of the same deltas."""

    def __init__(
        self, serving: Serving, body: ChatRequest, prompt: Prompt, running: Running, answer_id: str, n: int
    ) -> None:
        self._serving = serving
        self._body = body
        self._prompt = prompt
        self._running = running
        self._head = {"id": answer_id, "created": running.created, "model": body.model}
        self._head |= {"usage": None} if body.tells_usage else {}
        self._choices = [Choice(prompt.new_parser()) for _ in range(n)]

    async def whole(self) -> Response:
        """Return the answer when it is complete."""
        async for pieces in self._running:
            for group in grouped(pieces):
                self._take(group)
        choices = [self._choice_body(i, choice) for i, choice in enumerate(self._choices)]
        body = {**self._head, "object": "chat.completion", "choices": choices, "usage": self._usage()}
        if self._body.return_token_ids:
            body["prompt_token_ids"] = self._prompt.token_ids
        return JSONResponse(body)

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield the answer as events."""
        started: set[int] = set()
        async for pieces in self._running:
            chunks = []
            for group in grouped(pieces):
                if group.choice not in started:
                    started.add(group.choice)
                    first: dict[str, Any] = {"role": "assistant", "content": ""}
                    chunks.append(self._chunk(group.choice, first))
                chunks += self._group_chunks(group)
            yield b"".join(chunks)
        if self._body.tells_usage:
            yield event({**self._head, "object": "chat.completion.chunk", "choices": [], "usage": self._usage()})
        yield b"data: [DONE]\n\n"

    def _group_chunks(self, group: Piece) -> list[bytes]:
        choice = self._choices[group.choice]
        deltas = self._take(group)
        extra: dict[str, Any] = {}
        if self._body.logprobs and group.logprobs:
            extra["logprobs"] = self._logprobs(group.logprobs)
        if self._body.return_token_ids and group.token_ids:
            extra["token_ids"] = list(group.token_ids)
        if extra and not deltas:
            deltas = [{}]
        chunks = [self._chunk(group.choice, delta, **(extra if i == 0 else {})) for i, delta in enumerate(deltas)]
        if choice.end is not None:
            last = {"finish_reason": choice.finish_reason, "stop_reason": choice.end.stop_reason}
            chunks.append(self._chunk(group.choice, {}, **last))
        return chunks

    def _take(self, group: Piece) -> list[dict[str, Any]]:
        """Read a piece, keep it, and return what is new as deltas."""
        choice = self._choices[group.choice]
        events = choice.parser.push(group.text) if group.text else []
        if group.end is not None:
            choice.end = group.end
            events += choice.parser.end()
        choice.token_ids += group.token_ids
        choice.logprobs += group.logprobs
        return [self._delta(choice, each) for each in self._prompt.events(events)]

    def _delta(self, choice: Choice, each: Event) -> dict[str, Any]:
        if isinstance(each, Content):
            choice.content.append(each.text)
            return {"content": each.text}
        if isinstance(each, Reasoning):
            choice.reasoning.append(each.text)
            return {"reasoning_content": each.text}
        return {"tool_calls": [{"index": each.index, **self._call(choice, each)}]}

    def _call(self, choice: Choice, call: ToolCall) -> dict[str, Any]:
        function = {"name": call.name, "arguments": call.arguments}
        made = {"id": self._prompt.new_call_id(), "type": "function", "function": function}
        choice.calls.append(made)
        return made

    def _chunk(self, index: int, delta: dict[str, Any], **more: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        return event({**self._head, "object": "chat.completion.chunk", "choices": [choice]})

    def _choice_body(self, index: int, choice: Choice) -> dict[str, Any]:
        assert choice.end is not None, "the stream ends when all choices have"
        content = "".join(choice.content)
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not choice.calls else None}
        if choice.reasoning:
            message["reasoning_content"] = "".join(choice.reasoning)
        if choice.calls:
            message["tool_calls"] = choice.calls
        body = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs) if self._body.logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.end.stop_reason,
        }
        if self._body.return_token_ids:
            body["token_ids"] = choice.token_ids
        return body

    def _usage(self) -> dict[str, Any]:
        return usage([choice.end for choice in self._choices], len(self._choices))

    def _logprobs(self, entries: list[TokenLogprobs] | tuple[TokenLogprobs, ...]) -> dict[str, Any]:
        wanted = self._body.top_logprobs or 0
        content = [
            {
                **self._token(entry.token_id, entry.logprob),
                "top_logprobs": [self._token(*top) for top in entry.top[: wanted + 1 if wanted else 0]],
            }
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._serving.tokenizer.token_bytes(token_id)
        text = data.decode("utf-8", errors="replace")
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(data)}


def grouped(pieces: list[Piece]) -> list[Piece]:
    """Join the pieces of each choice, so that a client that is slow gets fewer and longer ones."""
    if len(pieces) == 1:
        return pieces
    joined: dict[int, list[Piece]] = {}
    for piece in pieces:
        joined.setdefault(piece.choice, []).append(piece)
    return [
        part[0]
        if len(part) == 1
        else Piece(
            part[0].key,
            choice,
            "".join([p.text for p in part]),
            tuple(token for p in part for token in p.token_ids),
            tuple(entry for p in part for entry in p.logprobs),
            part[-1].end,
        )
        for choice, part in joined.items()
    ]


def usage(ends: list[End | None], n: int) -> dict[str, Any]:
    """Tokens of all choices, `n` for each prompt; prompts count once."""
    done = [end.usage for end in ends if end is not None]
    prompt = sum(each.prompt_tokens for each in done[::n])
    completion = sum(each.completion_tokens for each in done)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in done[::n])},
    }
