"""Splits what a model thinks from what it says. No torch here."""

from __future__ import annotations

from astrai_infer.text.events import Content, Event, Reasoning
from astrai_infer.text.stop import partial_tail

OPEN, CLOSE = "<think>", "</think>"


class ThinkSplitter:
    """Text between ``<think>`` and ``</think>`` at the start of an answer is reasoning, the rest is content.

    White space at the edges of either is dropped. Later marks are content. What is emitted, joined, does not depend on
    how the text was cut into pieces.

    Parameters
    ----------
    opened
        The prompt ends with ``<think>``, so that the answer begins inside of it.
    """

    def __init__(self, *, opened: bool) -> None:
        self._state = "start of thought" if opened else "start"
        self._held = ""

    def push(self, text: str) -> list[Event]:
        """Take the next piece of text."""
        if self._state == "content":
            return [Content(text)]
        self._held += text
        events: list[Event] = []
        if self._state == "start":
            begun = self._held.lstrip()
            if begun.startswith(OPEN):
                self._state, self._held = "start of thought", begun[len(OPEN) :]
            elif OPEN.startswith(begun):
                return []
            else:
                return self._release(self._held)
        if self._state == "start of thought":
            self._held = self._held.lstrip()
            if not self._held:
                return []
            self._state = "thought"
        if self._state == "thought":
            at = self._held.find(CLOSE)
            if at < 0:
                kept = self._held[: len(self._held) - partial_tail(self._held, (CLOSE,))].rstrip()
                self._held = self._held[len(kept) :]
                return [Reasoning(kept)]
            events.append(Reasoning(self._held[:at].rstrip()))
            self._state, self._held = "after", self._held[at + len(CLOSE) :]
        answer = self._held.lstrip()
        return [*events, *self._release(answer)] if answer else events

    def end(self) -> list[Event]:
        """The text is over: return what is held back."""
        held, state = self._held, self._state
        self._state, self._held = "content", ""
        if state == "start":
            return [Content(held)]
        return [Reasoning(held)] if state == "thought" else []

    def _release(self, text: str) -> list[Event]:
        self._state, self._held = "content", ""
        return [Content(text)]
