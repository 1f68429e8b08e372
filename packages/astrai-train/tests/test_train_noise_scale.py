"""The gradient noise scale: maths section 10, and what a run logs (row TR3)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from astrai_core.errors import ConfigError
from astrai_train import TrainConfig
from astrai_train.config import LogConfig
from astrai_train.metrics.noise_scale import NoiseScaleTracker, noise_scale
from astrai_train.run import build, train

GRADS = ((1, 2), (1.2, 1.8), (0.8, 2.4), (1, 2.2))
METRICS = {"log.metrics": ["loss", "noise_scale"], "batch_size": 6}


def test_vector() -> None:
    """Maths 10: from the same gradients, batches of 1 and of 4."""
    samples = torch.tensor(GRADS).double()
    large, small = float(samples.mean(0).square().sum()), float(samples.square().sum(1).mean())
    assert (large, small) == pytest.approx((5.41, 5.48))
    found = noise_scale(small=small, n_small=1, large=large, n_large=4)
    assert (found.signal, found.noise) == pytest.approx((5.386667, 0.093333), abs=5e-7)
    assert found.batch_size == pytest.approx(0.017327, abs=5e-7)
    assert math.isnan(noise_scale(small=9, n_small=1, large=1, n_large=4).batch_size)
    with pytest.raises(ConfigError, match="n_small < n_large"):
        noise_scale(small=1, n_small=4, large=1, n_large=4)


def test_it_finds_the_scale_of_drawn_gradients() -> None:
    """Two ranks of unequal micro-batches, the ratio of whose noise and signal is known: 50 x 0.3^2 / 50 x 0.1^2 = 9."""
    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.zeros(30)), nn.Parameter(torch.zeros(4, 5)), nn.Parameter(torch.zeros(1))]
    trackers = [NoiseScaleTracker(weights, beta=0.999) for _ in range(2)]
    for _ in range(3000):
        samples = 0.1 + 0.3 * torch.randn(32, 50, generator=generator, dtype=torch.float64)
        for tracker, part in zip(trackers, (samples[:3], samples[3:8]), strict=True):
            first, second = part.sum(0).float().split([30, 20])
            weights[0].grad, weights[1].grad = first, second.view(4, 5)
            tracker.begin(len(part))
        whole = sum(tracker._part for tracker in trackers)
        for tracker in trackers:
            tracker.update(samples.mean(0).norm(), len(samples), lambda part, whole=whole: whole)
    assert trackers[0].batch_size() == trackers[1].batch_size() == pytest.approx(9.0, rel=0.05)


def test_what_tells_nothing_changes_nothing() -> None:
    """First micro-batches that supervise nothing, or all that the step supervises."""
    weight = nn.Parameter(torch.zeros(2))
    tracker = NoiseScaleTracker([weight], beta=0.5)

    def step(first: tuple[float, float], n_first: int, norm: float, n: int) -> float | None:
        weight.grad = torch.tensor(first)
        tracker.begin(n_first)
        tracker.update(torch.tensor(norm), n, lambda part: part)
        return tracker.batch_size()

    assert step((1.0, 1.0), 0, 1.0, 4) is None
    assert step((1.0, 1.0), 4, 1.0, 4) is None
    expected = noise_scale(small=2.0, n_small=1, large=1.5**2 / 2, n_large=4).batch_size
    assert step((1.0, 1.0), 1, 1.5 / 2**0.5, 4) == pytest.approx(expected)
    assert step((1.0, 1.0), 0, 9.0, 4) == pytest.approx(expected)
    assert step((9.0, 9.0), 4, 9.0, 4) == pytest.approx(expected)


def column(recipe: dict[str, Any]) -> list[float | None]:
    lines = (Path(recipe["output_dir"]) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["noise_scale"] for line in lines]


def test_a_run_logs_it(run_recipe: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """The first step's figure is that of its gradients: of two rows of six, and of all; 3 + 3 steps are 6 (rule 5)."""
    recipe = run_recipe(METRICS)
    train(TrainConfig.from_dict(recipe), device="cpu")
    twin = build(
        TrainConfig.from_dict(run_recipe(METRICS | {"output_dir": str(tmp_path / "twin")})), device="cpu"
    ).context
    batches, n, norms = iter(twin.source), 0, []
    for _ in range(twin.accumulation_steps):
        output = twin.strategy(next(batches))
        output.loss_sum.backward()
        n += output.n_supervised
        grads = [parameter.grad for parameter in twin.model.parameters()]
        norms.append((float(torch.cat([grad.flatten() for grad in grads]).norm()) / n, n))
    (small, n_small), (large, n_large) = norms[0], norms[-1]
    expected = noise_scale(small=small**2, n_small=n_small, large=large**2, n_large=n_large).batch_size
    found = column(recipe)
    assert len(found) == 6 and found[0] == pytest.approx(expected, rel=1e-4)
    halves = run_recipe(METRICS | {"output_dir": str(tmp_path / "halves"), "lr_schedule": {"name": "constant"}})
    whole = run_recipe(METRICS | {"output_dir": str(tmp_path / "whole"), "lr_schedule": {"name": "constant"}})
    train(TrainConfig.from_dict(halves | {"max_steps": 3}), device="cpu")
    train(TrainConfig.from_dict(halves), resume=True, device="cpu")
    train(TrainConfig.from_dict(whole), device="cpu")
    assert column(halves) == column(whole)


def test_where_it_cannot_be_measured(
    recipe: Callable[..., dict[str, Any]], error_of: Callable[[dict[str, Any]], str]
) -> None:
    assert "noise_scale" not in LogConfig().metrics, "not every run accumulates"
    assert "under 'fsdp' no rank has a gradient of its own" in error_of(
        {"log.metrics": ["noise_scale"], "parallel": {"mode": "fsdp"}}
    )
    assert "metrics does not list noise_scale" in error_of({"log.noise_scale_beta": 0.5})
    config = TrainConfig.from_dict(recipe({"log.metrics": ["noise_scale"], "batch_size": 8, "micro_batch_size": 4}))
    assert config.accumulation_steps(1) == 2
    with pytest.raises(ConfigError, match="'log.metrics': noise_scale .* batch_size 8 is one micro-batch a rank"):
        config.accumulation_steps(2)
