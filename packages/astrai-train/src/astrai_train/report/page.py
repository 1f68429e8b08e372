"""report.html: what a run's directory tells, as one page without any outside request (training rule 14)."""

from __future__ import annotations

import html
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from astrai_core.errors import DataError
from astrai_train.report.chart import Chart, Series, draw

FILE = "report.html"
METRICS, RECIPE, STARTS = "metrics.jsonl", "recipe.yaml", "starts.jsonl"
_NO_CURVE = {"step", "tokens", "valid_loss", "valid_losses"}
_KNOWN = {
    "loss": ("Loss", lambda value: f"{value:.4g}"),
    "lr": ("Learning rate", lambda value: f"{value:.3g}"),
    "grad_norm": ("Gradient norm, before clipping", lambda value: f"{value:.3g}"),
    "grad_snr": ("Gradient signal to noise, dB", lambda value: f"{value:.3g}"),
    "noise_scale": ("Gradient noise scale, in what the loss is a mean over", lambda value: f"{value:,.0f}"),
    "tokens_per_s": ("Tokens per second", lambda value: f"{value:,.0f}"),
    "mfu": ("Model FLOPs utilisation", lambda value: f"{value:.1%}"),
    "memory": ("Peak memory, GiB", lambda value: f"{value:.3g}"),
}
"""Column -> title and how a value is written; in the order of the page."""


