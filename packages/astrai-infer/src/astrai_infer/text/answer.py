"""From the text of one choice to events: reasoning split, then calls of tools. No torch here."""

from __future__ import annotations

from astrai_infer.text.events import Content, Event, merged
from astrai_infer.text.reasoning import ThinkSplitter
from astrai_infer.text.tools import ToolParser


class AnswerParser:
    """The one road for streamed and whole answers: the joined events of all pieces are the events of the whole."""

    def __init__(self, thoughts: ThinkSplitter | None = None, tools: ToolParser | None = None) -> None:
        self._thoughts = thoughts
        self._tools = tools

    def push(self, text: str) -> list[Event]:
        """Take the next piece of text."""
        events: list[Event] = [Content(text)] if self._thoughts is None else self._thoughts.push(text)
        return merged(self._find_calls(events))

    def end(self) -> list[Event]:
        """The text is over: return what was held back."""
        events = [] if self._thoughts is None else self._thoughts.end()
        events = self._find_calls(events)
        if self._tools is not None:
            events += self._tools.end()
        return merged(events)

    def _find_calls(self, events: list[Event]) -> list[Event]:
        if self._tools is None:
            return events
        found: list[Event] = []
        for event in events:
            found += self._tools.push(event.text) if isinstance(event, Content) else [event]
        return found
