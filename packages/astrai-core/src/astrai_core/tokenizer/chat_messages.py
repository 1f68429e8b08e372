"""Chat messages and tools, checked and brought into the one form that templates are written for (inference rule 16).

Clients send what the OpenAI API allows: ``content: null``, lists of text parts, ``tool_calls: []``, arguments as JSON
text, SDK objects. Templates expect plain dicts with text, and objects for arguments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from astrai_core.errors import RequestError

_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


def plain(value: Any, where: str) -> Any:
    """Rebuild ``value`` out of exact JSON types, so that a template reaches no method of a caller's object.

    Parameters
    ----------
    value
        JSON data; mappings, tuples, subclasses of str, int, float and objects with ``model_dump`` are converted.
    where
        The field's name for error messages.

    Raises
    ------
    RequestError
        A value is not JSON data, or nests too deeply.
    """
    try:
        return _plain(value, where)
    except RecursionError:
        raise RequestError(f"{where} nests too deeply; send flatter data") from None


def _plain(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool):
        return value
    # The base class's conversion, because str() of an enum member is its name.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if callable(dump := getattr(value, "model_dump", None)):
        return _plain(dump(), where)
    raise RequestError(
        f"{where} is a {type(value).__name__}, which is not JSON data; send strings, numbers, lists or objects"
    )


def normalize_tools(tools: Sequence[Any] | None) -> list[dict[str, Any]] | None:
    """Tool schemas as plain dicts; None when there are none.

    Raises
    ------
    RequestError
        ``tools`` is not a list of JSON objects.
    """
    if not tools:
        return None
    if not isinstance(tools, list | tuple):
        raise RequestError("tools must be a list of JSON objects")
    result = plain(tools, "tools")
    for i, tool in enumerate(result):
        if not isinstance(tool, dict):
            raise RequestError(f"tools[{i}] must be a JSON object (a function schema), not {type(tools[i]).__name__}")
    return list(result)


def normalize_messages(
    messages: Sequence[Any], *, keep_null_content: bool = False, json_arguments: bool = False
) -> list[dict[str, Any]]:
    """Check chat messages and bring them into the form that templates expect; the input is left alone.

    Parameters
    ----------
    messages
        Mappings or objects with ``model_dump``, each with a ``role`` and (but for assistants) a ``content``.
    keep_null_content
        Leave ``content: null`` as None, for templates that ask for it; by default it becomes ``""``.
    json_arguments
        Give tool-call arguments as JSON text, for templates that paste them; by default they become objects.

    Returns
    -------
    list of dict
        Text parts are joined by newlines; keys that are null and empty ``tool_calls`` are dropped; reasoning sent
        under an older name is also found under ``reasoning_content``.

    Raises
    ------
    RequestError
        Names ``messages[i].field``.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(f"messages must be a list of objects with role and content, not {type(messages).__name__}")
    if not messages:
        raise RequestError("messages is empty; send at least one message")
    return [
        _message(message, f"messages[{i}]", keep_null_content, json_arguments)
        for i, message in enumerate(plain(list(messages), "messages"))
    ]


def _message(message: Any, where: str, keep_null_content: bool, json_arguments: bool) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RequestError(f"{where} must be an object with role and content, not {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        problem = "is missing" if role is None else f"is {role!r}"
        raise RequestError(f"{where}.role {problem}; it must be a string such as 'system', 'user' or 'assistant'")
    if "content" not in message and role != "assistant":
        raise RequestError(f"{where}.content is missing; send a string or a list of text parts")
    result = {key: value for key, value in message.items() if value is not None}
    content = _content(message.get("content"), f"{where}.content")
    result["content"] = content if content is not None or keep_null_content else ""
    calls = result.pop("tool_calls", None)
    if calls:
        result["tool_calls"] = _tool_calls(calls, f"{where}.tool_calls", json_arguments)
    reasoning = next((result[key] for key in _REASONING_KEYS if key in result), None)
    if reasoning is not None:
        result = {"thinking": reasoning, **result, "reasoning_content": reasoning}
    return result


def _content(content: Any, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string, null or a list of text parts, not {type(content).__name__}")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text":
            raise RequestError(f"{where}[{i}].type {kind!r} is not supported; this model reads parts of type 'text'")
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{where}[{i}].text must be a string")
        texts.append(part["text"])
    return "\n".join(texts)


def _tool_calls(calls: Any, where: str, json_arguments: bool) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RequestError(f"{where} must be a list, not {type(calls).__name__}")
    for i, call in enumerate(calls):
        # The OpenAI form nests name and arguments under "function"; data sets also hold them flat.
        nested = isinstance(call, dict) and "function" in call
        spot = f"{where}[{i}].function" if nested else f"{where}[{i}]"
        function = call["function"] if nested else call
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"{spot}.name is missing; a tool call needs the function's name")
        arguments = _arguments(function.get("arguments"), f"{spot}.arguments")
        if not json_arguments:
            function["arguments"] = arguments
        elif not isinstance(function.get("arguments"), str):
            function["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return calls


def _arguments(arguments: Any, where: str) -> dict[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{where} is not valid JSON ({error}); send a JSON object") from error
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise RequestError(f"{where} must be a JSON object, not {type(arguments).__name__}")
    return arguments
