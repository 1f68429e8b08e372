"""Preference losses: the vectors of maths section 6, gradients, starting values, options."""

from __future__ import annotations

import math
from typing import Any, get_args, get_type_hints

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astrai_core.errors import ConfigError, RegistryError
from astrai_train import DPOConfig
from astrai_train.config.strategy import REFERENCE_FREE_LOSSES
from astrai_train.strategy.preference_losses import (
    ORPOLoss,
    PairLogprobs,
    PreferenceLoss,
    PreferenceLossFactory,
    create_preference_loss,
)

OPTIONS: dict[str, dict[str, float]] = {"cdpo": {"label_smoothing": 0.1}, "robust": {"label_smoothing": 0.1}}
NAMES = PreferenceLossFactory.names()


def make(name: str, **changes: Any) -> PreferenceLoss:
    return PreferenceLossFactory.create(name, **({"beta": 0.1} | OPTIONS.get(name, {}) | changes))


def pairs(chosen: Any = -12.0, rejected: Any = -15.0, **changes: Any) -> PairLogprobs:
    """Maths 6: lengths 4 and 6, reference -13 and -14.5, so that delta is 1.5."""
    fields = {
        "chosen": chosen,
        "rejected": rejected,
        "chosen_len": 4,
        "rejected_len": 6,
        "ref_chosen": -13.0,
        "ref_rejected": -14.5,
    }
    merged = fields | changes
    return PairLogprobs(
        **{
            key: value if isinstance(value, torch.Tensor) or value is None else torch.tensor([value]).double()
            for key, value in merged.items()
        }
    )


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("sigmoid", {}, 0.620957),
        ("hinge", {}, 0.85),
        ("ipo", {}, 21.777778),
        ("ipo", {"per_token": False}, 12.25),
        ("cdpo", {"label_smoothing": 0.1}, 0.635957),
        ("robust", {"label_smoothing": 0.1}, 0.602207),
        ("apo_zero", {}, 0.962523),
        ("nca", {}, 1.350825),
        ("sppo", {}, 36.25),
        ("simpo", {"beta": 2.0, "simpo_gamma": 0.5}, 1.701413),
        # Cross entropy 12 / 4 of the chosen answer, and a tenth of the odds-ratio loss.
        ("orpo", {}, 3 + 0.1 * 0.995743),
        # d_c = 1, d_r = -.5: z_c = 0, z_r = 1, so (s(-.1) + s(-.15)) / 2.
        ("kto", {}, (0.475021 + 0.462570) / 2),
    ],
)
def test_vectors_of_maths_section_6(name: str, options: dict[str, float], expected: float) -> None:
    assert make(name, **options)(pairs()).item() == pytest.approx(expected, abs=6e-7)


def test_odds_ratio() -> None:
    """Maths 6: the log-odds term of ORPO by itself."""
    assert ORPOLoss.odds_ratio_loss(pairs()).item() == pytest.approx(0.995743, abs=6e-7)


def test_rewards_and_gradient_of_dpo() -> None:
    """Maths 6: rewards .1 and -.05; dL/dpi_c is -beta sigmoid(-beta delta), the rejected one's its negative."""
    chosen = torch.tensor([-12.0], dtype=torch.float64, requires_grad=True)
    rejected = torch.tensor([-15.0], dtype=torch.float64, requires_grad=True)
    loss = make("sigmoid")
    rewards = loss.rewards(pairs(chosen, rejected))
    assert [reward.item() for reward in rewards] == pytest.approx([0.1, -0.05])
    assert not any(reward.requires_grad for reward in rewards)
    loss(pairs(chosen, rejected)).sum().backward()
    assert chosen.grad is not None
    assert rejected.grad is not None
    assert chosen.grad.item() == pytest.approx(-0.046257, abs=6e-7)
    assert rejected.grad.item() == pytest.approx(0.046257, abs=6e-7)


def test_dpo_starts_at_ln_2() -> None:
    """Training rule 10: where the model is the reference, the loss is ln 2 and every reward 0, whatever beta is."""
    start = pairs(ref_chosen=-12.0, ref_rejected=-15.0)
    for beta in (0.01, 0.1, 5.0):
        loss = make("sigmoid", beta=beta)
        assert loss(start).item() == pytest.approx(math.log(2), abs=1e-12)
        assert [reward.item() for reward in loss.rewards(start)] == [0, 0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("cdpo", math.log(2)), ("robust", math.log(2)), ("hinge", 1), ("apo_zero", 1), ("kto", 0.5), ("nca", math.log(4))],
)
def test_other_starts(name: str, expected: float) -> None:
    assert make(name)(pairs(ref_chosen=-12.0, ref_rejected=-15.0)).item() == pytest.approx(expected)


