"""Which checkpoints stay: the newest, those of every n steps, and the best (training rule 6)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from astrai_train import Callback, TrainConfig
from astrai_train.context import Evaluation, TrainContext
from astrai_train.run import train

Recipe = Callable[..., dict[str, Any]]


def kept(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (root / "checkpoints").glob("step_*"))


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """What the evaluations find, by step; fill it in."""
    from astrai_train import trainer

    found: dict[int, float] = {}

    def evaluate(context: TrainContext) -> Evaluation:
        step = context.counters.step
        return Evaluation(step, found[step], {"held-out": found[step]})

    monkeypatch.setattr(trainer, "evaluate", evaluate)
    return found


def test_every_so_many_steps_are_kept_for_good(run_recipe: Recipe, tmp_path: Path) -> None:
    changes = {"max_steps": 9, "checkpoint": {"interval": 1, "keep": 2, "keep_every": 3}}
    train(TrainConfig.from_dict(run_recipe(changes)))
    assert kept(tmp_path / "run") == [3, 6, 8, 9]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_best_is_saved_and_kept(
    run_recipe: Recipe, text_store: Path, tmp_path: Path, losses: dict[int, float], asynchronous: bool
) -> None:
    """Also where no checkpoint was due, also after a resume; the one before it goes."""
    losses |= {2: 5.0, 4: 3.0, 6: 4.0, 8: 3.5, 10: 2.0, 12: 2.0}
    changes = {
        "eval_interval": 2,
        "data.valid": [{"path": str(text_store)}],
        "checkpoint": {"interval": 3, "keep": 1, "keep_best": True, "asynchronous": asynchronous},
    }
    train(TrainConfig.from_dict(run_recipe({**changes, "max_steps": 8})))
    assert kept(tmp_path / "run") == [4, 8]
    seen: list[int] = []

    class Watch(Callback):
        def on_save(self, context: TrainContext, path: Path) -> None:
            seen.append(context.counters.step)

    train(TrainConfig.from_dict(run_recipe({**changes, "max_steps": 9})), resume=True, callbacks=[Watch()])
    assert kept(tmp_path / "run") == [4, 9], "the resumed run knows the best of before"
    train(TrainConfig.from_dict(run_recipe({**changes, "max_steps": 13})), resume=True, callbacks=[Watch()])
    assert seen == [9, 10, 12, 13], "12 is no better than 10, but a checkpoint was due"
    assert kept(tmp_path / "run") == [10, 13]


def test_early_stopping_leaves_the_best(
    run_recipe: Recipe, text_store: Path, tmp_path: Path, losses: dict[int, float]
) -> None:
    """Two evaluations without a new best end the run; its best checkpoint is there to be used."""
    losses |= {1: 3.0, 2: 2.0, 3: 2.5, 4: 2.1, 5: 1.0}
    changes = {
        "eval_interval": 1,
        "early_stop_patience": 2,
        "data.valid": [{"path": str(text_store)}],
        "checkpoint": {"interval": 100, "keep": 1, "keep_best": True},
    }
    result = train(TrainConfig.from_dict(run_recipe(changes)))
    assert (result.step, result.stopped_by) == (4, "early_stop_patience")
    assert kept(tmp_path / "run") == [2, 4]


def test_a_loss_that_is_no_number_is_no_best(
    run_recipe: Recipe, text_store: Path, tmp_path: Path, losses: dict[int, float]
) -> None:
    losses |= {1: float("nan"), 2: 3.0, 3: float("nan")}
    changes = {
        "max_steps": 3,
        "eval_interval": 1,
        "data.valid": [{"path": str(text_store)}],
        "checkpoint": {"interval": 100, "keep": 1, "keep_best": True},
    }
    train(TrainConfig.from_dict(run_recipe(changes)))
    assert kept(tmp_path / "run") == [2, 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpoint.interval": 10, "checkpoint.keep_every": 25}, "25 is no multiple of interval 10"),
        ({"checkpoint.keep": None, "checkpoint.keep_every": 1000}, "keep null keeps every checkpoint"),
        ({"checkpoint.keep": None, "checkpoint.keep_best": True}, "keep null keeps every checkpoint"),
        ({"checkpoint.keep_best": True}, "keep_best needs evaluations; set eval_interval"),
        ({"data.valid": [{"path": "x"}]}, "data.valid is never looked at; set eval_interval or remove data.valid"),
        ({"log": {"metrics": ["loss"], "grad_snr_beta": 0.9}}, "grad_snr_beta': metrics does not list grad_snr"),
    ],
)
def test_what_has_no_effect_is_refused(
    error_of: Callable[[dict[str, Any]], str], changes: dict[str, Any], message: str
) -> None:
    assert message in error_of(changes)
