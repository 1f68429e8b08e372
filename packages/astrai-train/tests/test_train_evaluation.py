"""Evaluation: the right loss, no trace in the run, early stopping that survives a resume (training rule 8)."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from astrai_train import TrainConfig
from astrai_train.callbacks.base import Callback
from astrai_train.context import Evaluation, TrainContext
from astrai_train.data.collate import TrainBatch
from astrai_train.evaluation import evaluate
from astrai_train.rng import rng_state
from astrai_train.run import build, train

Recipe = Callable[..., dict[str, Any]]


def with_valid(run_recipe: Recipe, text_store: Path, changes: dict[str, Any] | None = None) -> TrainConfig:
    data = {"data.valid": [{"path": str(text_store), "weight": 2}], "eval_interval": 2}
    return TrainConfig.from_dict(run_recipe(data | (changes or {})))


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_the_loss_is_the_mean_over_all_tokens(run_recipe: Recipe, text_store: Path) -> None:
    """Each row once, divided once, whatever the micro-batch; without dropout."""
    config = with_valid(run_recipe, text_store, {"micro_batch_size": 4, "model.architecture.attention_dropout": 0.3})
    context = build(config).context
    total = n_supervised = 0.0
    context.model.eval()
    for _, source in context.valid:
        for batch in source:
            output = context.strategy(batch)
            total += output.loss_sum.item()
            n_supervised += output.n_supervised
    context.model.train()
    assert n_supervised > 500
    assert evaluate(context).loss == pytest.approx(total / n_supervised, rel=1e-6)


def test_members_count_by_their_weights(run_recipe: Recipe, text_store: Path) -> None:
    context = build(with_valid(run_recipe, text_store)).context
    (member, source) = context.valid[0]
    first = next(iter(source))
    other = type(member)(path="first batch", weight=3)
    context.valid = [(member, source), (other, [first])]
    found = evaluate(context)
    assert found.loss == pytest.approx((2 * found.losses[member.path] + 3 * found.losses["first batch"]) / 5)
    assert found.losses[member.path] != found.losses["first batch"]


def test_it_leaves_no_trace(run_recipe: Recipe, text_store: Path) -> None:
    """Modes module by module, no gradient, no random number."""
    context = build(with_valid(run_recipe, text_store, {"model.architecture.attention_dropout": 0.3})).context
    context.model.train()
    context.model.model.layers[1].eval()
    member, source = context.valid[0]

    def drawing() -> Iterator[TrainBatch]:
        torch.rand(3)
        random.random()
        yield from source

    context.valid = [(member, drawing())]
    before, streams = [module.training for module in context.model.modules()], rng_state(torch.device("cpu"))
    evaluate(context)
    assert [module.training for module in context.model.modules()] == before
    assert all(value.grad is None for value in context.model.parameters())
    assert torch.equal(rng_state(torch.device("cpu"))["torch"], streams["torch"])
    assert rng_state(torch.device("cpu"))["python"] == streams["python"]


def test_a_run_with_evaluations_is_the_run_without(run_recipe: Recipe, text_store: Path, tmp_path: Path) -> None:
    dropout = {"model.architecture.attention_dropout": 0.2}
    train(with_valid(run_recipe, text_store, dropout))
    train(TrainConfig.from_dict(run_recipe(dropout | {"output_dir": str(tmp_path / "plain")})))
    watched, plain = lines_of(tmp_path / "run"), lines_of(tmp_path / "plain")
    assert [line["step"] for line in watched if "valid_loss" in line] == [2, 4, 6]
    losses = [[line["loss"] for line in lines if "loss" in line] for lines in (watched, plain)]
    assert losses[0] == losses[1]


class Worsening(Callback):
    """Makes every evaluation after the first look worse than the best."""

    def on_evaluate(self, context: TrainContext, found: Evaluation) -> None:
        context.counters.best_valid_loss = 0.0


def test_early_stopping(run_recipe: Recipe, text_store: Path) -> None:
    """After two evaluations without a new best loss, saved and resumable to the same end."""
    config = with_valid(run_recipe, text_store, {"max_steps": 20, "eval_interval": 2, "early_stop_patience": 2})
    result = train(config, callbacks=[Worsening()])
    assert (result.step, result.stopped_by) == (6, "early_stop_patience")
    again = train(config, resume=True)
    assert (again.step, again.stopped_by) == (6, "early_stop_patience")


def test_a_falling_loss_never_stops_early(run_recipe: Recipe, text_store: Path) -> None:
    result = train(with_valid(run_recipe, text_store, {"early_stop_patience": 1, "optimizer.lr": 1e-3}))
    assert (result.step, result.stopped_by) == (6, None)