def write_report(run_dir: str | os.PathLike[str], *, state: str | None = None, output: Path | None = None) -> Path:
    """Write the report of a run from the files of its directory; the page is replaced whole or not at all.

    Parameters
    ----------
    run_dir
        With metrics.jsonl; recipe.yaml and starts.jsonl are shown where they are there.
    state
        How the run stands, in words; by default nothing is said.
    output
        By default ``report.html`` in `run_dir`.

    Returns
    -------
    The page's path.

    Raises
    ------
    DataError
        If there is no metrics file, or a line of a file cannot be read; the message names it.
    """
    folder = Path(run_dir)
    if not (folder / METRICS).is_file():
        raise DataError(f"{folder}: holds no {METRICS}; give the output_dir of a run that has done a step")
    target = output or folder / FILE
    recipe = folder / RECIPE
    page = render(
        folder.resolve().name,
        read_lines(folder / METRICS),
        recipe.read_text(encoding="utf-8") if recipe.is_file() else None,
        read_lines(folder / STARTS),
        state,
    )
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(page)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return target


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSON lines file, none if it is not there; a last line that was cut off is left out.

    Raises
    ------
    DataError
        If another line is no JSON object.
    """
    if not file.is_file():
        return []
    found = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(keepends=True), 1):
        if not line.endswith("\n"):
            break
        try:
            item = json.loads(line)
        except ValueError as error:
            raise DataError(f"{file}:{number}: not valid JSON: {error}; remove the line") from None
        if not isinstance(item, dict):
            raise DataError(f"{file}:{number}: not a JSON object; remove the line")
        found.append(item)
    return found


def charts(metrics: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """Return one chart for each column that has a number, the known ones first."""
    names = {name for line in metrics for name in line} - _NO_CURVE
    found = []
    for name in [*(name for name in _KNOWN if name in names or name == "loss"), *sorted(names - set(_KNOWN))]:
        title, show = _KNOWN.get(name, (name, lambda value: f"{value:.4g}"))
        series = [Series("training" if name == "loss" else name, _points(metrics, name))]
        if name == "loss":
            series += _valid(metrics)
        if any(one.points for one in series):
            found.append(Chart(title, series, show))
    return found


def _valid(metrics: Sequence[Mapping[str, Any]]) -> Iterator[Series]:
    yield Series("validation", _points(metrics, "valid_loss"), dots=True)
    lines = [{"step": line["step"], **line["valid_losses"]} for line in metrics if "valid_losses" in line]
    members = dict.fromkeys(name for line in lines for name in line if name != "step")
    if len(members) > 1:
        for name in members:
            yield Series(name, _points(lines, name), dots=True)


def _points(lines: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    found = [(line["step"], line.get(name)) for line in lines]
    scale = 2**30 if name == "memory" else 1
    return [(step, value / scale) for step, value in found if isinstance(value, int | float) and math.isfinite(value)]


def render(
    title: str,
    metrics: Sequence[Mapping[str, Any]],
    recipe: str | None,
    starts: Sequence[Mapping[str, Any]],
    state: str | None,
) -> str:
    """Return the page.

    Parameters
    ----------
    metrics
        Lines of metrics.jsonl.
    starts
        Lines of starts.jsonl: ``step``, ``time`` and facts about the machine, one for each time the run was started.
    """
    resumes = [start["step"] for start in starts if start["step"]]
    figures = "".join(
        f"<figure><figcaption>{_safe(chart.title)}{_legend(chart)}</figcaption>{draw(chart, resumes)}"
        '<output aria-live="polite">&nbsp;</output></figure>'
        for chart in charts(metrics)
    )
    facts = "".join(f"<div><dt>{_safe(name)}</dt><dd>{_safe(value)}</dd></div>" for name, value in _facts(metrics))
    sections = [f"<h1>{_safe(title)}</h1>"]
    sections += [f'<p class="state">{_safe(state)}</p>'] if state else []
    sections.append(f"<dl>{facts}</dl>")
    if resumes:
        after = ", ".join(f"{step:,}" for step in resumes)
        sections.append(f'<p class="resumed">resumed after step {after}</p>')
    sections.append(f'<main class="charts">{figures}</main>')
    sections += [f"<h2>Starts and environment</h2>{_table(starts)}"] if starts else []
    sections += [f"<h2>Recipe</h2><pre>{_safe(recipe)}</pre>"] if recipe else []
    return (
        _PAGE.replace("@TITLE@", _safe(title))
        .replace("@STYLE@", _STYLE)
        .replace("@SCRIPT@", _SCRIPT)
        .replace("@BODY@", "\n".join(sections))
    )


def _facts(metrics: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    last: dict[str, Any] = {}
    for line in metrics:
        last |= {name: value for name, value in line.items() if value is not None}
    if "step" in last:
        yield "steps", f"{last['step']:,}"
    if "tokens" in last:
        yield "tokens", f"{last['tokens']:,}"
    if "loss" in last:
        yield "last loss", f"{last['loss']:.4f}"
    if valid := _points(metrics, "valid_loss"):
        step, best = min(valid, key=lambda point: point[1])
        yield "best validation loss", f"{best:.4f} at step {step:,.0f}"
    for name, label in (("tokens_per_s", "mean tokens per second"), ("mfu", "mean MFU"), ("memory", "peak memory")):
        if points := _points(metrics, name):
            value = points[-1][1] if name == "memory" else sum(y for _, y in points) / len(points)
            yield label, _KNOWN[name][1](value) + (" GiB" if name == "memory" else "")


def _legend(chart: Chart) -> str:
    named = [series for series in chart.series if series.points]
    if len(named) < 2:
        return ""
    return "".join(f' <span class="key k{i % 6}">{_safe(series.name)}</span>' for i, series in enumerate(named))


def _table(starts: Sequence[Mapping[str, Any]]) -> str:
    names = dict.fromkeys(name for start in starts for name in start if name not in ("step", "time"))
    rows = [("after step", [f"{start['step']:,}" for start in starts])]
    rows.append(("at", [_when(start.get("time")) for start in starts]))
    rows += [(name.replace("_", " "), [str(start.get(name, "")) for start in starts]) for name in names]
    lines = (
        f"<tr><th>{_safe(name)}</th>{''.join(f'<td>{_safe(cell)}</td>' for cell in cells)}</tr>" for name, cells in rows
    )
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def _when(time: Any) -> str:
    return datetime.fromisoformat(time).strftime("%Y-%m-%d %H:%M:%S %Z") if isinstance(time, str) else ""


def _safe(text: object) -> str:
    return html.escape(str(text), quote=True)


_STYLE = """
:root { color-scheme: light dark; --text: #1c1e21; --dim: #6a7079; --back: #fff; --box: #f6f7f9; --line: #dfe2e6;
  --c0: #2563c9; --c1: #d9480f; --c2: #2b8a3e; --c3: #862e9c; --c4: #a66a00; --c5: #0b7285; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e8eb; --dim: #9aa1ab; --back: #14171a; --box: #1d2125;
  --line: #343a41; --c0: #74a7ff; --c1: #ff9a66; --c2: #69db7c; --c3: #da9bf0; --c4: #f0c05a; --c5: #66d9e8; } }
body { margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: var(--text); background: var(--back);
  font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .6rem; }
.state { color: var(--dim); margin: .2rem 0 0; }
dl { display: flex; flex-wrap: wrap; gap: .4rem 2.2rem; margin: 1.2rem 0; }
dt { color: var(--dim); font-size: .82rem; } dd { margin: 0; font-size: 1.15rem; font-variant-numeric: tabular-nums; }
.resumed { color: var(--dim); font-size: .85rem; margin: 0 0 .8rem; padding-left: .6rem;
  border-left: 2px dashed var(--c1); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr)); gap: 1rem; }
