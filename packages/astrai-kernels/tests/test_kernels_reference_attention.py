"""The twin of decode attention against torch's own scaled_dot_product_attention, and its options against their formulas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from astrai_kernels.reference_attention import decode_attention, prefill_attention

LENS = [40, 7, 3]


def operands(q_len: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = torch.randn(3 * q_len, 8, 64), torch.randn(64, 2, 64), torch.randn(64, 2, 64)
    return q, k, v, torch.stack([torch.randperm(64)[:40] for _ in LENS]).int()


def of_request(b: int, q_len: int, q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    slots = table[b, : LENS[b]].long()
    keys, values = (x[slots].repeat_interleave(4, 1).transpose(0, 1) for x in (k, v))
    return q[b * q_len : (b + 1) * q_len].transpose(0, 1), keys, values


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("window", [None, 2, 9])
def test_against_sdpa(q_len: int, window: int | None) -> None:
    q, k, v, table = operands(q_len)
    out, lse = decode_attention(q, k, v, torch.tensor(LENS), req_to_token=table, q_len=q_len, window=window)
    for b, n in enumerate(LENS):
        queries, keys, values = of_request(b, q_len, q, k, v, table)
        visible = torch.ones(q_len, n, dtype=torch.bool).tril(n - q_len)
        if window:
            visible &= ~torch.ones(q_len, n, dtype=torch.bool).tril(n - q_len - window)
        expected = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=visible)
        rows = slice(b * q_len, (b + 1) * q_len)
        torch.testing.assert_close(out[rows].transpose(0, 1), expected)
        scores = (queries @ keys.transpose(1, 2) / 8).masked_fill(~visible, -torch.inf)
        torch.testing.assert_close(lse[rows].T, scores.logsumexp(-1))


def test_softcap_sinks_and_mask() -> None:
    q, k, v, table = operands(1)
    sinks, mask = torch.randn(8), torch.rand(3, 40) < 0.6
    out, _ = decode_attention(
        q, k, v, torch.tensor(LENS), req_to_token=table, softcap=3.0, sinks=sinks, mask=mask, scale=0.5
    )
    for b, n in enumerate(LENS):
        queries, keys, values = of_request(b, 1, q, k, v, table)
        scores = 3 * torch.tanh(queries @ keys.transpose(1, 2) * 0.5 / 3)
        scores = torch.cat((scores.masked_fill(~mask[b, :n], -torch.inf), sinks.view(8, 1, 1)), -1)
        torch.testing.assert_close(out[b].unsqueeze(1), scores.softmax(-1)[..., :-1] @ values)


def test_a_request_without_keys_gives_zeros() -> None:
    q, k, v, table = operands(1)
    out, lse = decode_attention(q, k, v, torch.tensor([0, 7, 3]), req_to_token=table)
    assert not out[0].any()
    assert lse[0].isneginf().all()


def narrowed(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 with a scale per row and head, as the reference of qkv_norm_rope_write rounds."""
    scales = x.float().abs().amax(-1) / 448
    return (x.float() / scales.unsqueeze(-1)).to(torch.float8_e4m3fn), scales


@pytest.mark.parametrize("contiguous", [False, True])
def test_an_e4m3_cache_is_its_elements_times_their_scales(contiguous: bool) -> None:
    """The same as over the widened cache, in decode and in prefill, and near to the unrounded one."""
    q, k, v, table = operands(2)
    where = {} if contiguous else {"req_to_token": table}
    if contiguous:
        k, v = (torch.stack([x[slots.long()] for slots in table]) for x in (k, v))
    (k8, k_scale), (v8, v_scale) = narrowed(k), narrowed(v)
    wide_k, wide_v = k8.float() * k_scale.unsqueeze(-1), v8.float() * v_scale.unsqueeze(-1)
    lens, indptr = torch.tensor(LENS), torch.tensor([0, 2, 4, 6])
    out, lse = decode_attention(q, k8, v8, lens, q_len=2, k_scale=k_scale, v_scale=v_scale, **where)
    expected, expected_lse = decode_attention(q, wide_k, wide_v, lens, q_len=2, **where)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    ragged, _ = prefill_attention(q, k8, v8, indptr, lens, k_scale=k_scale, v_scale=v_scale, **where)
    torch.testing.assert_close(ragged, out)
    exact, _ = decode_attention(q, k, v, lens, q_len=2, **where)
    assert 1e-4 < (out - exact).abs().max() < 0.1, "e4m3 has three bits"
