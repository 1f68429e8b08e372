"""Muon, Mano, Nora and NAdamW: the vectors of maths sections 1 to 5 (rows O1, O2), parity with torch, edges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from astrai_core.errors import ConfigError
from astrai_train.optim.mano_adamw import Mano, tangent_direction
from astrai_train.optim.muon_adamw import Muon, newton_schulz, update_scale
from astrai_train.optim.nora_nadamw import NAdamW, Nora, row_tangent

G1 = ((1, 2, 0), (0, 1, -1))
G2 = ((0, 1, 1), (1, 0, 0))
W = ((1, 0, 0), (0, 1, 0))
WM = ((0.6, 0.8, 0), (0, 0.5, 1.0))
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NS: dict[str, Any] = {"coefficients": COEFFICIENTS, "eps": 1e-7}
MUON: dict[str, Any] = {
    "lr": 0.1,
    "weight_decay": 0.1,
    "momentum": 0.95,
    "nesterov": True,
    "ns_steps": 5,
    "ns_coefficients": COEFFICIENTS,
    "ns_dtype": "bf16",
    "eps": 1e-7,
    "scale": "original",
}
MANO: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "eps": 1e-8}
NORA: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.0, "beta": 0.95, "momentum": 0.95, "eps": 1e-10}

Matrix = Sequence[Sequence[float]]


def double(rows: Matrix) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def transposed(rows: Matrix) -> Matrix:
    return double(rows).T.tolist()


def near(actual: Tensor, expected: Matrix) -> None:
    """Equal to the six digits that the vectors have."""
    torch.testing.assert_close(actual.detach(), double(expected), rtol=0, atol=6e-7)


def run(make: Any, options: dict[str, Any], start: Matrix, *grads: Matrix, **group: Any) -> list[Tensor]:
    """The weight after each step."""
    weight = nn.Parameter(double(start).clone())
    optimizer = make([{"params": [weight], **group}], **options)
    after = []
    for grad in grads:
        weight.grad = double(grad).clone()
        optimizer.step()
        after.append(weight.detach().clone())
    return after


class TestMuon:
    @pytest.mark.parametrize(
        ("sigma", "expected"),
        [
            (1, 0.696436),
            (0.9, 0.682011),
            (0.7, 1.120323),
            (0.5, 0.765439),
            (0.3, 1.079592),
            (0.1, 0.712120),
            (0.01, 0.698917),
            (0.001, 0.470544),
        ],
    )
    def test_map_of_singular_values(self, sigma: float, expected: float) -> None:
        """Maths 1: five steps; the second value fills the Frobenius norm up to 1."""
        spread = torch.diag(double([[sigma, math.sqrt(1 - sigma**2)]])[0])
        assert float(newton_schulz(spread, steps=5, **NS)[0, 0]) == pytest.approx(expected, abs=6e-7)

    @pytest.mark.parametrize(("sigma", "expected"), [(1, 0.701), (0.5, 1.188859)])
    def test_map_of_one_step(self, sigma: float, expected: float) -> None:
        """Maths 1: one step; 0.5 beside another value, since the map normalises first."""
        spread = torch.diag(double([[sigma, math.sqrt(1 - sigma**2)]])[0])
        assert float(newton_schulz(spread, steps=1, **NS)[0, 0]) == pytest.approx(expected, abs=6e-7)

    def test_range_of_singular_values(self) -> None:
        """Maths 1: 0.02 .. 1 land in 0.6818 .. 1.1344."""
        sigma = torch.linspace(0.02, 1, 491, dtype=torch.float64)
        out = newton_schulz(torch.stack([sigma, (1 - sigma**2).sqrt()], 1).diag_embed(), steps=5, **NS)[:, 0, 0]
        assert float(out.min()) == pytest.approx(0.6818, abs=1e-4)
        assert float(out.max()) == pytest.approx(1.1344, abs=1e-4)

    def test_newton_schulz_of_g1(self) -> None:
        """Maths 1: the matrix, its singular values, and how far it is from the polar factor."""
        expected = ((0.446829, 0.592689, 0.300970), (-0.300970, 0.296344, -0.898284))
        polar = ((0.526599, 0.816497, 0.236701), (-0.236701, 0.408248, -0.881650))
        out = newton_schulz(double(G1), steps=5, **NS)
        near(out, expected)
        near(torch.linalg.svdvals(out)[None], [[1.048769, 0.725892]])
        near(newton_schulz(double(G1).T, steps=5, **NS), transposed(expected))
        assert 0.1 < float((out - double(polar)).abs().max()) < 0.3
        half = newton_schulz(double(G1).bfloat16(), steps=5, **NS)
        assert half.dtype == torch.bfloat16
        assert float((half.double() - out).abs().max()) < 6e-3

    def test_stack_is_one_matrix_after_another(self) -> None:
        """Maths 1: expert stacks go through Newton-Schulz matrix by matrix."""
        stack = torch.stack([double(G1), double(G2), torch.zeros(2, 3, dtype=torch.float64)])
        out = newton_schulz(stack, steps=5, **NS)
        torch.testing.assert_close(out[:2], torch.stack([newton_schulz(m, steps=5, **NS) for m in stack[:2]]))
        assert not out[2].any(), "a zero matrix stays zero"

    def test_two_steps_original(self) -> None:
        _, after = run(Muon, MUON, W, G1, G2)
        near(after, ((0.936595, -0.116647, -0.071503), (-0.061321, 0.936829, 0.151135)))

    def test_two_steps_match_rms(self) -> None:
        _, after = run(Muon, MUON | {"scale": "match_rms_adamw"}, W, G1, G2)
        near(after, ((0.965029, -0.040408, -0.024769), (-0.021242, 0.965110, 0.052355)))

    def test_two_steps_tall(self) -> None:
        _, after = run(Muon, MUON, transposed(W), transposed(G1), transposed(G2))
        near(after, ((0.926817, -0.075103), (-0.142863, 0.927104), (-0.087572, 0.185102)))

    def test_scales(self) -> None:
        assert update_scale("original", 2, 8) == 1
        assert update_scale("original", 8, 2) == 2
        assert update_scale("match_rms_adamw", 2, 16) == update_scale("match_rms_adamw", 16, 2) == pytest.approx(0.8)

    @pytest.mark.parametrize("nesterov", [True, False])
    @pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
    @pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
    def test_equals_torch(self, nesterov: bool, scale: str, shape: tuple[int, int]) -> None:
        """Parity with torch.optim.Muon in float32 over bfloat16 Newton-Schulz, at other than default options."""
        generator = torch.Generator().manual_seed(0)
        mine = nn.Parameter(torch.randn(shape, generator=generator))
        theirs = nn.Parameter(mine.detach().clone())
        options = MUON | {"lr": 0.02, "momentum": 0.9, "nesterov": nesterov, "scale": scale}
        reference_options = {key: value for key, value in options.items() if key not in ("ns_dtype", "scale")}
        pairs = [
            (mine, Muon([mine], **options)),
            (theirs, torch.optim.Muon([theirs], adjust_lr_fn=scale, **reference_options)),
        ]
        for _ in range(3):
            grad = torch.randn(shape, generator=generator)
            for weight, optimizer in pairs:
                weight.grad = grad.clone()
                optimizer.step()
        # One bfloat16 rounding that falls otherwise moves a weight by lr * scale * 2^-9.
        bound = 0.02 * update_scale(options["scale"], *shape) * 2**-8
        torch.testing.assert_close(mine, theirs, rtol=0, atol=bound)
        assert float((mine - theirs).detach().abs().mean()) < bound / 20

    def test_float32_newton_schulz_by_choice(self) -> None:
        """The option reaches the iteration: float32 stays within its own rounding of float64."""
        error = {}
        exact = run(Muon, MUON, W, G1)[0].float()
        for dtype in ("bf16", "fp32"):
            weight = nn.Parameter(torch.tensor(W, dtype=torch.float32))
            optimizer = Muon([weight], **(MUON | {"ns_dtype": dtype}))
            weight.grad = torch.tensor(G1, dtype=torch.float32)
            optimizer.step()
            error[dtype] = float((weight.detach() - exact).abs().max())
        assert error["fp32"] < 1e-6 < error["bf16"]


class TestMano:
    def test_two_steps(self) -> None:
        """Maths 2, second version with Nesterov: columns first, then rows (row O2)."""
        first, second = run(Mano, MANO, WM, G1, G2)
        near(first, ((0.565716, 0.764055, 0), (0, 0.499366, 0.990)))
        near(second, ((0.574105, 0.740094, -0.027136), (-0.029396, 0.477434, 0.987097)))

    def test_directions(self) -> None:
        """Maths 2: the directions of both steps; a column without tangent has the direction 0, not NaN (row O2)."""
        start, grad1, grad2 = double(WM), double(G1), double(G2)
        columns = tangent_direction(grad1 * 1.95, start, lambda x: x.sum(-2, keepdim=True), 1e-8)
        near(columns, ((1, 0.988012, 0), (0, -0.154377, 0)))
        momentum = 0.95 * grad1 + grad2
        weight = start * 0.99 - 0.1 * 0.2 * math.sqrt(2) * columns
        rows = tangent_direction(grad2 + 0.95 * momentum, weight, lambda x: x.sum(-1, keepdim=True), 1e-8)
        near(rows, ((-0.405482, 0.471133, 0.783338), (0.848594, 0.488972, -0.201979)))
        assert float((0.2 * math.sqrt(3) * rows).square().mean().sqrt()) == pytest.approx(0.2, abs=1e-6)

    def test_projection_at_unit_norm_is_the_papers(self) -> None:
        """Maths 2, first version: its normalised weight through our projection gives the paper's steps."""
        weight, momentum = double(WM), torch.zeros(2, 3, dtype=torch.float64)
        expected = (
            ((0.594, 0.777009, 0), (0, 0.518985, 0.99)),
            ((0.607583, 0.754314, -0.024415), (-0.021301, 0.4896, 0.992784)),
        )
        for dim, grad in enumerate((G1, G2)):
            momentum = 0.95 * momentum + double(grad)
            unit = F.normalize(weight, dim=dim)
            direction = tangent_direction(momentum, unit, lambda x, dim=dim: x.sum(dim, keepdim=True), 1e-8)
            weight = weight - 0.1 * (0.2 * math.sqrt(weight.shape[dim]) * direction + 0.1 * weight)
            near(weight, expected[dim])

    def test_axis_alternates_once_a_step(self) -> None:
        """Row O2: every parameter of a step has the same axis, and the counter lives in the group."""
        weights = [nn.Parameter(double(WM)) for _ in range(3)]
        optimizer = Mano(weights, **MANO)
        for grad in (G1, G2):
            for weight in weights:
                weight.grad = double(grad)
            optimizer.step()
        assert optimizer.param_groups[0]["steps"] == 2
        near(weights[0], ((0.574105, 0.740094, -0.027136), (-0.029396, 0.477434, 0.987097)))
        assert torch.equal(weights[0], weights[2])

    def test_momentum_and_nesterov_reach_the_step(self) -> None:
        """Row O2: `mano_momentum` and `mano_nesterov` each change the second step."""
        outcomes = [run(Mano, MANO | change, WM, G1, G2)[1] for change in ({}, {"momentum": 0.5}, {"nesterov": False})]
        assert not any(torch.allclose(outcomes[a], outcomes[b], atol=1e-4) for a, b in ((0, 1), (0, 2), (1, 2)))

    def test_stack_is_one_matrix_after_another(self) -> None:
        stack = nn.Parameter(torch.stack([double(WM), double(W)]))
        optimizer = Mano([stack], **MANO)
        for grad in (G1, G2):
            stack.grad = double(grad).expand(2, 2, 3).clone()
            optimizer.step()
        torch.testing.assert_close(stack.detach(), torch.stack([run(Mano, MANO, m, G1, G2)[1] for m in (WM, W)]))