@pytest.mark.parametrize("name", NAMES)
def test_pairs_do_not_see_each_other(name: str) -> None:
    """Training rule 1: a pair's loss and gradient are the same alone and in any batch."""
    generator = torch.Generator().manual_seed(0)
    values = {
        "chosen": -20 * torch.rand(5, generator=generator),
        "rejected": -20 * torch.rand(5, generator=generator),
        "ref_chosen": -20 * torch.rand(5, generator=generator),
        "ref_rejected": -20 * torch.rand(5, generator=generator),
        "chosen_len": torch.arange(1, 6),
        "rejected_len": torch.arange(5, 0, -1),
    }
    values["chosen"].requires_grad_()
    together = make(name)(PairLogprobs(**values))
    assert together.shape == (5,)
    (gradient,) = torch.autograd.grad(together.sum(), values["chosen"])
    for i in range(5):
        alone = {key: value.detach()[i : i + 1] for key, value in values.items()}
        alone["chosen"].requires_grad_()
        loss = make(name)(PairLogprobs(**alone))
        torch.testing.assert_close(loss[0], together[i])
        torch.testing.assert_close(torch.autograd.grad(loss.sum(), alone["chosen"])[0][0], gradient[i])


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"nca"}))
@settings(max_examples=25, deadline=None)
@given(delta=st.floats(-4, 4))
def test_prefers_the_chosen(name: str, delta: float) -> None:
    """Around the reference, the step never lowers the chosen answer nor raises the rejected one.

    NCA alone pulls the chosen answer back once it is far above the reference.
    """
    chosen = torch.tensor([-13.0 + delta], dtype=torch.float64, requires_grad=True)
    rejected = torch.tensor([-14.5 - delta / 2], dtype=torch.float64, requires_grad=True)
    make(name)(pairs(chosen, rejected)).sum().backward()
    assert chosen.grad is not None
    assert rejected.grad is not None
    assert chosen.grad.item() <= 0 <= rejected.grad.item()


def test_reference_point_of_kto_has_no_gradient() -> None:
    chosen = torch.tensor([-12.0], dtype=torch.float64, requires_grad=True)
    make("kto")(pairs(chosen)).sum().backward()
    assert chosen.grad is not None
    sigmoid = 1 / (1 + math.exp(0.1))
    assert chosen.grad.item() == pytest.approx(-0.1 * sigmoid * (1 - sigmoid) / 2)


def test_certain_answer_is_finite() -> None:
    """A log-probability that rounded to 0 has infinite odds; loss and gradient stay finite."""
    chosen = torch.zeros(1, requires_grad=True)
    loss = make("orpo")(pairs(chosen.double(), -15.0))
    loss.sum().backward()
    assert loss.isfinite().all()
    assert chosen.grad is not None
    assert chosen.grad.isfinite().all()


def test_recipe_knows_every_loss() -> None:
    """The recipe's list is the factory's, and its reference-free losses are those that need no reference."""
    assert sorted(get_args(get_type_hints(DPOConfig)["loss"])) == NAMES
    assert {name for name in NAMES if not PreferenceLossFactory.get(name).needs_reference} == REFERENCE_FREE_LOSSES


def test_options_of_a_recipe_reach_the_loss() -> None:
    for name in NAMES:
        loss = create_preference_loss(DPOConfig(loss=name, beta=0.7, **OPTIONS.get(name, {})))  # type: ignore[arg-type]
        assert type(loss) is PreferenceLossFactory.get(name)
        assert vars(loss).items() >= ({"beta": 0.7} | OPTIONS.get(name, {})).items()
    assert vars(create_preference_loss(DPOConfig(loss="simpo", beta=2.0, simpo_gamma=0.9)))["simpo_gamma"] == 0.9
    assert vars(create_preference_loss(DPOConfig(loss="simpo", beta=2.0)))["simpo_gamma"] == 0.5


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="log-probabilities of a reference"):
        make("sigmoid")(pairs(ref_chosen=None))
    with pytest.raises(RegistryError, match="label_smoothing"):
        make("sigmoid", label_smoothing=0.1)
    with pytest.raises(ConfigError, match="label_smoothing must lie in"):
        make("robust", label_smoothing=0.5)
    with pytest.raises(ConfigError, match="beta must be above 0"):
        make("ipo", beta=0)
    with pytest.raises(ConfigError, match="simpo_gamma must not be negative"):
        make("simpo", simpo_gamma=-1)
