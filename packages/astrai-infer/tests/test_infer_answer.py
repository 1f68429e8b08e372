"""Reasoning split and tool calls: what a client gets does not depend on how the text was cut (rules 13, 14, 17)."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astrai_infer.text.answer import AnswerParser
from astrai_infer.text.events import Content, Event, Reasoning, ToolCall, merged
from astrai_infer.text.reasoning import ThinkSplitter
from astrai_infer.text.tools import FORCED, FORMATS, JsonScanner, ToolParser, format_of

PARSERS: dict[str, Callable[[], AnswerParser]] = {
    **{name: (lambda f=f: AnswerParser(None, ToolParser(f))) for name, f in FORMATS.items()},
    "forced": lambda: AnswerParser(None, ToolParser(FORCED)),
    "think": lambda: AnswerParser(ThinkSplitter(opened=False)),
    "opened": lambda: AnswerParser(ThinkSplitter(opened=True)),
    "both": lambda: AnswerParser(ThinkSplitter(opened=False), ToolParser(FORMATS["hermes"])),
}

WORDS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "[ARGS]", ";", "\n", " "),
    *('{"name": "f", "arguments": {"x": [1, "}]"]}}', '{"name": "g"}', '[{"name": "h", "parameters": {}}]', "f", "{}"),
    *('{"name": 1}', "{", "}", "[", "]", '"', "\\", "<", "</", "text", "é", "NaN", '{"a": "</tool_call>"}', "[TOOL"),
]
WORDS += [
    *('<tool_call>{"name": "f"}</tool_call>', '<tool_call>\n{"name": "g", "arguments": {"x": "}"}}\n</tool_call>\n'),
    *('[TOOL_CALLS][{"name": "h"}]', "[TOOL_CALLS]f[ARGS]{}", '<|python_tag|>{"name": "p"}; {"name": "q"}'),
    *("<think>\nHm </th\n</think>\n\n", "</think>"),
]
ANSWERS = st.lists(st.sampled_from(WORDS), max_size=12).map("".join)


def read(parser: AnswerParser, pieces: list[str]) -> list[Event]:
    """All events of a text that comes in pieces, neighbours joined."""
    return merged([event for piece in pieces for event in parser.push(piece)] + parser.end())


def cut(text: str, at: list[int]) -> list[str]:
    """The text in pieces."""
    edges = [0, *sorted(i % (len(text) + 1) for i in at), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize("name", PARSERS)
@given(text=ANSWERS, at=st.lists(st.integers(0, 400), max_size=20))
def test_joined_deltas_are_the_whole_answer(name: str, text: str, at: list[int]) -> None:
    """Rules 13 and 17, for random cuts and for one character at a time."""
    whole = read(PARSERS[name](), [text])
    assert read(PARSERS[name](), cut(text, at)) == whole
    assert read(PARSERS[name](), list(text)) == whole
    calls = [event for event in whole if isinstance(event, ToolCall)]
    assert [call.index for call in calls] == list(range(len(calls)))
    assert all(isinstance(json.loads(call.arguments), dict) for call in calls)


@pytest.mark.parametrize("name", PARSERS)
@given(text=ANSWERS)
def test_nothing_but_marks_and_white_space_is_lost(name: str, text: str) -> None:
    """What is no call comes out as it went in, but for white space at the edges of calls and thoughts."""
    events = read(PARSERS[name](), [text])
    if any(isinstance(event, ToolCall) for event in events):
        return
    bare = lambda t: "".join(t.replace("<think>", "").replace("</think>", "").split())
    assert bare("".join(event.text for event in events if not isinstance(event, ToolCall))) == bare(text)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda s: st.lists(s) | st.dictionaries(st.text(), s)
    )
)
def test_the_scanner_finds_the_end_of_any_json(value: Any) -> None:
    text = json.dumps({"v": value}, ensure_ascii=False)
    scanner = JsonScanner()
    ends = [scanner.end(text[: i + 1], 0) for i in range(len(text))]
    assert ends == [None] * (len(text) - 1) + [len(text)]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "hermes",
            'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\n'
            '<tool_call>{"name": "g", "arguments": {}}</tool_call> Done.',
            [Content("Let me see."), ToolCall(0, "f", '{"x": 1}'), ToolCall(1, "g", "{}"), Content("Done.")],
        ),
        ("hermes", '<tool_call>{"name": "f"}', [ToolCall(0, "f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "argu', [Content('<tool_call>{"name": "f", "argu')]),
        ("hermes", "<tool_call>f()</tool_call>", [Content("<tool_call>f()</tool_call>")]),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"x": NaN}}',
            [Content('<tool_call>{"name": "f", "arguments": {"x": NaN}}')],
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>',
            [ToolCall(0, "f", '{"x": "</tool_call>"}')],
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}',
            [Content('<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}')],
        ),
        ("mistral", '[TOOL_CALLS]f{"x": "\\udc00"}', [Content('[TOOL_CALLS]f{"x": "\\udc00"}')]),
        ("hermes", '{"name": "f", "arguments": {}}', [Content('{"name": "f", "arguments": {}}')]),
        ("llama3_json", '{"name": "f", "parameters": {"x": "y"}}', [ToolCall(0, "f", '{"x": "y"}')]),
        (
            "llama3_json",
            '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
            [ToolCall(0, "f", "{}"), ToolCall(1, "g", "{}")],
        ),
        ("llama3_json", 'Use {"name": "f"}', [Content('Use {"name": "f"}')]),
        ("llama3_json", '{"colour": "red"}', [Content('{"colour": "red"}')]),
        (
            "mistral",
            'Hm. [TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]',
            [Content("Hm."), ToolCall(0, "f", '{"x": 1}'), ToolCall(1, "g", "{}")],
        ),
        (
            "mistral",
            '[TOOL_CALLS]f{"x": 1}[TOOL_CALLS]g[ARGS]{}',
            [ToolCall(0, "f", '{"x": 1}'), ToolCall(1, "g", "{}")],
        ),
        ("mistral", "[TOOL_CALLS]what is this?", [Content("[TOOL_CALLS]what is this?")]),
        ("forced", '[{"name": "f", "arguments": {"x": 1}}]', [ToolCall(0, "f", '{"x": 1}')]),
        ("think", "<think>\nHm.\n</think>\n\nYes.", [Reasoning("Hm."), Content("Yes.")]),
        ("think", "Yes <think>no</think>", [Content("Yes <think>no</think>")]),
        ("think", "<think>\n\n</think>\n\nYes.", [Content("Yes.")]),
        ("opened", "Hm.</think>Yes.", [Reasoning("Hm."), Content("Yes.")]),
        ("opened", "Hm, not done", [Reasoning("Hm, not done")]),
        (
            "both",
            '<think>Call?</think>\n<tool_call>{"name": "f"}</tool_call>',
            [Reasoning("Call?"), ToolCall(0, "f", "{}")],
        ),
    ],
)
def test_what_is_read(name: str, text: str, expected: list[Event]) -> None:
    """Rule 17: no-argument calls give {}, text around calls survives, what does not parse is content."""
    assert read(PARSERS[name](), [text]) == expected


def test_only_what_could_begin_a_mark_is_held_back() -> None:
    """Rule 14: text goes out at once, but for a suffix that may be the start of a call, and white space before it."""
    parser = PARSERS["hermes"]()
    assert parser.push("Hello <tool") == [Content("Hello")]
    assert parser.push(" box>") == [Content(" <tool box>")]


@pytest.mark.parametrize(
    ("template", "format"),
    [
        ("{{ tools }} <tool_call>", "hermes"),
        ("{{ tools }} [TOOL_CALLS]", "mistral"),
        ('{{ tools }} {"name": function name, "parameters": {}}', "llama3_json"),
        ("<tool_call>", None),
        ("{{ messages }}", None),
    ],
)
def test_the_format_is_read_from_the_template(template: str, format: str | None) -> None:
    assert format_of(template) == format


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral"])
def test_marks_that_never_close_cost_little(name: str) -> None:
    """Rule 23: thousands of marks without a call behind them are text, read in a moment and the same however cut."""
    mark = FORMATS[name].open
    text = f'{mark}{{"a": ' * 4000 + f'{mark}{{"name": "f"}}'
    before = time.process_time()
    assert read(PARSERS[name](), [text]) == [Content(text)]
    assert time.process_time() - before < 2, "each mark looked at all that follows"
    some = f"{mark}{{ " * 20 + f'{mark}{{"name": "f"}}'
    assert read(PARSERS[name](), list(some)) == read(PARSERS[name](), [some]) == [Content(some)]
