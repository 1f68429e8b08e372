"""Finds calls of functions in the text of an answer, in the formats that models are trained to write. No torch here.

A call is told when it is whole: what turns out not to be one is content, and nothing has to be taken back. White space
beside calls belongs to neither. What is emitted, joined, does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from astrai_infer.text.events import Content, Event, ToolCall
from astrai_infer.text.stop import partial_tail

_HEAD = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*[\w-]+\s*)?(?:\[ARGS\]\s*)?")
_HEAD_CHARS = re.compile(r"[\w\s.\[\]-]*")
_STRUCTURE, _STRING_END = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')

MAX_BROKEN = 16
"""Marks without a call behind them; what follows so many is text. Each costs a look at all that follows it, and a model
can be talked into writing thousands."""


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes calls.

    Attributes
    ----------
    open, close
        Marks before and after a call; `close` may be left out by the model.
    bare
        JSON at the very start of an answer is a call without its mark.
    separator
        Stands between calls that share one mark.
    heads
        The function's name may stand before its arguments, outside of the JSON.
    id_len
        Letters and digits of a call's id, where the template demands a length.
    """

    open: str
    close: str = ""
    bare: bool = False
    separator: str = ""
    heads: bool = False
    id_len: int = 24


FORMATS: Mapping[str, ToolFormat] = {
    "hermes": ToolFormat("<tool_call>", "</tool_call>"),
    "llama3_json": ToolFormat("<|python_tag|>", bare=True, separator=";"),
    "mistral": ToolFormat("[TOOL_CALLS]", heads=True, id_len=9),
}
"""By name: of NousResearch's Hermes and Qwen 2.5 and 3; of Llama 3.1 to 3.3; of Mistral."""

FORCED = ToolFormat("", bare=True)
"""What a grammar makes a model write when it must call: a JSON list of calls."""


def format_of(template: str) -> str | None:
    """Return the name of the format that a chat template asks for, None if it knows no tools."""
    if "tools" not in template:
        return None
    marks = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama3_json": "<|python_tag|>"}
    for name, mark in marks.items():
        if mark in template:
            return name
    return "llama3_json" if '"parameters"' in template else None


