"""Requests of Anthropic's Messages API. A field that is not here is refused by name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from astrai_core.types import StructuredOutput
from astrai_infer.server.openai_schema import JsonObject, Many, Stops, Strict


class CacheControl(Strict):
    """Every prefix is cached here, so that this asks for what happens anyway."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Strict):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Many[Any] | None = Field(default=None, max_length=0)


class JsonFormat(Strict):
    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(Strict):
    format: JsonFormat | None = None


class ThinkingBlock(Strict):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUseBlock(Strict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: JsonObject
    cache_control: CacheControl | None = None
    caller: None = None
    toolset_name: None = None


class ToolResultBlock(Strict):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Many[TextBlock] = ""
    is_error: bool = False
    """The model is told so by the word before the content."""
    cache_control: CacheControl | None = None


Block = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class Message(Strict):
    role: Literal["user", "assistant"]
    content: str | Many[Block]


class Tool(Strict):
    type: Literal["custom"] | None = None
    name: str = Field(min_length=1)
    description: str | None = None
    input_schema: JsonObject
    cache_control: CacheControl | None = None


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _named(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name is given with type 'tool', and only then")
        return self


class Thinking(Strict):
    type: Literal["adaptive", "disabled"]


class Metadata(Strict):
    user_id: str | None = None


class CountRequest(Strict):
    """``POST /v1/messages/count_tokens``."""

    model: str
    messages: Many[Message] = Field(min_length=1)
    system: str | Many[TextBlock] | None = None
    tools: Many[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None

    def structure(self) -> StructuredOutput | None:
        """The language that `output_config` asks for."""
        format = None if self.output_config is None else self.output_config.format
        return None if format is None else StructuredOutput(json_schema=format.schema_)

    def plain(self) -> list[dict[str, Any]]:
        """The messages in OpenAI's form, which templates know."""
        messages = []
        if self.system is not None:
            messages.append({"role": "system", "content": _text(self.system)})
        for message in self.messages:
            if isinstance(message.content, str):
                messages.append({"role": message.role, "content": message.content})
            else:
                messages += _split(message.role, message.content)
        return messages


class MessagesRequest(CountRequest):
    """``POST /v1/messages``."""

    max_tokens: int
    stop_sequences: Stops | None = None
    stream: bool = False
    temperature: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = None
    top_p: float | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    """There is one tier."""


def _split(role: str, blocks: Sequence[Block]) -> list[dict[str, Any]]:
    """One message's blocks as messages: results of tools first, each its own, then the rest."""
    results = [
        {
            "role": "tool",
            "tool_call_id": block.tool_use_id,
            "content": f"{'Error: ' if block.is_error else ''}{_text(block.content)}",
        }
        for block in blocks
        if isinstance(block, ToolResultBlock)
    ]
    rest: dict[str, Any] = {"role": role}
    if texts := [block.text for block in blocks if isinstance(block, TextBlock)]:
        rest["content"] = "\n".join(texts)
    if thoughts := [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]:
        rest["reasoning_content"] = "\n".join(thoughts)
    if calls := [block for block in blocks if isinstance(block, ToolUseBlock)]:
        rest["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.input, ensure_ascii=False)},
            }
            for call in calls
        ]
    if len(rest) > 1 and "content" not in rest:
        rest["content"] = None if role == "assistant" else ""
    if len(rest) == 1 and not results:
        rest["content"] = ""
    return [*results, rest] if len(rest) > 1 else results


def _text(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)
