"""Stop strings over a stream of text."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text on until a stop string appears.

    Only the longest suffix that could begin a stop string is held back. What is emitted does not depend on how the
    text was cut into pieces: the match that ends first wins, and of those the one that starts first.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._openers = frozenset(stop[0] for stop in stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Take the next piece of text.

        Returns
        -------
        (text to emit, the stop string that was found or None)
        """
        if not self._held and self._openers.isdisjoint(text):
            return text, None
        buffer = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := buffer.find(stop)) >= 0]
        if found:
            _, start, stop = min(found)
            self._held = ""
            return buffer[:start], stop
        keep = partial_tail(buffer, self._stops)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], None

    def flush(self) -> str:
        """Return what is held back; nothing can match any more."""
        held, self._held = self._held, ""
        return held


def partial_tail(buffer: str, needles: Sequence[str]) -> int:
    """Return the length of the longest proper beginning of a needle with which `buffer` ends."""
    longest = max(map(len, needles), default=0)
    for length in range(min(longest - 1, len(buffer)), 0, -1):
        suffix = buffer[len(buffer) - length :]
        if any(needle.startswith(suffix) for needle in needles):
            return length
    return 0
