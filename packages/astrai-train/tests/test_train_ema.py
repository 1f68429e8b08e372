"""The moving average of the weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from astrai_core import AutoModel
from astrai_core.errors import ConfigError
from astrai_train import TrainConfig
from astrai_train.callbacks.base import Callback
from astrai_train.context import StepRecord, TrainContext
from astrai_train.ema import WeightAverage
from astrai_train.run import build, train

Recipe = Callable[..., dict[str, Any]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_by_hand(dtype: torch.dtype) -> None:
    """Decays (1 + t) / (10 + t) = 2/11 and 3/12, then the one asked for; in fp32 whatever the weights are."""
    weight = nn.Parameter(torch.tensor([1.0, -1.0], dtype=dtype))
    average = WeightAverage([("w", weight)], decay=0.26)
    expected = 1.0
    for step, (value, decay) in enumerate(((2.0, 2 / 11), (4.0, 3 / 12), (8.0, 0.26), (16.0, 0.26)), start=1):
        with torch.no_grad():
            weight.copy_(torch.tensor([value, -value]))
        average.update(step)
        expected = decay * expected + (1 - decay) * value
    assert average.values["w"].dtype == torch.float32
    torch.testing.assert_close(average.values["w"], torch.tensor([expected, -expected]))


def test_in_place_of_the_weights_and_back() -> None:
    weight = nn.Parameter(torch.tensor([1.5]))
    average = WeightAverage([("w", weight)], decay=0.5)
    with torch.no_grad():
        weight.fill_(7.25)
    with pytest.raises(RuntimeError, match="stop"), average.in_place():
        assert weight.item() == 1.5
        raise RuntimeError("stop")
    assert weight.item() == 7.25


class Watch(Callback):
    """Keeps the weights after every step."""

    def __init__(self) -> None:
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_step_end(self, context: TrainContext, record: StepRecord) -> None:
        self.weights.append({n: p.detach().clone() for n, p in context.model.named_parameters()})


def test_a_run_writes_the_average(run_recipe: Recipe, tmp_path: Path) -> None:
    """``ema/`` is a model of its own; checkpoints keep the weights themselves, and training is what it would be."""
    watch = Watch()
    recipe = run_recipe({"ema_decay": 0.5, "max_steps": 4})
    other = build(TrainConfig.from_dict(run_recipe({"output_dir": str(tmp_path / "other")})))
    start = {name: parameter.detach().clone() for name, parameter in other.context.model.named_parameters()}
    train(TrainConfig.from_dict(recipe), callbacks=[watch])
    average = start
    for step, weights in enumerate(watch.weights, start=1):
        decay = min(0.5, (1 + step) / (10 + step))
        average = {name: decay * average[name] + (1 - decay) * weights[name] for name in average}
    found = dict(AutoModel.from_pretrained(tmp_path / "run" / "ema", device="cpu").named_parameters())
    last = AutoModel.from_pretrained(tmp_path / "run" / "checkpoints" / "step_4", device="cpu")
    for name, value in last.named_parameters():
        assert torch.equal(value, watch.weights[-1][name])
        torch.testing.assert_close(found[name], average[name], atol=1e-6, rtol=1e-5)
        assert not torch.equal(found[name], value)


def test_a_checkpoint_without_an_average_is_named(run_recipe: Recipe) -> None:
    recipe = run_recipe({"max_steps": 1})
    train(TrainConfig.from_dict(recipe))
    with pytest.raises(ConfigError, match="the checkpoint holds no average of these weights; resume without ema_decay"):
        build(TrainConfig.from_dict({**recipe, "max_steps": 2, "ema_decay": 0.9}), resume=True)
