"""A lock that goes round. No torch here."""

from __future__ import annotations

import threading
from collections import deque


class Turns:
    """A lock that threads get in the order in which they came.

    A plain lock may go to the thread that has just released it again and again: whoever steps in a loop would keep out a
    thread that wants something between two steps, and one that computes prompt after prompt between steps would keep out
    the steps.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._held = False
        self._queue: deque[threading.Lock] = deque()

    @property
    def n_waiting(self) -> int:
        """Threads that wait for their turn."""
        return len(self._queue)

    def __enter__(self) -> None:
        with self._guard:
            if not self._held:
                self._held = True
                return
            turn = threading.Lock()
            turn.acquire()
            self._queue.append(turn)
        try:
            turn.acquire()  # released by whoever hands over
        except BaseException:  # a signal
            with self._guard:
                has_come = turn not in self._queue
                if not has_come:
                    self._queue.remove(turn)
            if has_come:
                self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        with self._guard:
            if self._queue:
                self._queue.popleft().release()
            else:
                self._held = False