class TestNora:
    def test_two_steps(self) -> None:
        """Maths 4, variant B: Nesterov, as the recipes have it."""
        first, second = run(Nora, NORA, WM, G1, G2)
        near(first, ((0.68, 0.74, 0), (0, 0.410557, 1.044721)))
        near(second, ((0.731052, 0.693087, -0.072061), (-0.085748, 0.362671, 1.063540)))

    def test_plain_average(self) -> None:
        """Maths 4, variant A: with the whole weight on the average there is no Nesterov."""
        first, second = run(Nora, NORA | {"momentum": 1.0}, WM, G1, G2)
        near(first, ((0.68, 0.74, 0), (0, 0.410557, 1.044721)))
        near(second, ((0.737723, 0.686957, -0.062084), (-0.063032, 0.338303, 1.073116)))

    def test_tall(self) -> None:
        """Maths 4: a tall matrix has the scale sqrt(3/2)."""
        (after,) = run(Nora, NORA, transposed(WM), transposed(G1))
        near(after, ((0.6, 0), (0.735089, 0.603858), (0, 1)))

    def test_direction(self) -> None:
        direction = row_tangent(double(G1), double(WM), 1e-10)
        near(direction, ((-0.8, 0.6, 0), (0, 0.894427, -0.447214)))
        assert float((direction * double(WM)).sum(-1).abs().max()) < 1e-12

    def test_row_norms_grow_by_the_step(self) -> None:
        """Maths 4: without decay a row's squared norm grows by exactly (lr * scale)^2 a step."""
        after = run(Nora, NORA, WM, G1, G2)
        near(torch.stack([w.norm(dim=1) for w in after]), ((1.004988, 1.122497), (1.009950, 1.126943)))
        squared = torch.stack([w.square().sum(1) for w in (double(WM), *after)])
        torch.testing.assert_close(squared.diff(dim=0), torch.full((2, 2), 0.01, dtype=torch.float64))

    def test_zero_row_is_not_projected(self) -> None:
        (after,) = run(Nora, NORA, ((0, 0, 0), (0, 1, 0)), G1)
        near(after[:1] / -0.1, [[1 / math.sqrt(5), 2 / math.sqrt(5), 0]])
        assert not row_tangent(double(W) * 3, double(W), 1e-10).any(), "a row without tangent does not move"

    def test_half_precision_has_a_master_copy(self) -> None:
        """Maths 4: steps below a bfloat16 weight's resolution add up in float32."""
        start = torch.tensor(WM).bfloat16()
        weights = {torch.bfloat16: nn.Parameter(start.clone()), torch.float32: nn.Parameter(start.float())}
        for dtype, weight in weights.items():
            optimizer = Nora([weight], **(NORA | {"lr": 1e-4}))
            for _ in range(100):
                weight.grad = torch.tensor(G1, dtype=dtype)
                optimizer.step()
        assert not torch.equal(weights[torch.bfloat16], start)
        assert torch.equal(weights[torch.bfloat16], weights[torch.float32].bfloat16())


