"""The twins behind the ops door against the formulas, and the packed layout of a CPU's weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from astrai_core import ops
from astrai_core.model.layers import Linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_rounds_before_the_weight(dtype):
    """Statistics in fp32; the normalised value takes x's dtype before the weight multiplies it, as LlamaRMSNorm does."""
    x, weight = torch.randn(3, 5, 64, dtype=dtype), torch.randn(64, dtype=dtype)
    wide = x.float()
    expected = weight * (wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()).to(dtype)
    torch.testing.assert_close(
        ops.rms_norm(x, weight, 1e-5), expected, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=0
    )
    normed, total = ops.add_rms_norm(x, x.flip(0), weight, 1e-5)
    assert torch.equal(total, x + x.flip(0))
    assert torch.equal(normed, ops.rms_norm(total, weight, 1e-5))
    assert ops.add_rms_norm(x, None, weight, 1e-5)[1] is x


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 2, 8, 32, 33])
def test_packed_weights_give_the_same_product(rows):
    layer = Linear(48, 80, bias=True)
    x = torch.randn(rows, 48)
    expected = F.linear(x, layer.weight, layer.bias)
    layer.pack()
    assert layer.packed is not None
    torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-5)


def test_a_changed_weight_is_never_answered_by_its_old_copy():
    layer = Linear(16, 16, bias=False)
    layer.pack()
    x = torch.randn(4, 16)
    layer(x).sum().backward()
    assert layer.weight.grad is not None, "gradients flow past the packed copy"
    with torch.no_grad():
        layer.weight.mul_(3.0)
        torch.testing.assert_close(layer(x), F.linear(x, layer.weight))
        layer.pack()
        torch.testing.assert_close(layer(x), F.linear(x, layer.weight))


def test_only_fp32_on_a_cpu_is_packed():
    layer = Linear(16, 16, bias=False).bfloat16()
    layer.pack()
    assert layer.packed is None
