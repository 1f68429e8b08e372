"""Gradient signal-to-noise ratio: the vectors of maths section 10 (row TR3), shards, resume."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from astrai_core.errors import CheckpointError, ConfigError
from astrai_train.metrics.grad_snr import GradSNRTracker

GRADS = ((1, 2), (1.2, 1.8), (0.8, 2.4), (1, 2.2))


def feed(
    tracker: GradSNRTracker, weights: Sequence[nn.Parameter], grads: Sequence[Sequence[float]]
) -> list[float | None]:
    """The ratio after each step; a step's values go to the weights in turn."""
    ratios = []
    for grad in grads:
        parts = torch.tensor(grad).split([weight.numel() for weight in weights])
        for weight, part in zip(weights, parts, strict=True):
            weight.grad = part.to(weight.dtype).view_as(weight)
        tracker.update()
        ratios.append(tracker.ratio())
    return ratios


def tracker_of(*sizes: int, beta: float = 0.9) -> tuple[GradSNRTracker, list[nn.Parameter]]:
    weights = [nn.Parameter(torch.zeros(size)) for size in sizes]
    return GradSNRTracker([(str(i), weight) for i, weight in enumerate(weights)], beta), weights


@pytest.mark.parametrize("sizes", [(2,), (1, 1)])
def test_vectors_of_maths_section_10(sizes: tuple[int, ...]) -> None:
    """Nothing before the second sample; the sums run over all parameters."""
    tracker, weights = tracker_of(*sizes)
    first, *rest = feed(tracker, weights, GRADS)
    assert first is None
    assert rest == pytest.approx([241.25, 56.726087, 78.766273], rel=2e-5)


def test_not_initialised_by_the_first_sample() -> None:
    """Maths 10: averages that start at the first sample would be about three times too high."""
    mean, square = torch.tensor(GRADS[0]).double(), torch.tensor(GRADS[0]).double().square()
    inflated = []
    for grad in GRADS[1:]:
        sample = torch.tensor(grad).double()
        mean, square = mean.lerp(sample, 0.1), square.lerp(sample.square(), 0.1)
        inflated.append(float(mean.square().sum() / (square - mean.square()).sum()))
    assert inflated == pytest.approx([688.999, 190.345, 191.769], rel=1e-5)
    ours = feed(*tracker_of(2), GRADS)[1:]
    assert all(high / right > 2.4 for high, right in zip(inflated, ours, strict=True) if right)


def test_hand_example_of_tr3() -> None:
    """Row TR3: gradients 1, 3 at beta .5 are 7.87 dB."""
    tracker, weights = tracker_of(1, beta=0.5)
    feed(tracker, weights, [[1], [3]])
    assert tracker.decibels() == pytest.approx(7.87, abs=5e-3)


def test_slow_decay_is_the_window() -> None:
    """Maths 10: as beta goes to 1 all samples weigh the same: the window's 57.964286 (17.6316 dB), but for its n - 1."""
    tracker, weights = tracker_of(2, beta=1 - 1e-4)
    ratio = feed(tracker, weights, GRADS)[-1]
    assert ratio is not None
    assert ratio * 3 / 4 == pytest.approx(57.964286, rel=2e-3)
    assert 10 * math.log10(ratio * 3 / 4) == pytest.approx(17.6316, abs=1e-2)


def test_shards_add_up() -> None:
    """One exchange of two sums: two ranks with a half each report what one with all does."""
    whole, weights = tracker_of(2)
    expected = feed(whole, weights, GRADS)[-1]
    halves = []
    for rank in (0, 1):
        shard, parts = tracker_of(1)
        feed(shard, parts, [[grad[rank]] for grad in GRADS])
        halves.append(shard)
    calls: list[Tensor] = []

    def add_up(sums: Tensor) -> Tensor:
        calls.append(sums)
        return sums + halves[1].sums()

    assert halves[0].ratio(add_up) == pytest.approx(expected)
    assert [sums.shape for sums in calls] == [(2,)]


def test_half_precision_gradients_are_averaged_in_float32() -> None:
    weight = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    tracker = GradSNRTracker([("w", weight)], 0.999)
    assert {value.dtype for value in tracker.state_dict()["means"].values()} == {torch.float32}
    halved = [torch.tensor(grad).bfloat16().float().tolist() for grad in GRADS]
    assert feed(tracker, [weight], GRADS) == feed(*tracker_of(2, beta=0.999), halved)


def test_parameter_without_gradient_waits() -> None:
    """Its averages are neither decayed nor filled with zeros, and its own samples correct its bias."""
    tracker, (often, rare) = tracker_of(2, 2)
    for step, grad in enumerate(GRADS):
        often.grad = torch.tensor(grad, dtype=torch.float32)
        rare.grad = often.grad.clone() if step in (0, 2) else None
        tracker.update()
    alone = []
    for grads in (GRADS, GRADS[0:3:2]):
        single, weights = tracker_of(2)
        feed(single, weights, grads)
        alone.append(single.sums())
    torch.testing.assert_close(tracker.sums(), alone[0] + alone[1], rtol=1e-12, atol=0)


def test_nothing_to_report() -> None:
    """Neither without samples nor without noise is there a number; nothing divides by zero."""
    tracker, weights = tracker_of(2)
    assert tracker.ratio() is None
    tracker.update()
    assert tracker.ratio() is None
    assert feed(tracker, weights, [[0, 0], [0, 0]]) == [None, None]
    assert tracker.decibels() is None


def test_resume_is_exact() -> None:
    """Training rule 5."""
    straight, weights = tracker_of(2)
    expected = feed(straight, weights, GRADS)
    first, weights = tracker_of(2)
    feed(first, weights, GRADS[:1])
    second, weights = tracker_of(2)
    second.load_state_dict(first.state_dict())
    assert feed(second, weights, GRADS[1:]) == expected[1:]
    assert first.ratio() is None, "loading copies"
    with pytest.raises(CheckpointError, match="grad_snr_beta is 0.5, the checkpoint has 0.9"):
        tracker_of(2, beta=0.5)[0].load_state_dict(first.state_dict())


def test_change_of_shape_starts_again() -> None:
    tracker, weights = tracker_of(3)
    feed(tracker, weights, [[1, 2, 3], [3, 2, 1]])
    resumed, others = tracker_of(2)
    resumed.load_state_dict(tracker.state_dict())
    assert feed(resumed, others, GRADS) == feed(*tracker_of(2), GRADS)
    weights[0].data = torch.zeros(2)
    assert feed(tracker, weights, GRADS) == feed(*tracker_of(2), GRADS)


def test_bad_decay() -> None:
    with pytest.raises(ConfigError, match="grad_snr_beta"):
        GradSNRTracker([], 1.0)
