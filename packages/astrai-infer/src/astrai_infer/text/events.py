"""What an answer is made of, once its text is understood. No torch here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole call of a function."""

    index: int
    """Rises from 0 within an answer."""
    name: str
    arguments: str
    """A JSON object."""


Event = Content | Reasoning | ToolCall


def merged(events: list[Event]) -> list[Event]:
    """Join neighbours of the same kind and drop empty texts."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, ToolCall):
            joined.append(event)
        elif not event.text:
            continue
        elif isinstance(event, Content) and isinstance(last, Content):
            joined[-1] = Content(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            joined[-1] = Reasoning(last.text + event.text)
        else:
            joined.append(event)
    return joined
