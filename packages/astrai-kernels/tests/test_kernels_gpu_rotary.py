"""apply_rotary on a GPU: the correctness rule, layouts, partial rotation, views, offsets."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from astrai_kernels import apply_rotary, apply_rotary_, reference

pytestmark = [pytest.mark.gpu, pytest.mark.kernel]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
MAX_POS = 512


def tables(rotary_dim: int) -> tuple[Tensor, Tensor]:
    frequencies = 10000.0 ** (-torch.arange(0, rotary_dim, 2, device="cuda", dtype=torch.float64) / rotary_dim)
    angles = torch.outer(torch.arange(MAX_POS, device="cuda", dtype=torch.float64), frequencies)
    return angles.cos().float(), angles.sin().float()


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=torch.float32, device="cuda").to(dtype)


def same_precision(x: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor, interleaved: bool) -> Tensor:
    """Hugging Face's computation in the type of x, tables cast down."""
    rotary_dim = 2 * cos.shape[1]
    c, s = (table[position_ids.long()].to(x.dtype).unsqueeze(1) for table in (cos, sin))
    turning = x[..., :rotary_dim]
    if interleaved:
        a, b = turning[..., ::2], turning[..., 1::2]
        turned = torch.stack((a * c - b * s, b * c + a * s), dim=-1).flatten(-2)
    else:
        a, b = turning.chunk(2, dim=-1)
        turned = torch.cat((a * c - b * s, b * c + a * s), dim=-1)
    return torch.cat((turned, x[..., rotary_dim:]), dim=-1)


