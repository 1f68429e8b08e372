"""Anthropic's Messages API: ``POST /v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from astrai_infer.server import chat
from astrai_infer.server.anthropic_schema import CountRequest, MessagesRequest
from astrai_infer.server.body import BodyRoute
from astrai_infer.server.chat import Conversation, Prompt, prepare
from astrai_infer.server.errors import ANTHROPIC_ERRORS
from astrai_infer.server.openai_chat import grouped
from astrai_infer.server.serving import Running, Serving
from astrai_infer.server.sse import STREAMED, EventStream, event, whole
from astrai_infer.text.events import Content, Event, Reasoning, ToolCall
from astrai_infer.wire import End

router = APIRouter(tags=["Anthropic"], responses=ANTHROPIC_ERRORS, route_class=BodyRoute)

_MODES: dict[str, Any] = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}
_DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}


@router.post("/v1/messages", responses=STREAMED)
async def messages(body: MessagesRequest, request: Request) -> Response:
    """Answer a conversation."""
    serving: Serving = request.app.state.serving
    adapter = serving.check_model(body.model)
    prompt = await prepare(serving, lambda: _conversation(body))
    params = serving.sampling(
        {
            "max_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "temperature": body.temperature,
            "top_k": body.top_k,
            "top_p": body.top_p,
            "structured": prompt.structured,
            "skip_special_tokens": prompt.skip_special_tokens,
        }
    )
    request_id: str = request.state.request_id
    request.state.user = None if body.metadata is None else body.metadata.user_id
    running = await serving.start(request_id, [prompt.token_ids], params, adapter=adapter)
    answer = MessageAnswer(body, prompt, running, f"msg_{request_id}")
    if body.stream:
        return EventStream(
            answer.stream(), running, lambda error: event(error.body("/v1/messages", request_id), "error")
        )
    return await whole(request, running, answer.whole())


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountRequest, request: Request) -> dict[str, int]:
    """Count the tokens of a prompt."""
    serving: Serving = request.app.state.serving
    serving.check_model(body.model)
    return {"input_tokens": len((await prepare(serving, lambda: _conversation(body))).token_ids)}


def _conversation(body: CountRequest) -> Conversation:
    asked = body.tool_choice
    if asked is None:
        choice = chat.ToolChoice("auto" if body.tools else "none")
    else:
        choice = chat.ToolChoice(_MODES[asked.type], asked.name, not asked.disable_parallel_tool_use)
    tools = [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                **({} if tool.description is None else {"description": tool.description}),
                "parameters": tool.input_schema,
            },
        }
        for tool in body.tools or ()
    ]
    plain = body.plain()
    return Conversation(
        messages=plain,
        tools=tools,
        choice=choice,
        variables={"enable_thinking": False} if body.thinking is not None and body.thinking.type == "disabled" else {},
        structured=body.structure(),
        continue_final_message=plain[-1]["role"] == "assistant",
    )


class MessageAnswer:
    """The road from pieces to what a client gets; streamed and whole answers are made of the same blocks."""

    def __init__(self, body: MessagesRequest, prompt: Prompt, running: Running, answer_id: str) -> None:
        self._body = body
        self._prompt = prompt
        self._running = running
        self._parser = prompt.new_parser()
        self._blocks: list[dict[str, Any]] = []
        self._end: End | None = None
        self._head = {"id": answer_id, "type": "message", "role": "assistant", "model": body.model}

    async def whole(self) -> Response:
        """Return the answer when it is complete."""
        async for pieces in self._running:
            for group in grouped(pieces):
                for each in self._events(group.text, group.end):
                    self._add(each)
        return JSONResponse({**self._head, "content": self._blocks, **self._stop(), "usage": self._usage()})

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield the answer as events."""
        begin: dict[str, Any] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": self._running.n_prompt_tokens, "output_tokens": 0},
        }
        yield event({"type": "message_start", "message": begin}, "message_start")
        async for pieces in self._running:
            lines = []
            for group in grouped(pieces):
                for each in self._events(group.text, group.end):
                    lines += self._block_events(each)
            if lines:
                yield b"".join(lines)
        last = [self._block_stop()] if self._blocks else []
        last.append(event({"type": "message_delta", "delta": self._stop(), "usage": self._usage()}, "message_delta"))
        last.append(event({"type": "message_stop"}, "message_stop"))
        yield b"".join(last)

    def _events(self, text: str, end: End | None) -> list[Event]:
        events = self._parser.push(text) if text else []
        if end is not None:
            self._end = end
            events += self._parser.end()
        return self._prompt.events(events)

    def _add(self, each: Event) -> bool:
        """Put an event into its block; return whether a new one was begun for it."""
        if isinstance(each, ToolCall):
            call_id = self._prompt.new_call_id().replace("call_", "toolu_")
            self._blocks.append(
                {"type": "tool_use", "id": call_id, "name": each.name, "input": json.loads(each.arguments)}
            )
            return True
        kind = "thinking" if isinstance(each, Reasoning) else "text"
        begins = not self._blocks or self._blocks[-1]["type"] != kind
        if begins:
            self._blocks.append({"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})})
        self._blocks[-1][kind] += each.text
        return begins

    def _block_events(self, each: Event) -> list[bytes]:
        lines = []
        n_before = len(self._blocks)
        if self._add(each):
            if n_before:
                lines.append(self._block_stop(n_before - 1))
            block = self._blocks[-1]
            empty: dict[str, Any] = {"input": {}} if isinstance(each, ToolCall) else {block["type"]: ""}
            start = {"type": "content_block_start", "index": n_before, "content_block": {**block, **empty}}
            lines.append(event(start, "content_block_start"))
        if isinstance(each, ToolCall):
            delta = {"type": "input_json_delta", "partial_json": each.arguments}
        else:
            kind, name = _DELTAS["text" if isinstance(each, Content) else "thinking"]
            delta = {"type": kind, name: each.text}
        change = {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}
        lines.append(event(change, "content_block_delta"))
        return lines

    def _block_stop(self, index: int | None = None) -> bytes:
        at = len(self._blocks) - 1 if index is None else index
        return event({"type": "content_block_stop", "index": at}, "content_block_stop")

    def _stop(self) -> dict[str, Any]:
        assert self._end is not None, "asked of a finished answer"
        reason, stop = self._end.finish_reason, self._end.stop_reason
        if reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if isinstance(stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        called = any(block["type"] == "tool_use" for block in self._blocks)
        return {"stop_reason": "tool_use" if called else "end_turn", "stop_sequence": None}

    def _usage(self) -> dict[str, int]:
        assert self._end is not None, "asked of a finished answer"
        usage = self._end.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_read_input_tokens": usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage.completion_tokens,
        }
