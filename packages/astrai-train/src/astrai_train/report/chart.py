"""Curves as inline SVG."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

WIDTH, HEIGHT = 560, 240
LEFT, RIGHT, TOP, BOTTOM = 62, 30, 12, 28
MAX_POINTS = 600
"""Points of a curve that are drawn; of longer ones the lowest and highest of each stretch."""

_TINY = 1e-280
"""Below it differences lose their digits."""

Format = Callable[[float], str]


@dataclass(frozen=True)
class Series:
    """One curve of a chart."""

    name: str
    points: Sequence[tuple[float, float]]
    """(step, value), by step."""
    dots: bool = False
    """Mark every point: for values that are rare."""


@dataclass(frozen=True)
class Chart:
    """Curves over steps in one pair of axes."""

    title: str
    series: Sequence[Series]
    show: Format = field(default=lambda value: f"{value:.4g}")
    """How a value is written."""


def draw(chart: Chart, resumes: Sequence[int] = ()) -> str:
    """Return the chart as an SVG element.

    Parameters
    ----------
    resumes
        Steps after which the run was taken up again: vertical lines.
    """
    curves = [Series(s.name, thin(s.points), s.dots) for s in chart.series if s.points]
    steps = [x for series in curves for x, _ in series.points]
    values = [y for series in curves for _, y in series.points]
    x_low, x_high = min([0.0, *steps]), max(1.0, *steps, *resumes)
    y_ticks = ticks(min(values), max(values))
    y_low, y_high = min(y_ticks[0], *values), max(y_ticks[-1], *values)

    def at(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
        return across, HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    parts = []
    for value in y_ticks:
        _, y = at(x_low, value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_text(chart.show(value))}</text>'
        )
    for value in ticks(x_low, x_high):
        if x_low <= value <= x_high:
            x, _ = at(value, y_low)
            label = f'<text class="tick" x="{x:.1f}" y="{HEIGHT - 10}" text-anchor="middle">{value:,.0f}</text>'
            parts.append(label)
    for step in resumes:
        x, _ = at(step, y_low)
        parts.append(
            f'<line class="resume" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}">'
            f"<title>resumed after step {step:,}</title></line>"
        )
    for number, series in enumerate(curves):
        path = [at(x, y) for x, y in series.points]
        if len(path) > 1:
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in path)
            parts.append(f'<polyline class="curve c{number % 6}" points="{line}"/>')
        if series.dots or len(path) == 1:
            parts += [f'<circle class="dot c{number % 6}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in path]
    data = [{"name": s.name, "points": [[*at(x, y), x, chart.show(y)] for x, y in s.points]} for s in curves]
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{_text(chart.title)}" '
        f'data-curves="{_text(json.dumps(data))}">{"".join(parts)}'
        f'<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></svg>'
    )


def thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Keep at most about `MAX_POINTS`: the first, the last, and the extremes of each stretch between."""
    if len(points) <= MAX_POINTS:
        return list(points)
    size = math.ceil(2 * len(points) / MAX_POINTS)
    kept = {0, len(points) - 1}
    for start in range(0, len(points), size):
        stretch = range(start, min(start + size, len(points)))
        kept.add(min(stretch, key=lambda i: points[i][1]))
        kept.add(max(stretch, key=lambda i: points[i][1]))
    return [points[i] for i in sorted(kept)]


def ticks(low: float, high: float) -> list[float]:
    """Return four to nine round numbers from `low` or below to `high` or above."""
    scale = max(abs(low), abs(high))
    if high - low <= max(scale * 1e-9, _TINY):
        margin = scale / 2 if scale > _TINY else 1.0
        low, high = low - margin, high + margin
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [n * step for n in range(first, last + 1)]


def _text(text: str) -> str:
    return html.escape(text, quote=True)
