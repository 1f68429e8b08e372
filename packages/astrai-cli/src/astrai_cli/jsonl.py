"""The lines of a batch: prompts or conversations in, answers out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

if TYPE_CHECKING:
    from astrai_core.types import Completion


@dataclass(frozen=True)
class Line:
    """One request of a batch."""

    record: dict[str, Any]
    """The line as it was given."""
    prompt: str | list[dict[str, Any]]
    """Plain text, or a conversation."""


def conversation(text: str, system: str | None) -> list[dict[str, Any]]:
    """Return the messages that ask a model for `text`."""
    start = [] if system is None else [{"role": "system", "content": system}]
    return [*start, {"role": "user", "content": text}]


def read_lines(path: Path, *, raw: bool, system: str | None) -> list[Line]:
    """Read and check a whole file of ``{"prompt": ...}`` and ``{"messages": ...}`` objects; empty lines are skipped.

    Parameters
    ----------
    raw
        Leave prompts as they are; else they become conversations.
    system
        System prompt of those conversations that have none.

    Raises
    ------
    click.ClickException
        Names the file, the line and what is wrong with it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise click.ClickException(f"{path}: not UTF-8 text (byte {error.start}); convert it") from None
    lines = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise click.ClickException(f"{path}:{number}: not valid JSON ({error}); correct the line") from None
        problem = _problem(record, raw)
        if problem is not None:
            raise click.ClickException(f"{path}:{number}: {problem}")
        lines.append(Line(record, _prompt(record, raw, system)))
    return lines


def answer(line: Line, completion: Completion) -> str:
    """Return the output line: the keys of the input, then the completion's."""
    record = {key: value for key, value in line.record.items() if key != "error"} | describe(completion)
    if completion.error is not None:
        record["error"] = completion.error
    return json.dumps(record, ensure_ascii=False) + "\n"


def describe(completion: Completion) -> dict[str, Any]:
    """Return what the JSON of an answer says about a completion."""
    usage = completion.usage
    return {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "usage": {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens},
    }


def _problem(record: Any, raw: bool) -> str | None:
    if not isinstance(record, dict):
        return f'must be an object with "prompt" or "messages", not {json.dumps(record)[:40]}'
    if ("prompt" in record) == ("messages" in record):
        return 'must have either "prompt" or "messages"'
    if "prompt" in record:
        return None if isinstance(record["prompt"], str) else '"prompt" must be a string'
    messages = record["messages"]
    if raw:
        return '"messages" need the chat template; leave out --raw, or give "prompt"'
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        return '"messages" must be a list of objects with "role" and "content"'
    return None


def _prompt(record: dict[str, Any], raw: bool, system: str | None) -> str | list[dict[str, Any]]:
    if "prompt" in record:
        return record["prompt"] if raw else conversation(record["prompt"], system)
    messages: list[dict[str, Any]] = record["messages"]
    if system is None or messages[0].get("role") == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]
