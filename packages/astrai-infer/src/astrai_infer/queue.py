"""Tasks that wait to be admitted, by priority and arrival. No torch here."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from astrai_infer.task import Task


class TaskQueue:
    """A priority queue; a preempted task keeps its place by its first arrival."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Task]] = []
        self._arrivals = itertools.count(1)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Task]:
        return (task for _, task in self._heap)

    def push(self, task: Task) -> None:
        """Add a new task, or one that was preempted."""
        if task.arrival == 0:
            task.arrival = next(self._arrivals)
        task.status = "waiting"
        heapq.heappush(self._heap, (task.order, task))

    def peek(self) -> Task | None:
        """Return the task to admit next."""
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Task:
        """Remove the task to admit next."""
        return heapq.heappop(self._heap)[1]

    def remove(self, tasks: list[Task]) -> None:
        """Drop tasks wherever they stand."""
        gone = set(map(id, tasks))
        self._heap = [entry for entry in self._heap if id(entry[1]) not in gone]
        heapq.heapify(self._heap)