@pytest.mark.parametrize("interleaved", [False, True], ids=["half-split", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"),
    [
        (64, 64),
        (80, 80),
        (96, 96),
        (128, 128),
        (192, 192),
        (256, 256),
        (128, 32),
        (96, 48),
        (100, 40),
        (65, 34),
        (6, 2),
    ],
)
def test_obeys_the_rule(fresh_seed, obeys_rule, interleaved, dtype, head_dim, rotary_dim):
    cos, sin = tables(rotary_dim)
    for tokens, q_heads, k_heads in ((1, 1, 1), (7, 9, 1), (33, 5, 2), (301, 24, 4)):
        q, k = randn(tokens, q_heads, head_dim, dtype=dtype), randn(tokens, k_heads, head_dim, dtype=dtype)
        position_ids = torch.randint(0, MAX_POS, (tokens,), device="cuda", dtype=torch.int32)
        outs = tuple(torch.full_like(x, torch.nan) for x in (q, k))
        apply_rotary(q, k, cos, sin, position_ids, interleaved=interleaved, out=outs)
        exact = reference.apply_rotary(q.float(), k.float(), cos, sin, position_ids, interleaved=interleaved)
        for x, out, a in zip((q, k), outs, exact, strict=True):
            obeys_rule(out, a, same_precision(x, cos, sin, position_ids, interleaved))
            assert torch.equal(out[..., rotary_dim:], x[..., rotary_dim:]), "pass-through elements changed"
        again = apply_rotary(q, k, cos, sin, position_ids.long(), interleaved=interleaved)
        apply_rotary_(q, k, cos, sin, position_ids, interleaved=interleaved)
        for out, new, in_place in zip(outs, again, (q, k), strict=True):
            assert torch.equal(out, new), "int64 positions or a new output differ"
            assert torch.equal(out, in_place), "in place differs"


@pytest.mark.parametrize("interleaved", [False, True], ids=["half-split", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_views_of_a_fused_projection(fresh_seed, interleaved, dtype):
    """q and k inside one QKV matrix, rotated in place by one launch; v stays as it is."""
    cos, sin = tables(64)
    qkv = randn(129, (6 + 2 + 2) * 64, dtype=dtype)
    before = qkv.clone()
    heads = qkv.view(129, 10, 64)
    position_ids = torch.randint(0, MAX_POS, (129,), device="cuda")
    apply_rotary_(heads[:, :6], heads[:, 6:8], cos, sin, position_ids, interleaved=interleaved)
    expected, _ = apply_rotary(
        before.view(129, 10, 64)[:, :8].contiguous(), None, cos, sin, position_ids, interleaved=interleaved
    )
    assert torch.equal(heads[:, :8], expected)
    assert torch.equal(heads[:, 8:], before.view(129, 10, 64)[:, 8:])


@pytest.mark.parametrize("interleaved", [False, True], ids=["half-split", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_reduction_contract(fresh_seed, interleaved, dtype):
    """A token's bits depend on that token alone: not on batch size (which picks the kernel), order or alignment."""
    cos, sin = tables(128)
    q, k = randn(8192, 32, 128, dtype=dtype), randn(8192, 8, 128, dtype=dtype)
    position_ids = torch.randint(0, MAX_POS, (8192,), device="cuda")
    full = apply_rotary(q, k, cos, sin, position_ids, interleaved=interleaved)
    for tokens in (1, 2, 3, 17, 100, 1000):
        part = slice(8192 - tokens, None)
        got = apply_rotary(q[part], k[part], cos, sin, position_ids[part], interleaved=interleaved)
        for whole, small in zip(full, got, strict=True):
            assert torch.equal(whole[part], small), f"{tokens} tokens"
    alone, _ = apply_rotary(q, None, cos, sin, position_ids, interleaved=interleaved)
    assert torch.equal(alone, full[0]), "k in the same launch changes q"
    shifted = torch.empty(8192 * 32 * 129, dtype=dtype, device="cuda").view(8192, 32, 129)[..., 1:]
    shifted.copy_(q)
    apply_rotary_(shifted, None, cos, sin, position_ids, interleaved=interleaved)
    assert torch.equal(shifted, full[0]), "the unaligned kernel differs"


def test_strided_tables_and_positions(fresh_seed):
    """cos and sin as the halves of one cache row, positions as every other element."""
    cos, sin = tables(64)
    cache = torch.cat((cos, sin), dim=1)
    q = randn(50, 4, 64, dtype=torch.bfloat16)
    position_ids = torch.randint(0, MAX_POS, (100,), device="cuda", dtype=torch.int32)
    got, _ = apply_rotary(q, None, cache[:, :32], cache[:, 32:], position_ids[::2])
    expected, _ = apply_rotary(q, None, cos, sin, position_ids[::2].contiguous())
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_position_outside_the_tables_gives_nan(fresh_seed, dtype):
    """No memory outside the tables is read: only that token, only its rotated elements, become NaN."""
    cos, sin = tables(32)
    q = randn(5, 3, 64, dtype=torch.bfloat16)
    bad = [-1, MAX_POS, torch.iinfo(dtype).max, torch.iinfo(dtype).min]
    got, _ = apply_rotary(q, None, cos, sin, torch.tensor([*bad, 3], dtype=dtype, device="cuda"))
    assert got[:4, :, :32].isnan().all()
    assert torch.equal(got[:4, :, 32:], q[:4, :, 32:])
    assert got[4].isfinite().all()


def test_offsets_past_32_bits(fresh_seed):
    """Kernel rule "64-bit offsets": tokens that start 2^30 elements apart, so past 2^31 and 2^32."""
    tokens, stride = 5, 1 << 30
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB of free GPU memory")
    cos, sin = tables(64)
    memory = torch.empty((tokens - 1) * stride + 4 * 64, dtype=torch.bfloat16, device="cuda")
    far = memory.as_strided((tokens, 4, 64), (stride, 64, 1))
    near = randn(tokens, 4, 64, dtype=torch.bfloat16)
    far.copy_(near)
    position_ids = torch.arange(tokens, device="cuda") * 100
    expected, _ = apply_rotary(near, None, cos, sin, position_ids)
    apply_rotary_(far, None, cos, sin, position_ids)
    assert torch.equal(far, expected)


def test_many_tokens_and_heads(fresh_seed):
    """Kernel coverage: batch x heads past 65,535."""
    cos, sin = tables(64)
    q, k = randn(70_001, 3, 64, dtype=torch.bfloat16), randn(70_001, 1, 64, dtype=torch.bfloat16)
    position_ids = torch.randint(0, MAX_POS, (70_001,), device="cuda")
    q_out, k_out = apply_rotary(q, k, cos, sin, position_ids)
    q_last, k_last = apply_rotary(q[-2:], k[-2:], cos, sin, position_ids[-2:])
    assert torch.equal(q_out[-2:], q_last)
    assert torch.equal(k_out[-2:], k_last)
    wide = randn(2, 70_001, 64, dtype=torch.bfloat16)
    wide_out, _ = apply_rotary(wide, None, cos, sin, position_ids[:2])
    last_out, _ = apply_rotary(wide[:, -2:], None, cos, sin, position_ids[:2])
    assert torch.equal(wide_out[:, -2:], last_out)


def test_empty_batches():
    """No launch, no error; no k heads are no k."""
    cos, sin = tables(64)
    q, k = torch.empty(0, 4, 64, device="cuda"), torch.empty(0, 2, 64, device="cuda")
    none = torch.empty(0, device="cuda", dtype=torch.int64)
    assert [out.shape for out in apply_rotary(q, k, cos, sin, none)] == [q.shape, k.shape]
    q, k = torch.randn(3, 4, 64, device="cuda"), torch.empty(3, 0, 64, device="cuda")
    position_ids = torch.arange(3, device="cuda")
    with_k, _ = apply_rotary(q, k, cos, sin, position_ids)
    assert torch.equal(with_k, apply_rotary(q, None, cos, sin, position_ids)[0])
