"""Learning-rate schedules: the vectors of maths section 9, parity with torch, and what holds for any setting."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astrai_core.errors import ConfigError, RegistryError
from astrai_train.optim.lr_schedule import DecayShape, LRSchedule, LRScheduleFactory, duration_in_steps

STEPS = (0, 9, 55, 80, 85, 90, 95, 100, 150)
VECTORS = {  # total 100, warm-up 10, decay 20, floor 0.1
    "cosine": (0.1, 1, 0.55, 0.205280, 0.160289, 0.127138, 0.106837, 0.1, 0.1),
    "linear": (0.1, 1, 1, 1, 0.775, 0.55, 0.325, 0.1, 0.1),
    "1-sqrt": (0.1, 1, 1, 1, 0.55, 0.363604, 0.220577, 0.1, 0.1),
    "square": (0.1, 1, 1, 1, 0.606250, 0.325, 0.156250, 0.1, 0.1),
    "wsd-cosine": (0.1, 1, 1, 1, 0.868198, 0.55, 0.231802, 0.1, 0.1),
}


def make(name: str, **changes: Any) -> LRSchedule:
    options: dict[str, Any] = {"total_steps": 100, "warmup": 10, "min_ratio": 0.1}
    if name == "wsd":
        options |= {"decay": 20, "decay_shape": "linear"}
    elif name == "sgdr":
        options |= {"cycle": 30, "cycle_mult": 1}
    elif name == "constant":
        del options["min_ratio"]
    return LRScheduleFactory.create(name, **(options | changes))


@pytest.mark.parametrize("column", VECTORS)
def test_vectors_of_maths_section_9(column: str) -> None:
    if column == "cosine":
        schedule = make("cosine")
    else:
        schedule = make("wsd", decay_shape=column.removeprefix("wsd-"))
    for step, expected in zip(STEPS, VECTORS[column], strict=True):
        assert schedule.factor(step) == pytest.approx(expected, abs=5e-7), step
        assert schedule(step, 3e-4) == pytest.approx(expected * 3e-4, abs=5e-7 * 3e-4), step


def _torch_lrs(make_scheduler: Any, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler = make_scheduler(optimizer)
    lrs = []
    for _ in range(steps):
        lrs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return lrs


def test_cosine_equals_torch() -> None:
    expected = _torch_lrs(
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40, eta_min=0.05), 41
    )
    schedule = make("cosine", total_steps=40, warmup=0, min_ratio=0.1)
    assert [schedule(step, 0.5) for step in range(41)] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("mult", [1, 2, 3])
def test_sgdr_equals_torch(mult: int) -> None:
    expected = _torch_lrs(
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(
            optimizer, T_0=5, T_mult=mult, eta_min=0.05
        ),
        80,
    )
    schedule = make("sgdr", total_steps=80, warmup=0, min_ratio=0.1, cycle=5, cycle_mult=mult)
    assert [schedule(step, 0.5) for step in range(80)] == pytest.approx(expected, abs=1e-12)


def test_sgdr_counts_its_cycles_from_the_end_of_the_warmup() -> None:
    plain, warmed = make("sgdr", warmup=0), make("sgdr", warmup=10)
    assert [warmed.factor(step + 10) for step in range(90)] == [plain.factor(step) for step in range(90)]


@st.composite
def schedules(draw: st.DrawFn) -> LRSchedule:
    total = draw(st.integers(1, 300))
    warmup = draw(st.integers(0, total) | st.floats(0, 1, exclude_max=True))
    options: dict[str, Any] = {"total_steps": total, "warmup": warmup}
    name = draw(st.sampled_from(LRScheduleFactory.names()))
    if name != "constant":
        options["min_ratio"] = draw(st.floats(0, 1))
    if name == "wsd":
        options["decay"] = draw(st.integers(0, total - duration_in_steps(warmup, total)))
        options["decay_shape"] = draw(st.sampled_from(get_args(DecayShape)))
    if name == "sgdr":
        options["cycle"] = draw(st.integers(1, 400))
        options["cycle_mult"] = draw(st.integers(1, 3))
    return LRScheduleFactory.create(name, **options)


@given(schedules())
@settings(max_examples=200, deadline=None)
def test_what_holds_for_every_schedule(schedule: LRSchedule) -> None:
    total, warmup, floor = schedule.total_steps, schedule.warmup_steps, schedule.min_ratio
    factors = [schedule.factor(step) for step in range(total + 3)]
    assert factors[:warmup] == [(step + 1) / warmup for step in range(warmup)][:total]  # starts at 1/w, ends at 1
    assert all(floor <= factor <= 1 for factor in factors[warmup:])
    assert factors[total:] == [floor] * 3
    assert schedule.factor(10 * total) == floor
    if warmup < total:
        assert factors[warmup] == 1
    assert [schedule(step, 0.02) for step in range(total)] == [0.02 * factor for factor in factors[:total]]


@given(schedules())
@settings(max_examples=100, deadline=None)
def test_after_the_warmup_it_never_rises_but_at_an_sgdr_restart(schedule: LRSchedule) -> None:
    factors = [schedule.factor(step) for step in range(schedule.warmup_steps, schedule.total_steps + 1)]
    rises = [step for step in range(1, len(factors)) if factors[step] > factors[step - 1]]
    if not rises:
        return
    assert type(schedule).__name__ == "SGDRSchedule"
    assert all(factors[step] == 1 for step in rises)


@pytest.mark.parametrize("name", ["cosine", "wsd", "sgdr"])
def test_the_last_executed_step_is_above_the_floor(name: str) -> None:
    assert make(name, min_ratio=0.0).factor(99) > 0
    assert make(name, min_ratio=0.0).factor(100) == 0


def test_a_duration_is_steps_or_a_share() -> None:
    assert [duration_in_steps(value, 200) for value in (0, 7, 0.0, 0.07, 0.5)] == [0, 7, 0, 14, 100]
    assert duration_in_steps(0.29, 100) == 29  # 0.29 * 100 is a little less than 29
    assert make("cosine", warmup=0.1).factor(4) == make("cosine", warmup=10).factor(4) == 0.5
    for bad in (-1, 1.0, 1.5, -0.1, True, "3", None, math.nan, math.inf):
        with pytest.raises(ConfigError, match="whole number of steps"):
            duration_in_steps(bad, 200)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("cosine", {"total_steps": 0}, "total_steps"),
        ("cosine", {"warmup": 101}, "warmup of 101 steps is longer than the run of 100"),
        ("cosine", {"warmup": 1.5}, "warmup must be a whole number"),
        ("cosine", {"min_ratio": 1.1}, "min_ratio"),
        ("cosine", {"min_ratio": math.nan}, "min_ratio"),
        ("wsd", {"warmup": 50, "decay": 51}, "warmup of 50 and decay of 51 steps do not fit"),
        ("wsd", {"decay": -1}, "decay must be"),
        ("wsd", {"decay_shape": "sqrt"}, "did you mean '1-sqrt'"),
        ("sgdr", {"cycle": 0}, "cycle of 0"),
        ("sgdr", {"cycle": 0.001}, "cycle of 0.001"),
        ("sgdr", {"cycle_mult": 0}, "cycle_mult"),
    ],
)
def test_bad_settings_name_the_field(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(name, **changes)


def test_a_negative_step_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        make("cosine").factor(-1)


def test_factory_names_the_schedules_and_suggests() -> None:
    """Row F1."""
    assert LRScheduleFactory.names() == ["constant", "cosine", "sgdr", "wsd"]
    with pytest.raises(RegistryError, match="did you mean 'cosine'"):
        LRScheduleFactory.create("cosin", total_steps=1)
    with pytest.raises(RegistryError, match="min_ratio"):
        LRScheduleFactory.create("constant", total_steps=1, warmup=0, min_ratio=0.5)
