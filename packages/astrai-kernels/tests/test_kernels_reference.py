"""The reference twins against formulas and functions of others, on the CPU."""

from __future__ import annotations

import pytest
import torch

from astrai_kernels import reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_matches_torch(dtype):
    """torch.nn.functional.rms_norm computes the same but for one rounding, which fp32 does not see."""
    x, w = torch.randn(7, 96).to(dtype), torch.randn(96).to(dtype)
    expected = torch.nn.functional.rms_norm(x.float(), (96,), w.float(), 1e-5)
    got = reference.rms_norm(x, w, 1e-5)
    assert got.dtype == dtype
    rounding = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    torch.testing.assert_close(got.float(), expected, rtol=rounding, atol=1e-6)


def test_rms_norm_rounds_before_the_weight():
    """LlamaRMSNorm casts the normed row to the input's type and only then multiplies: two roundings, not one."""
    x, w = torch.randn(64, 256).bfloat16(), torch.randn(256).bfloat16()
    wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    got = reference.rms_norm(x, w)
    assert torch.equal(got, w * wide.bfloat16())
    assert not torch.equal(got, (w.float() * wide).bfloat16())


def test_add_rms_norm_norms_the_rounded_sum():
    """The sum is rounded to the storage type before it is normalised, as ``x + residual`` does."""
    x, r, w = torch.randn(9, 64).bfloat16(), torch.randn(9, 64).bfloat16(), torch.randn(64).bfloat16()
    normed, new_residual = reference.add_rms_norm(x, r, w)
    assert torch.equal(new_residual, x + r)
    assert torch.equal(normed, reference.rms_norm(x + r, w))


def complex_rotary(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """RoFormer's formula by complex numbers: pair (2i, 2i+1) times exp(i * angle)."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    turned = pairs * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    return torch.view_as_real(turned).flatten(-2)


@pytest.fixture
def angles() -> torch.Tensor:
    frequencies = 10000.0 ** (-torch.arange(0, 64, 2) / 64)
    return torch.outer(torch.arange(50).float(), frequencies)


@pytest.mark.parametrize("positions", [torch.int32, torch.int64])
def test_interleaved_rotary_is_complex_multiplication(angles, positions):
    """The interleaved layout against the complex formula that training uses (row K11)."""
    q, k = torch.randn(9, 4, 64), torch.randn(9, 2, 64)
    position_ids = torch.randint(0, 50, (9,), dtype=positions)
    got_q, got_k = reference.apply_rotary(q, k, angles.cos(), angles.sin(), position_ids, interleaved=True)
    torch.testing.assert_close(got_q, complex_rotary(q, angles[position_ids.long()]))
    torch.testing.assert_close(got_k, complex_rotary(k, angles[position_ids.long()]))


def test_half_split_rotary_is_rotate_half(angles):
    """The half-split layout against ``x * cos + rotate_half(x) * sin`` of Hugging Face's Llama."""
    q = torch.randn(9, 4, 64)
    position_ids = torch.randint(0, 50, (9,))
    cos, sin = (torch.cat([f, f], -1)[position_ids].unsqueeze(1) for f in (angles.cos(), angles.sin()))
    rotated_half = torch.cat((-q[..., 32:], q[..., :32]), dim=-1)
    got, none = reference.apply_rotary(q, None, angles.cos(), angles.sin(), position_ids)
    torch.testing.assert_close(got, q * cos + rotated_half * sin)
    assert none is None


@pytest.mark.parametrize("interleaved", [False, True])
def test_partial_rotary_passes_the_rest_through(angles, interleaved):
    q = torch.randn(5, 3, 96).bfloat16()
    position_ids = torch.arange(5)
    cos, sin = angles.cos(), angles.sin()
    got, _ = reference.apply_rotary(q, None, cos, sin, position_ids, interleaved=interleaved)
    alone, _ = reference.apply_rotary(q[..., :64], None, cos, sin, position_ids, interleaved=interleaved)
    assert torch.equal(got[..., 64:], q[..., 64:])
    assert torch.equal(got[..., :64], alone)


def test_position_outside_the_tables_gives_nan(angles):
    """Contract of the kernel, which cannot raise: only the token at fault, only its rotated elements."""
    q = torch.randn(4, 2, 96)
    got, _ = reference.apply_rotary(q, None, angles.cos(), angles.sin(), torch.tensor([0, 50, -1, 49]))
    assert got[1:3, :, :64].isnan().all()
    assert got[1:3, :, 64:].isfinite().all()
    assert got[[0, 3]].isfinite().all()
