"""report.html and the trackers: what a run tells beside metrics.jsonl (training rule 14)."""

from __future__ import annotations

import html
import json
import re
import sys
import types
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astrai_core.errors import DataError, MissingDependencyError
from astrai_train import Callback, TrainConfig
from astrai_train.report import chart as chart_module
from astrai_train.report.chart import Chart, Series, draw, thin, ticks
from astrai_train.report.page import charts, write_report
from astrai_train.run import build, train

Recipe = Callable[..., dict[str, Any]]
NO_VALUE = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """Checks that tags are closed in order, and gathers what a browser would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open += [] if tag in NO_VALUE else [tag]
        self.fetched += [f"{tag} {name}={value}" for name, value in attrs if name in ("src", "href", "data", "poster")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


class Stop(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, context: Any, record: Any) -> None:
        if record.step == self.step:
            raise RuntimeError("the <power> failed")


def test_a_report_that_cannot_be_written_hides_no_error(run_recipe: Recipe, tmp_path: Path) -> None:
    """What ended the run is raised; the callbacks behind the report hear of it too."""
    heard: list[BaseException] = []

    class Break(Stop):
        def on_step_end(self, context: Any, record: Any) -> None:
            if record.step == self.step:
                (context.run_dir / "metrics.jsonl").write_text("torn\n")
            super().on_step_end(context, record)

        def on_error(self, context: Any, error: BaseException) -> None:
            heard.append(error)

    with pytest.raises(RuntimeError, match="the <power> failed"):
        train(TrainConfig.from_dict(run_recipe()), callbacks=[Break(2)])
    assert [type(error) for error in heard] == [RuntimeError]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def state_of(page: str) -> str:
    found = re.search(r'<p class="state">(.*?)</p>', page)
    assert found is not None
    return html.unescape(found[1])


def test_a_run_with_a_failure_and_a_resume(run_recipe: Recipe, text_store: Path, tmp_path: Path) -> None:
    """The page stands after each checkpoint, tells of the failure, and marks where the run was resumed."""
    changes = {"checkpoint.interval": 2, "eval_interval": 2, "data.valid": [{"path": str(text_store)}]}
    config = TrainConfig.from_dict(run_recipe(changes))
    run_dir, seen = tmp_path / "run", []

    class Look(Callback):
        def on_save(self, context: Any, path: Path) -> None:
            seen.append(state_of((run_dir / "report.html").read_text()))

    with pytest.raises(RuntimeError, match="power"):
        train(config, callbacks=[Look(), Stop(5)])
    assert seen == ["running: step 2 of 6", "running: step 4 of 6"]
    page = (run_dir / "report.html").read_text()
    assert state_of(page) == "failed after step 5 of 6: RuntimeError: the <power> failed"
    assert 'class="resume"' not in page
    train(config, resume=True)
    page = (run_dir / "report.html").read_text()
    assert Page(page).fetched == [], "nothing is fetched"
    assert not re.search(r"https?://|@import|url\(", page)
    assert state_of(page) == "step 6 of 6: all steps are done"
    assert "resumed after step 4" in page
    starts = lines_of(run_dir / "starts.jsonl")
    assert [start["step"] for start in starts] == [0, 4]
    assert {"device", "ranks", "torch", "python", "parameters", "threads"} <= set(starts[0])
    for title in ("Loss", "Learning rate", "Gradient norm", "Gradient signal to noise, dB", "Tokens per second"):
        assert f"<figcaption>{title}" in page
    assert "Peak memory, GiB" in page and "utilisation" not in page, "a CPU has no MFU"
    assert page.count('class="resume"') == page.count("<svg")
    assert html.escape((run_dir / "recipe.yaml").read_text()) in page
    assert not list(run_dir.glob(".*")), "nothing half-written is left behind"


def test_what_the_curves_show(run_recipe: Recipe, text_store: Path, tmp_path: Path) -> None:
    """Row TR3: the columns of metrics.jsonl are the points of the curves; the noise is in decibels."""
    config = TrainConfig.from_dict(run_recipe({"eval_interval": 3, "data.valid": [{"path": str(text_store)}]}))
    trainer = build(config)
    trainer.train()
    lines = lines_of(tmp_path / "run" / "metrics.jsonl")
    by_title = {chart.title: chart for chart in charts(lines)}
    training, valid = by_title["Loss"].series
    assert training.points == [(line["step"], line["loss"]) for line in lines if "loss" in line]
    assert valid.points == [(line["step"], line["valid_loss"]) for line in lines if "valid_loss" in line]
    assert [step for step, _ in valid.points] == [3, 6]
    memory = by_title["Peak memory, GiB"].series[0].points
    assert memory[-1][1] == lines[-2]["memory"] / 2**30
    tracker = trainer.context.grad_snr
    assert (
        tracker is not None
        and lines[-2]["grad_snr"]
        == tracker.decibels()
        == by_title["Gradient signal to noise, dB"].series[0].points[-1][1]
    )


def test_text_of_a_run_cannot_become_markup(tmp_path: Path) -> None:
    folder = tmp_path / "<img src=x>"
    folder.mkdir()
    line = {"step": 1, "loss": 1.0, "<script>alert(1)</script>": 2.0, "valid_losses": {'"><b>': 1.0, "b": 2.0}}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (folder / "recipe.yaml").write_text("</pre><script>alert(2)</script>")
    page = write_report(folder, state="<b>").read_text()
    assert Page(page).fetched == []
    assert page.count("<script>") == 1 and "alert(1)</script>" not in page and "<b>" not in page


def test_files_that_are_damaged(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no metrics.jsonl"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": NaN}\n{"step": 2, "loss": 3.0}\n{"step": 3, "lo')
    assert charts([{"step": 2, "loss": 3.0}])[0].series[0].points == [(2, 3.0)]
    assert "<dd>2</dd>" in write_report(tmp_path).read_text(), "the line that was cut off is left out"
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n')
    with pytest.raises(DataError, match=r"metrics.jsonl:2: not valid JSON"):
        write_report(tmp_path)


@given(st.floats(-1e12, 1e12), st.floats(0, 1e12))
def test_ticks_are_few_round_and_around_the_values(low: float, span: float) -> None:
    found = ticks(low, low + span)
    assert 2 <= len(found) <= 12
    rounding = 1e-6 * max(abs(low), span)
    assert found[0] <= low + rounding and found[-1] >= low + span - rounding
    steps = {f"{b - a:.6g}"[:5] for a, b in pairwise(found)}
    assert len(steps) <= 2, "evenly spaced, but for rounding"


def test_long_curves_keep_their_spikes() -> None:
    points = [(float(i), 100.0 if i == 7777 else i % 5 + 0.0) for i in range(20_000)]
    kept = thin(points)
    assert len(kept) <= 2 * chart_module.MAX_POINTS
    assert (7777.0, 100.0) in kept and kept[0] == points[0] and kept[-1] == points[-1]
    assert kept == sorted(kept)
    assert len(draw(Chart("x", [Series("x", points)]))) < 100_000


def test_tensorboard_gets_the_figures(run_recipe: Recipe, text_store: Path, tmp_path: Path) -> None:
    """Real event files, read back by TensorBoard itself; steps that are done again are there once."""
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    changes = {"log.trackers": ["tensorboard"], "eval_interval": 3, "data.valid": [{"path": str(text_store)}]}
    config = TrainConfig.from_dict(run_recipe({**changes, "checkpoint.interval": 2}))
    with pytest.raises(RuntimeError):
        train(config, callbacks=[Stop(5)])
    train(config, resume=True)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    lines = lines_of(tmp_path / "run" / "metrics.jsonl")
    for tag, column in (("train/loss", "loss"), ("train/grad_snr", "grad_snr"), ("valid/loss", "valid_loss")):
        expected = [(line["step"], line[column]) for line in lines if line.get(column) is not None]
        found = [(event.step, event.value) for event in events.Scalars(tag)]
        assert [step for step, _ in found] == [step for step, _ in expected]
        assert [value for _, value in found] == pytest.approx([value for _, value in expected], rel=1e-6)


def test_wandb_gets_the_figures_under_one_id(
    run_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in with the calls of wandb 0.31's API that are made: init, Run.log, Run.finish."""
    runs: list[dict[str, Any]] = []

    class Run:
        def __init__(self, **options: Any) -> None:
            self.record = {**options, "logged": [], "ended": None}
            runs.append(self.record)

        def log(self, data: dict[str, Any], step: int) -> None:
            self.record["logged"].append((step, data))

        def finish(self, exit_code: int = 0) -> None:
            self.record["ended"] = exit_code

    stand_in = types.ModuleType("wandb")
    stand_in.init = Run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    config = TrainConfig.from_dict(run_recipe({"log.trackers": ["wandb"], "checkpoint.interval": 2}))
    with pytest.raises(RuntimeError):
        train(config, callbacks=[Stop(5)])
    train(config, resume=True)
    first, second = runs
    assert (first["ended"], second["ended"]) == (1, 0)
    assert first["id"] == second["id"] and first["resume"] == "allow"
    assert first["name"] == "run" and first["config"]["optimizer"]["lr"] == 1e-2
    assert [step for step, _ in second["logged"]] == [5, 6]
    lines = lines_of(tmp_path / "run" / "metrics.jsonl")
    assert second["logged"][-1][1]["train/loss"] == lines[-1]["loss"]
    assert "train/mfu" not in second["logged"][-1][1], "what does not exist is left out"


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_tracker_that_is_missing_is_an_error(
    run_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Asked for by name, it is never left out; and nothing is prepared before."""
    for module in [name, "torch.utils.tensorboard"]:
        monkeypatch.setitem(sys.modules, module, None)
    config = TrainConfig.from_dict(run_recipe({"log.trackers": [name]}))
    with pytest.raises(MissingDependencyError, match=rf"pip install 'astrai-train\[{name}\]'"):
        train(config)
    assert not (tmp_path / "run").exists()
