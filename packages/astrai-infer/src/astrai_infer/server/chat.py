"""From messages and tools to a prompt, and to the parser that reads the answer; the same for both protocols."""

from __future__ import annotations

import asyncio
import secrets
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from astrai_core.types import StructuredOutput
from astrai_infer.server.errors import ApiError
from astrai_infer.server.serving import Serving
from astrai_infer.text.answer import AnswerParser
from astrai_infer.text.events import Event, ToolCall
from astrai_infer.text.reasoning import OPEN, ThinkSplitter
from astrai_infer.text.tools import FORCED, FORMATS, ToolFormat, ToolParser, format_of

_ID_CHARS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ToolChoice:
    """Whether the model may, must or must not call."""

    mode: Literal["none", "auto", "required"] = "auto"
    name: str | None = None
    """With "required": the one function to call."""
    parallel: bool = True
    """Several calls in one answer."""


@dataclass(frozen=True)
class Conversation:
    """What a client asks, in OpenAI's form of messages and tools."""

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] = ()
    choice: ToolChoice = ToolChoice()
    structured: StructuredOutput | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    """Of the chat template."""
    continue_final_message: bool = False
    add_generation_prompt: bool = True


@dataclass(frozen=True)
class Prompt:
    """What the engine is asked, and how its answer is read."""

    token_ids: list[int]
    structured: StructuredOutput | None
    skip_special_tokens: bool
    """False where the marks of tool calls are special tokens."""
    new_parser: Callable[[], AnswerParser]
    """A parser for each choice."""
    new_call_id: Callable[[], str]
    parallel: bool

    def events(self, events: list[Event]) -> list[Event]:
        """Leave out the calls that the client does not want."""
        return [e for e in events if self.parallel or not isinstance(e, ToolCall) or e.index == 0]


async def prepare(serving: Serving, read: Callable[[], Conversation]) -> Prompt:
    """Apply the chat template, away from the event loop.

    Parameters
    ----------
    read
        Makes the conversation of the body; called there too, since one may have tens of thousands of messages.

    Raises
    ------
    ApiError
        If tools are given that the model cannot be shown.
    RequestError, ChatTemplateError
        If messages or tools are malformed, or the template refuses them.
    """
    return await asyncio.to_thread(lambda: _prepare(serving, read()))


def _prepare(serving: Serving, asked: Conversation) -> Prompt:
    tokenizer, choice = serving.tokenizer, asked.choice
    shown = asked.tools if choice.mode != "none" else ()
    source = "" if tokenizer.chat_template is None else tokenizer.chat_template.source(with_tools=bool(shown))
    format = _tool_format(serving, source) if shown else None
    text = tokenizer.apply_chat_template(
        asked.messages,
        tools=shown or None,
        tokenize=False,
        continue_final_message=asked.continue_final_message,
        add_generation_prompt=asked.add_generation_prompt and not asked.continue_final_message,
        **asked.variables,
    )
    thinks = serving.config.reasoning_parser == "think" or (
        serving.config.reasoning_parser == "auto" and OPEN in source
    )
    opened = thinks and text.rstrip().endswith(OPEN)
    structured = asked.structured
    reader: ToolFormat | None
    if choice.mode == "required":
        if structured is not None:
            raise ApiError(400, "response_format and a required tool call exclude each other", param="response_format")
        structured, reader = StructuredOutput(json_schema=_forced_schema(shown, choice)), FORCED
    else:
        reader = format if structured is None else None
    if structured is not None and thinks:
        structured = replace(structured, think="opened" if opened else "may")

    def new_parser() -> AnswerParser:
        return AnswerParser(
            ThinkSplitter(opened=opened) if thinks else None, None if reader is None else ToolParser(reader)
        )

    id_len = 24 if format is None else format.id_len
    return Prompt(
        token_ids=tokenizer.encode(text, add_special_tokens=False),
        structured=structured,
        skip_special_tokens=reader is None or not _is_special(serving, reader.open),
        new_parser=new_parser,
        new_call_id=lambda: _call_id(id_len),
        parallel=choice.parallel,
    )


def _tool_format(serving: Serving, source: str) -> ToolFormat:
    name: str | None = serving.config.tool_call_parser
    if name == "auto":
        name = format_of(source)
    if name is None or name == "none" or "tools" not in source:
        raise ApiError(
            400,
            "this model's chat template shows no tools, or --tool-call-parser is none; leave out tools, or serve a "
            "model that was trained with them",
            param="tools",
        )
    return FORMATS[name]


def _is_special(serving: Serving, mark: str) -> bool:
    token_id = serving.tokenizer.token_to_id(mark) if mark else None
    return token_id is not None and serving.tokenizer.decode([token_id]) == ""


def _call_id(length: int) -> str:
    letters = "".join(secrets.choice(_ID_CHARS) for _ in range(length))
    return letters if length < 20 else f"call_{letters}"


def _forced_schema(tools: Sequence[dict[str, Any]], choice: ToolChoice) -> dict[str, Any]:
    """The schema of a list of calls of these tools."""
    functions = [tool["function"] for tool in tools if choice.name in (None, tool["function"]["name"])]
    if not functions:
        wanted = "a call is required but there are no tools" if choice.name is None else f"no tool is {choice.name!r}"
        raise ApiError(400, f"tool_choice: {wanted}; correct it", param="tool_choice")
    definitions: dict[str, Any] = {}
    items = []
    for i, function in enumerate(functions):
        parameters = dict(function.get("parameters") or {"type": "object"})
        for group in ("$defs", "definitions"):
            for name, schema in parameters.pop(group, {}).items():
                definitions[f"{i}.{group}.{name}"] = _moved(schema, i)
        items.append(
            {
                "type": "object",
                "properties": {"name": {"const": function["name"]}, "arguments": _moved(parameters, i)},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    once = {} if choice.parallel and choice.name is None else {"maxItems": 1}
    calls: dict[str, Any] = {"type": "array", "items": {"anyOf": items}, "minItems": 1, **once}
    return calls if not definitions else {**calls, "$defs": definitions}


def _moved(schema: Any, i: int) -> Any:
    """The schema with references to its own definitions pointing at those of the whole."""
    if isinstance(schema, list):
        return [_moved(item, i) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, i) for key, value in schema.items()}
    target = schema.get("$ref")
    if isinstance(target, str):
        for group in ("$defs", "definitions"):
            if target.startswith(f"#/{group}/"):
                moved["$ref"] = f"#/$defs/{i}.{group}.{target.removeprefix(f'#/{group}/')}"
    return moved