class ToolParser:
    """Reads one answer.

    Parameters
    ----------
    format
        One of :data:`FORMATS`, or :data:`FORCED`.
    """

    def __init__(self, format: ToolFormat) -> None:
        self._format = format
        self._state = "start" if format.bare else "text"
        self._held = ""
        self._space = ""  # content before the mark of the call that is being read
        self._mark = ""
        self._scan = JsonScanner()
        self._n_calls = 0
        self._n_broken = 0

    def push(self, text: str) -> list[Event]:
        """Take the next piece of text."""
        self._held += text
        events: list[Event] = []
        while (step := getattr(self, f"_in_{self._state}")()) is not None:
            events += step
        return events

    def end(self) -> list[Event]:
        """The text is over: return what is held back; a call that is not whole is content."""
        events: list[Event] = []
        while self._state == "call":
            events += self._not_a_call()
            events += self.push("")
        if self._state != "after":
            events.append(Content(self._held))
        self._held = ""
        return events

    def _in_start(self) -> list[Event] | None:
        begun = self._held.lstrip()
        if not begun or (self._format.open.startswith(begun) and begun != self._format.open):
            return None
        if begun[0] in "{[":
            self._read_call(self._held[: len(self._held) - len(begun)], "", begun)
        else:
            self._state = "text"
        return []

    def _in_text(self) -> list[Event] | None:
        held, mark = self._held, self._format.open
        at = held.find(mark) if mark else -1
        if at >= 0:
            before = held[:at].rstrip()
            self._read_call(held[len(before) : at], mark, held[at + len(mark) :])
            return [Content(before)]
        kept = held[: len(held) - partial_tail(held, (mark,))].rstrip() if mark else held
        self._held = held[len(kept) :]
        return [Content(kept)] if kept else None

    def _in_plain(self) -> list[Event] | None:
        """Too many marks were none: all is text."""
        held, self._held = self._held, ""
        return [Content(held)] if held else None

    def _in_call(self) -> list[Event] | None:
        held = self._held
        start = self._json_start()
        if start is None:
            return None
        end = None if start < 0 else self._scan.end(held, start)
        if end is None:
            return self._not_a_call() if start < 0 else None
        calls = _calls(held[:start], held[start:end])
        if not calls:
            return self._not_a_call()
        first, self._n_calls = self._n_calls, self._n_calls + len(calls)
        self._state, self._held = "after", held[end:]
        return [ToolCall(first + i, name, arguments) for i, (name, arguments) in enumerate(calls)]

    def _in_after(self) -> list[Event] | None:
        """Skip white space, the closing mark and separators; what follows is text, or another call."""
        format = self._format
        self._held = held = self._held.lstrip()
        skipped = [mark for mark in (format.close, format.separator) if mark]
        for mark in skipped:
            if held.startswith(mark):
                self._held = held[len(mark) :]
                return []
        if not held or partial_tail(held, skipped) == len(held):
            return None
        if format.separator and held[0] == "{":
            self._read_call("", "", held)
        else:
            self._state = "text"
        return []

    def _read_call(self, space: str, mark: str, rest: str) -> None:
        self._state, self._space, self._mark, self._held = "call", space, mark, rest
        self._scan = JsonScanner()

    def _json_start(self) -> int | None:
        """Where the call's JSON begins; None if that is still to come, -1 if there is none."""
        held = self._held
        begun = held.lstrip()
        if not begun:
            return None
        if begun[0] in "{[":
            return len(held) - len(begun)
        if not self._format.heads:
            return -1
        at = held.find("{")
        head = held if at < 0 else held[:at]
        if not (_HEAD_CHARS.fullmatch(head) if at < 0 else _HEAD.fullmatch(head)):
            return -1
        return None if at < 0 else at

    def _not_a_call(self) -> list[Event]:
        """Give the mark back as content, and read on after it."""
        first = "" if self._mark else self._held[:1]
        self._held = self._held[len(first) :]
        self._n_broken += 1
        self._state = "text" if self._n_broken < MAX_BROKEN else "plain"
        return [Content(self._space + self._mark + first)]


class JsonScanner:
    """Finds the end of a JSON object or list in a text that grows; looks at each character once."""

    def __init__(self) -> None:
        self._at = -1
        self._depth = 0
        self._in_string = False

    def end(self, text: str, start: int) -> int | None:
        """Return the index after the value that begins at `start`, None if it is not whole."""
        at = max(self._at, start)
        while found := (_STRING_END if self._in_string else _STRUCTURE).search(text, at):
            at, char = found.end(), found[0]
            if char == "\\":
                at += 1  # what is escaped, which may still be to come
            elif char == '"':
                self._in_string = not self._in_string
            elif char in "{[":
                self._depth += 1
            else:
                self._depth -= 1
                if not self._depth:
                    return at
        self._at = max(at, len(text))
        return None


def _calls(head: str, body: str) -> list[tuple[str, str]] | None:
    """Names and arguments of the calls in a whole JSON value; None if it holds anything else."""
    try:
        value = _loaded(body)
    except (ValueError, RecursionError):
        return None
    name = _HEAD.fullmatch(head)
    if name is not None:
        return [(name[1], json.dumps(value, ensure_ascii=False))] if isinstance(value, dict) else None
    calls = [_call(item) for item in (value if isinstance(value, list) else [value])]
    return None if None in calls else [call for call in calls if call is not None]


def _call(value: Any) -> tuple[str, str] | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):  # JSON within JSON
        try:
            arguments = _loaded(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            return None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return None
    return value["name"], json.dumps(arguments, ensure_ascii=False)


def _loaded(text: str) -> Any:
    value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair, which JSON can escape, cannot be sent
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is out of range")
    return value