def test_nadamw_two_steps() -> None:
    """Maths 5: the simple form, beside AdamW's own figures."""
    expected = {"nadamw": (0.80000000, 0.78854395), "adamw": (0.89000000, 0.84653942)}
    options: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    for name, make in (("nadamw", NAdamW), ("adamw", torch.optim.AdamW)):
        weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
        optimizer = make([weight], **options)
        for grad, after in zip((0.5, -0.2), expected[name], strict=True):
            weight.grad = torch.full_like(weight, grad)
            optimizer.step()
            assert weight.item() == pytest.approx(after, abs=6e-9)


@pytest.mark.parametrize(("make", "options"), [(Muon, MUON), (Mano, MANO), (Nora, NORA)])
class TestRowGroups:
    """O1: a fused weight moves as its parts would."""

    def test_fused_equals_parts(self, make: type[Optimizer], options: dict[str, Any]) -> None:
        generator = torch.Generator().manual_seed(1)
        rows = (6, 2, 3)
        start = torch.randn(sum(rows), 4, generator=generator, dtype=torch.float64)
        grads = [torch.randn(start.shape, generator=generator, dtype=torch.float64) for _ in range(3)]
        fused = run(make, options, start.tolist(), *[grad.tolist() for grad in grads], row_groups=rows)
        parts = [
            run(make, options, piece.tolist(), *[grad.split(rows)[index].tolist() for grad in grads])
            for index, piece in enumerate(start.split(rows))
        ]
        for step in range(3):
            torch.testing.assert_close(fused[step], torch.cat([part[step] for part in parts]))
        whole = run(make, options, start.tolist(), *[grad.tolist() for grad in grads])
        assert not torch.allclose(fused[2], whole[2], atol=1e-3), "one matrix would move otherwise"

    def test_refusals(self, make: type[Optimizer], options: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=r"parameter 0 has shape \[3\]"):
            make([nn.Parameter(torch.zeros(3))], **options)
        with pytest.raises(ConfigError, match="add up to 5, it has 6 rows"):
            make([{"params": [nn.Parameter(torch.zeros(6, 2))], "row_groups": (2, 3)}], **options)
