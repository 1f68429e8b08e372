"""What a record of each format means: text, a conversation, a completion, a pair or a prompt."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


class BadRow(Exception):
    """A record is malformed: an error that names its place, or counted under a cap."""


class DroppedRow(Exception):
    """A record is left out on purpose; the reason is counted."""


@dataclass(frozen=True)
class Conversation:
    """Messages, and which of them may be supervised."""

    messages: list[dict[str, Any]]
    supervised: tuple[bool, ...]
    tools: list[Any] | None = None


@dataclass(frozen=True)
class Completion:
    """Plain text that continues plain text."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt: conversations with a common beginning, or plain texts."""

    chosen: Conversation | Completion
    rejected: Conversation | Completion


@dataclass(frozen=True)
class Prompt:
    """A prompt, and the record's other columns as JSON."""

    prompt: list[dict[str, Any]] | str
    tools: list[Any] | None
    columns: str


Sample = str | Conversation | Completion | Pair | Prompt

_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}


def _text(record: Mapping[str, Any], field: str, *, required: bool = True) -> str:
    value = record.get(field)
    if value is None and not required:
        return ""
    if not isinstance(value, str):
        raise BadRow(
            f"field {field!r} is missing" if value is None else f"field {field!r} must be text, got {_show(value)}"
        )
    return value


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(message, dict) for message in value)


def _messages(value: Any, field: str) -> list[dict[str, Any]]:
    if value is None:
        raise BadRow(f"field {field!r} is missing")
    if not _is_messages(value):
        raise BadRow(f"field {field!r} must be a list of objects with role and content, got {_show(value)}")
    # Parquet has a column for every key that any message uses, null where it is not.
    return [{key: item for key, item in message.items() if item is not None or key == "content"} for message in value]


def _tools(record: Mapping[str, Any]) -> list[Any] | None:
    tools = record.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise BadRow(f"field 'tools' is not valid JSON: {error}") from None
    if tools and not isinstance(tools, list):
        raise BadRow(f"field 'tools' must be a list, got {_show(tools)}")
    return tools or None


def _conversation(
    messages: list[dict[str, Any]], tools: list[Any] | None, roles: tuple[str, ...], n_prompt: int = 0
) -> Conversation:
    """`n_prompt` messages at the start are context, whatever their role."""
    supervised = tuple(
        i >= n_prompt and message.get("role") in roles and message.get("weight") not in (0, False)
        for i, message in enumerate(messages)
    )
    return Conversation([{k: v for k, v in m.items() if k != "weight"} for m in messages], supervised, tools)


def _from_messages(record: Mapping[str, Any], roles: tuple[str, ...]) -> Sample:
    return _conversation(_messages(record.get("messages"), "messages"), _tools(record), roles)


def _from_sharegpt(record: Mapping[str, Any], roles: tuple[str, ...]) -> Sample:
    turns = _messages(record.get("conversations"), "conversations")
    messages = []
    for i, turn in enumerate(turns):
        speaker = turn.get("from", turn.get("role"))
        if speaker not in _SHAREGPT_ROLES:
            raise BadRow(f"conversations[{i}].from is {_show(speaker)}; known are {', '.join(_SHAREGPT_ROLES)}")
        content = turn.get("value", turn.get("content"))
        if not isinstance(content, str):
            raise BadRow(f"conversations[{i}].value must be text, got {_show(content)}")
        weight = {"weight": turn["weight"]} if "weight" in turn else {}
        messages.append({"role": _SHAREGPT_ROLES[speaker], "content": content, **weight})
    if system := _text(record, "system", required=False):
        messages.insert(0, {"role": "system", "content": system})
    return _conversation(messages, _tools(record), roles)


def _from_alpaca(record: Mapping[str, Any], roles: tuple[str, ...]) -> Sample:
    parts = [_text(record, "instruction"), _text(record, "input", required=False)]
    system = _text(record, "system", required=False)
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": "\n\n".join(part for part in parts if part)})
    messages.append({"role": "assistant", "content": _text(record, "output")})
    return _conversation(messages, None, roles)


