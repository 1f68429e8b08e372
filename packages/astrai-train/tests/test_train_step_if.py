"""Steps that the device itself decides about, so that the host need not wait for the gradient's norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from astrai_train import AdamWConfig, ManoAdamWConfig, MuonAdamWConfig, NoraNAdamWConfig
from astrai_train.optim.composite import CompositeOptimizer
from astrai_train.optim.groups import OptimizerFactory


def tiny(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 6), nn.LayerNorm(6)).to(dtype)


def build(config: Any, model: nn.Module) -> CompositeOptimizer:
    options = {name: value for name, value in vars(config).items() if name != "name"}
    return OptimizerFactory.create(config.name, model, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_that_the_device_decides_about(dtype: torch.dtype) -> None:
    """True is a plain step, bit for bit; False leaves weights, moments and step counts as they are."""
    plain, other = tiny(dtype), tiny(dtype)
    theirs, ours = build(AdamWConfig(lr=1e-2), plain), build(AdamWConfig(lr=1e-2), other)
    assert ours.can_decide_on_device
    before = [parameter.detach().clone() for parameter in other.parameters()]
    for good in (True, False, True):
        for one, two in zip(plain.parameters(), other.parameters(), strict=True):
            one.grad = torch.randn_like(one)
            two.grad = one.grad.clone() if good else torch.full_like(one, float("nan"))
        ours.step_if(torch.tensor(good))
        if good:
            theirs.step()
        for one, two in zip(plain.parameters(), other.parameters(), strict=True):
            assert torch.equal(one, two)
            assert theirs.state[one].keys() == ours.state[two].keys()
            assert all(torch.equal(value, ours.state[two][key]) for key, value in theirs.state[one].items())
    assert not any(torch.equal(old, new) for old, new in zip(before, other.parameters(), strict=True))


@pytest.mark.parametrize(
    "config", [MuonAdamWConfig(lr=1e-2), ManoAdamWConfig(), NoraNAdamWConfig()], ids=lambda config: config.name
)
def test_only_the_fused_kernels_can_be_left_to_decide(config: Any) -> None:
    """The others are given their step when the norm is known."""
    assert not build(config, tiny()).can_decide_on_device
