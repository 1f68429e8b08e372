"""add_rms_norm_partials without a GPU: its arguments, its twin, its gradients."""

from __future__ import annotations

import math

import pytest
import torch

from astrai_kernels import add_rms_norm_partials, reference


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


PARTS, RESIDUAL, WEIGHT = meta(4, 6, 64, dtype=torch.float32), meta(6, 64), meta(64)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"parts": torch.ones(2, 6, 64)}, ValueError, "parts is on cpu, expected a CUDA device"),
        ({"parts": meta(2, 6, 64)}, TypeError, "parts has dtype torch.bfloat16, expected torch.float32"),
        (
            {"parts": meta(3, 6, 64, dtype=torch.float32)},
            ValueError,
            r"parts has shape \(3, 6, 64\), expected \[2 or 4",
        ),
        ({"parts": meta(6, 64, dtype=torch.float32)}, ValueError, r"parts has shape \(6, 64\)"),
        (
            {"parts": meta(2, 6, 60, dtype=torch.float32)},
            ValueError,
            "hidden is 60 by parts' shape, expected a multiple",
        ),
        ({"parts": meta(2, 6, 8200, dtype=torch.float32)}, ValueError, "hidden is 8200 by parts' shape"),
        ({"parts": meta(2, 64, 6, dtype=torch.float32).mT}, ValueError, "parts has stride 6 in its last dimension"),
        ({"parts": meta(2, 6, 66, dtype=torch.float32)[..., :64]}, ValueError, "parts has strides .* multiples of 16"),
        ({"residual": meta(6, 64, dtype=torch.float32)}, TypeError, "residual has dtype torch.float32"),
        ({"residual": meta(5, 64)}, ValueError, r"residual has shape \(5, 64\), expected \(6, 64\)"),
        ({"residual": meta(6, 68)[:, :64]}, ValueError, "residual has strides .* multiples of 16 bytes"),
        ({"weight": meta(64, dtype=torch.half)}, TypeError, "weight has dtype torch.float16"),
        ({"weight": meta(32)}, ValueError, r"weight has shape \(32,\)"),
        ({"eps": math.nan}, ValueError, "eps is nan"),
        ({"out": (meta(6, 64), meta(6, 56))}, ValueError, r"residual_out has shape \(6, 56\)"),
        ({"out": (meta(6, 64, dtype=torch.half), meta(6, 64))}, TypeError, "out has dtype torch.float16"),
        ({"out": (meta(64).expand(6, 64), meta(6, 64))}, ValueError, "out has strides .* overlap"),
    ],
)
def test_arguments(changes, error, message):
    """Kernel rule "Wrong device, dtype, shape, stride raises in Python"; nothing is copied silently."""
    with pytest.raises(error, match=message):
        add_rms_norm_partials(**{"parts": PARTS, "residual": RESIDUAL, "weight": WEIGHT, **changes})


def test_outputs_are_like_the_residual():
    for result in add_rms_norm_partials(PARTS, RESIDUAL, WEIGHT, overlap=True):
        assert (result.shape, result.dtype, result.device) == (RESIDUAL.shape, RESIDUAL.dtype, RESIDUAL.device)
        assert result.is_contiguous()


def test_gradients_are_refused_not_lost():
    """Row K11: with gradients on, a call that autograd would have to record is refused by name."""
    parts = PARTS.detach().requires_grad_()
    with pytest.raises(RuntimeError, match="parts requires a gradient, and this kernel has no backward"):
        add_rms_norm_partials(parts, RESIDUAL, WEIGHT)
    with torch.no_grad():
        add_rms_norm_partials(parts, RESIDUAL, WEIGHT)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_twin_is_add_rms_norm_of_the_rounded_sum(dtype):
    """The slices are summed in fp32 in rising order and rounded once, before the residual is added."""
    parts = torch.tensor([[[2.0**24, 1.0]], [[1.0, 2.0**-9]], [[-(2.0**24), 0.0]], [[1.0, 0.0]]])
    residual, weight = torch.tensor([[0.0, 2.0**-9]], dtype=dtype), torch.ones(2, dtype=dtype)
    normed, total = reference.add_rms_norm_partials(parts, residual, weight, 1e-5)
    # 2^24 + 1 is 2^24 in fp32; 1 + 2^-9 is 1 in bf16, and so again with the residual.
    second = 1.0 if dtype == torch.bfloat16 else 1.0 + 2.0**-8
    assert total.tolist() == [[1.0, second]]
    assert torch.equal(normed, reference.rms_norm(total, weight, 1e-5))
