"""Timing by CUDA-graph replay over buffers that L2 cannot hold, and tables of the results."""

from __future__ import annotations

import argparse
import functools
import json
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tools.gpu_results import environment

Call = Callable[[], Any]

SAMPLES = 21
# Replays shorter than this are repeated within a sample, so that event resolution (0.5 us) does not show.
SAMPLE_MICROSECONDS = 500.0
MOST_CALLS = 512


def buffer_sets(bytes_per_call: float) -> int:
    """Return how many sets of operands to rotate through: three times L2 in all, 4 to 512 sets."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    return max(4, min(MOST_CALLS, -(-3 * l2 // max(1, int(bytes_per_call)))))


def graph_microseconds(calls: Sequence[Call]) -> float:
    """Return the median time of one call in microseconds.

    All calls are captured in one CUDA graph, each with operands of its own. What they return is kept until the end of
    the capture, so that each also writes memory of its own. The graph is replayed in 21 timed samples.

    Parameters
    ----------
    calls : sequence of callables
        The same work on different buffers; each must be capturable.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()
        calls[-1]()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    graph.replay()
    torch.cuda.synchronize()
    repeats = max(1, round(SAMPLE_MICROSECONDS / _replay_microseconds(graph, 1)))
    samples = [_replay_microseconds(graph, repeats) for _ in range(SAMPLES)]
    del kept
    return statistics.median(samples) / len(calls)


def _replay_microseconds(graph: torch.cuda.CUDAGraph, repeats: int) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        graph.replay()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) * 1e3 / repeats


def copy_bandwidth() -> float:
    """Return the card's copy rate in GB/s, bytes read plus bytes written: the ceiling of the same run.

    By an elementwise kernel: as a graph's memcpy node, ``copy_`` reaches two thirds of it (2.76 TB/s on an H200).
    """
    n_bytes = 1 << 29
    pairs = [tuple(torch.empty(n_bytes // 4, dtype=torch.float32, device="cuda") for _ in range(2)) for _ in range(4)]
    calls = [functools.partial(torch.neg, source, out=target) for source, target in pairs]
    return 2 * n_bytes / graph_microseconds(calls) * 1e-3


def table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
    """Align ``columns`` of ``rows`` as text; numbers to the right."""
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in [list(columns), *cells]) for i in range(len(columns))]
    right = [isinstance(rows[0].get(column), int | float) for column in columns]
    shapes = [f"{{:{'>' if number else '<'}{width}}}" for number, width in zip(right, widths, strict=True)]
    lines = [
        "  ".join(shape.format(cell) for shape, cell in zip(shapes, line, strict=True))
        for line in [list(columns), *cells]
    ]
    return "\n".join(line.rstrip() for line in lines)


def _cell(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


class Rows:
    """Rows of a benchmark: printed as they come and written after each, so that a run cut short keeps what it has.

    Parameters
    ----------
    path : Path
        JSON file; its stem names the run.
    facts : mapping
        What holds for all rows.
    options : argparse.Namespace
        As :func:`add_limits` fills it.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any], options: argparse.Namespace) -> None:
        self._path = path
        self._facts = {"name": path.stem, "environment": environment(), **facts}
        self._lists: dict[str, list[dict[str, Any]]] = {}
        self._selected = re.compile(options.rows or "")
        self._deadline = None if options.budget is None else time.monotonic() + options.budget
        self._left_out: list[str] = []
        path.parent.mkdir(parents=True, exist_ok=True)

    def wants(self, label: str) -> bool:
        """Whether ``--rows`` selects the row and ``--budget`` has time left; says once at the end what it had not."""
        if self._selected.search(label) is None:
            return False
        if self._deadline is not None and time.monotonic() > self._deadline:
            self._left_out.append(label)
            return False
        return True

    def add(self, name: str, row: dict[str, Any], columns: Sequence[str]) -> None:
        """Append to the list ``name`` of the file, and print ``columns``."""
        rows = self._lists.setdefault(name, [])
        rows.append(row)
        header, line = _line(columns, row)
        print(f"\n{header}\n{line}" if len(rows) == 1 else line, flush=True)
        self._path.write_text(json.dumps({**self._facts, **self._lists}, indent=2) + "\n")

    def close(self) -> None:
        """Name the rows that the budget left out, and the file."""
        if self._left_out:
            print(f"\nno time for {len(self._left_out)} rows: {'; '.join(self._left_out)}")
        print(f"\nwrote {self._path}")


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Add the options that :class:`Rows` obeys."""
    parser.add_argument("--rows", metavar="REGEX", help="only the rows whose label it is found in")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="start no row after this time")


def _line(columns: Sequence[str], row: Mapping[str, Any]) -> tuple[str, str]:
    cells = [_cell(row.get(column)) if column in row else "-" for column in columns]
    widths = [max(len(column), 10) for column in columns]
    pairs = [
        (f"{column:>{width}}", f"{cell:>{width}}") for column, cell, width in zip(columns, cells, widths, strict=True)
    ]
    return "  ".join(header for header, _ in pairs), "  ".join(cell for _, cell in pairs)
