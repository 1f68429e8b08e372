"""Work that is captured once and replayed (rows G1-G3, G6)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar
from weakref import WeakSet

import torch

logger = logging.getLogger(__name__)

R = TypeVar("R")

MOST_GRAPHS = 128
"""Graphs of one engine; what comes after them runs without. A graph of 200 kernels takes about a megabyte."""


class Capture(Protocol):
    """Turns a function into one that repeats its device work on the same memory."""

    def __call__(self, run: Callable[[], R]) -> tuple[Callable[[], None], R]:
        """Capture what `run` launches, without running it; return the replay and what `run` returned."""
        ...


class CudaCapture:
    """Captures CUDA graphs that share one pool of memory, on one stream.

    Two of them never run at once, so a graph may use the memory of another's temporaries; what a capture returns is its
    own for as long as it is held.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._alive: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self._failed: list[torch.cuda.CUDAGraph] = []

    def __call__(self, run: Callable[[], R]) -> tuple[Callable[[], None], R]:
        """See :class:`Capture`."""
        if len(self._alive) == len(self._failed):
            self._failed.clear()
            # torch refuses the handle of a pool whose graphs are gone if a piece of it is still in use.
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        self._alive.add(graph)
        try:
            # Other threads may allocate meanwhile; what they do is none of the capture's business.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                output = run()
        except BaseException:
            # With a graph torch 2.13 frees the workspaces of cuBLAS on its stream, which the other graphs hold addresses of
            # (pytorch/pytorch#193402): no graph goes before all do.
            self._failed.append(graph)
            raise
        return graph.replay, output


@dataclass(frozen=True)
class _Graph(Generic[R]):
    replay: Callable[[], None]
    output: R


class CudaGraphContext:
    """Runs work by key: the first time as it is, which warms up whatever it loads; the second time it is captured.

    Parameters
    ----------
    capture
        How; None: everything always runs as it is.
    """

    def __init__(self, capture: Capture | None) -> None:
        self._capture = capture
        self._seen: set[Hashable] = set()
        self._refused: set[Hashable] = set()
        self._graphs: dict[Hashable, _Graph[object]] = {}

    def has_graph(self, key: Hashable) -> bool:
        """Whether work of that key is replayed."""
        return key in self._graphs

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, key: Hashable | None, work: Callable[[], R]) -> R:
        """Do the work, or replay it.

        Parameters
        ----------
        key
            Names the work: with the same key it does the same on the same memory. None: it is not worth a graph.

        Returns
        -------
        What `work` returns; the same object in every replay.
        """
        graph = self._graphs.get(key)
        if graph is None:
            if self._capture is None or key is None or key not in self._seen:
                self._seen.add(key)
                return work()
            if len(self._graphs) >= MOST_GRAPHS or key in self._refused:
                return work()
            try:
                # Nothing has run when a capture ends: its output holds no result before the first replay (row G2).
                graph = self._graphs[key] = _Graph(*self._capture(work))
            except torch.OutOfMemoryError:
                self._refused.add(key)
                logger.warning("no memory is left to capture %s: it runs without a graph; lower memory_fraction", key)
                return work()
        graph.replay()
        output: R = graph.output  # type: ignore[assignment]
        return output

    def forget(self) -> None:
        """Drop all graphs, since the memory they use is about to move."""
        self._graphs.clear()
        self._seen.clear()
        self._refused.clear()