figure { margin: 0; padding: .7rem .8rem .3rem; background: var(--box); border: 1px solid var(--line); border-radius: 8px; }
figcaption { font-weight: 600; } .key { font-weight: 400; font-size: .85rem; color: var(--dim); margin-left: .8rem; }
.key::before { content: ""; display: inline-block; width: .9em; height: .22em; margin-right: .35em; vertical-align: .3em; }
.k0::before { background: var(--c0); } .k1::before { background: var(--c1); } .k2::before { background: var(--c2); }
.k3::before { background: var(--c3); } .k4::before { background: var(--c4); } .k5::before { background: var(--c5); }
svg { display: block; width: 100%; height: auto; } svg text { font: 11px system-ui, "DejaVu Sans", sans-serif; }
.tick { fill: var(--dim); } .grid { stroke: var(--line); } .cursor { stroke: var(--dim); visibility: hidden; }
.resume { stroke: var(--c1); stroke-width: 1.5; stroke-dasharray: 4 3; }
.curve { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
.curve.c0 { stroke: var(--c0); } .curve.c1 { stroke: var(--c1); } .curve.c2 { stroke: var(--c2); }
.curve.c3 { stroke: var(--c3); } .curve.c4 { stroke: var(--c4); } .curve.c5 { stroke: var(--c5); }
.dot.c0 { fill: var(--c0); } .dot.c1 { fill: var(--c1); } .dot.c2 { fill: var(--c2); }
.dot.c3 { fill: var(--c3); } .dot.c4 { fill: var(--c4); } .dot.c5 { fill: var(--c5); }
output { display: block; min-height: 1.5em; font-size: .85rem; color: var(--dim); font-variant-numeric: tabular-nums; }
table { border-collapse: collapse; } th, td { text-align: left; padding: .15rem 1.2rem .15rem 0; vertical-align: top; }
th { color: var(--dim); font-weight: 400; } .wide { overflow-x: auto; }
pre { background: var(--box); border: 1px solid var(--line); border-radius: 8px; padding: .8rem 1rem; overflow-x: auto;
  font: 13px/1.45 ui-monospace, "DejaVu Sans Mono", monospace; }
"""

_SCRIPT = """
for (const svg of document.querySelectorAll("svg[data-curves]")) {
  const curves = JSON.parse(svg.dataset.curves), cursor = svg.querySelector(".cursor");
  const said = svg.parentElement.querySelector("output");
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    const at = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const near = curves.map(curve => [curve.name, curve.points.reduce(
      (best, point) => Math.abs(point[0] - at) < Math.abs(best[0] - at) ? point : best)]);
    const x = near[0][1][0];
    cursor.setAttribute("x1", x); cursor.setAttribute("x2", x); cursor.style.visibility = "visible";
    said.textContent = near.map(([name, point]) => "step " + point[2] + ": " + name + " " + point[3]).join("   ");
  });
  svg.addEventListener("pointerleave", () => { cursor.style.visibility = "hidden"; said.textContent = "\\u00a0"; });
}
"""

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>@TITLE@</title><style>@STYLE@</style></head>
<body>
@BODY@
<script>@SCRIPT@</script>
</body></html>
"""