def _answered(prompt: Any, answer: Any, field: str, tools: list[Any] | None, roles: tuple[str, ...]) -> Sample:
    """Join prompt and answer, both text or both messages."""
    if isinstance(prompt, str) and isinstance(answer, str):
        if not answer:
            raise DroppedRow(f"empty {field}")
        return Completion(prompt, answer)
    before, after = _messages(prompt, "prompt"), _messages(answer, field)
    return _conversation(before + after, tools, roles, len(before))


def _from_prompt_completion(record: Mapping[str, Any], roles: tuple[str, ...]) -> Sample:
    for field in ("prompt", "completion"):
        if record.get(field) is None:
            raise BadRow(f"field {field!r} is missing")
    return _answered(record["prompt"], record["completion"], "completion", _tools(record), roles)


def _from_preference(record: Mapping[str, Any], roles: tuple[str, ...]) -> Sample:
    """Row PP1: a record without all of its outputs is dropped before anything is aligned."""
    chosen, rejected = record.get("chosen"), record.get("rejected")
    if not chosen or not rejected:
        missing = [name for name, value in (("chosen", chosen), ("rejected", rejected)) if not value]
        raise DroppedRow(f"incomplete pair: no {' and no '.join(missing)}")
    prompt, tools = record.get("prompt"), _tools(record)
    if _is_messages(chosen) and _is_messages(rejected) and not _is_messages(prompt):
        n_common = 0
        while n_common < min(len(chosen), len(rejected)) - 1 and chosen[n_common] == rejected[n_common]:
            n_common += 1
        if n_common == 0 and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        else:
            prompt, chosen, rejected = chosen[:n_common], chosen[n_common:], rejected[n_common:]
            if not prompt:
                raise BadRow("'chosen' and 'rejected' have no message in common and there is no field 'prompt'")
    if prompt is None:
        raise BadRow("field 'prompt' is missing")
    answers = {"chosen": chosen, "rejected": rejected}
    samples = [_answered(prompt, answer, name, tools, roles) for name, answer in answers.items()]
    if type(samples[0]) is not type(samples[1]):
        raise BadRow("'chosen' and 'rejected' must both be text or both be messages")
    return Pair(*samples)  # type: ignore[arg-type]  # _answered returns these two types


def _from_prompts(record: Mapping[str, Any], _: tuple[str, ...]) -> Sample:
    name = "messages" if "messages" in record else "prompt"
    prompt = record.get(name)
    columns = {key: value for key, value in record.items() if key not in (name, "tools")}
    try:
        text = json.dumps(columns, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise BadRow(f"a column is not JSON data: {error}") from None
    if isinstance(prompt, str):
        if not prompt:
            raise DroppedRow("empty prompt")
        return Prompt(prompt, None, text)
    return Prompt(_messages(prompt, name), _tools(record), text)


def _from_text(record: Mapping[str, Any], _: tuple[str, ...]) -> Sample:
    text = _text(record, "text")
    if not text:
        raise DroppedRow("empty text")
    return text


_READERS: Mapping[str, Callable[[Mapping[str, Any], tuple[str, ...]], Sample]] = {
    "messages": _from_messages,
    "sharegpt": _from_sharegpt,
    "alpaca": _from_alpaca,
    "prompt_completion": _from_prompt_completion,
    "preference": _from_preference,
    "prompts": _from_prompts,
    "text": _from_text,
}


def to_sample(value: Any, format: str, fields: Mapping[str, str], roles: tuple[str, ...]) -> Sample:
    """Return what a record means.

    Parameters
    ----------
    value
        The record; text stands for ``{"text": ...}``.
    format, fields, roles
        Of the configuration.

    Raises
    ------
    BadRow
        The record is malformed.
    DroppedRow
        The record is left out on purpose.
    """
    record = {"text": value} if isinstance(value, str) and format == "text" else value
    if not isinstance(record, dict):
        raise BadRow(f"must be a JSON object, got {_show(value)}")
    for expected, actual in fields.items():
        if actual in record:
            record = {**{k: v for k, v in record.items() if k != actual}, expected: record[actual]}
    return _READERS[format](record, roles)
