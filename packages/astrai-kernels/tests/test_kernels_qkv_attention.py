"""qkv_decode_attention without a GPU: what it refuses, its torch op, and its twin (rows K10, K12)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from astrai_kernels import qkv_decode_attention
from astrai_kernels.reference import qkv_norm_rope_write
from astrai_kernels.reference_attention import decode_attention
from astrai_kernels.reference_attention import qkv_decode_attention as twin


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def plan(n_heads: int = 4, n_kv_heads: int = 2, head_dim: int = 64, q_len: int = 1, batch: int = 3) -> SimpleNamespace:
    """The tensors of a DecodePlan, which itself needs a device."""
    return SimpleNamespace(
        shape=(n_heads, n_kv_heads, head_dim, q_len, 0, 0),
        max_chunks=8,
        chunks=meta(4 + 8 * 8, dtype=torch.int32),
        partial_out=meta(8, n_heads * q_len, head_dim, dtype=torch.float32),
        partial_ml=meta(8, n_heads * q_len, 2, dtype=torch.float32),
        counters=meta(batch, n_heads * q_len, dtype=torch.int32),
    )


OPERANDS = {
    "qkv": meta(3, 8 * 64),
    "position_ids": meta(3, dtype=torch.int64),
    "cos": meta(128, 32, dtype=torch.float32),
    "sin": meta(128, 32, dtype=torch.float32),
    "k_buffer": meta(9, 2, 64),
    "v_buffer": meta(9, 2, 64),
    "out_cache_loc": meta(3, dtype=torch.int64),
    "plan": plan(),
    "req_to_token": meta(5, 16, dtype=torch.int32),
}


def test_operands_are_accepted() -> None:
    assert qkv_decode_attention(**OPERANDS).shape == (3, 4, 64)
    out = meta(3, 4, 64)
    assert qkv_decode_attention(**OPERANDS, q_norm=meta(64), k_norm=meta(64), interleaved=True, out=out) is out
    unrotated = {**OPERANDS, "position_ids": None, "cos": None, "sin": None}
    assert qkv_decode_attention(**unrotated).shape == (3, 4, 64)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"qkv": meta(3, 512, dtype=torch.float32)}, TypeError, "qkv has dtype torch.float32"),
        ({"qkv": meta(3, 520)[:, :512]}, None, ""),
        ({"qkv": meta(3, 516)[:, :512]}, ValueError, "qkv has strides .* rows at multiples of 16 bytes"),
        ({"qkv": meta(3, 8 * 128)}, ValueError, "k_buffer has shape"),
        ({"qkv": meta(4, 512), "position_ids": None, "cos": None, "sin": None}, ValueError, "out_cache_loc has shape"),
        ({"cos": meta(128, 12, dtype=torch.float32), "sin": meta(128, 12, dtype=torch.float32)}, ValueError, "cos has"),
        ({"k_buffer": meta(9, 2, 64, dtype=torch.float8_e4m3fn)}, ValueError, "k_buffer has dtype torch.float8"),
        ({"plan": plan(q_len=2)}, ValueError, "plan is of 4 heads, 2 kv heads, head_dim 64 and q_len 2, expected"),
        ({"plan": plan(head_dim=80)}, ValueError, "plan is of 4 heads, 2 kv heads, head_dim 80"),
        ({"plan": plan(n_heads=18)}, ValueError, "plan is of 18 heads, .* at most 8 heads a kv head"),
        ({"plan": plan(batch=2)}, ValueError, "qkv has 3 rows, expected at most the plan's 2 requests"),
        ({"req_to_token": meta(5, 16, dtype=torch.int64)}, TypeError, "req_to_token has dtype torch.int64"),
        ({"q_norm": meta(32)}, ValueError, "q_norm has shape"),
        ({"eps": -1.0}, ValueError, "eps is -1.0"),
        ({"out": meta(3, 5, 64)}, ValueError, "out has shape"),
    ],
)
def test_operands_are_refused(changed, error, message) -> None:
    if error is None:
        assert qkv_decode_attention(**{**OPERANDS, **changed}).shape == (3, 4, 64)
        return
    with pytest.raises(error, match=f"qkv_decode_attention: {message}"):
        qkv_decode_attention(**{**OPERANDS, **changed})


def test_gradients_are_refused() -> None:
    with pytest.raises(RuntimeError, match="qkv_decode_attention: qkv requires a gradient"):
        qkv_decode_attention(**{**OPERANDS, "qkv": meta(3, 512).requires_grad_()})


def test_opcheck_on_meta_tensors() -> None:
    """Schema, fake kernel and dynamic-shape tracing."""
    o, p = OPERANDS, plan()
    arguments = (
        *(o[name] for name in ("qkv", "position_ids", "cos", "sin", "k_buffer", "v_buffer", "out_cache_loc")),
        *(meta(64), None, 1e-6, False, o["req_to_token"], meta(3, 4, 64), p.chunks, p.partial_out, p.partial_ml),
        *(p.counters, list(p.shape), p.max_chunks, 0.125, True),
    )
    torch.library.opcheck(
        torch.ops.astrai.qkv_decode_attention_out.default,
        arguments,
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


@pytest.mark.parametrize("window", [None, 1, 5])
def test_twin_is_the_two_ops(window) -> None:
    """The twin writes the newest key before it attends, and nothing outside the pool."""
    torch.manual_seed(3)
    lens, size = torch.tensor([4, 1, 9]), 20
    table = torch.randperm(size)[: 3 * 6].view(2, 9).int()
    table = torch.cat((table, table[:1]))  # the third request's row is that of the first, which it may share
    rows = torch.tensor([0, 1, 2])
    loc = torch.tensor([int(table[0, 3]), int(table[1, 0]), -1])
    qkv = torch.randn(3, 8 * 64)
    angles = torch.rand(16, 32)
    pools = [torch.randn(size, 2, 64) for _ in "kv"]
    ours, theirs = ([pool.clone() for pool in pools] for _ in range(2))
    rope = (lens - 1, angles.cos(), angles.sin())
    out = twin(qkv, *rope, *ours, loc, lens, n_heads=4, req_to_token=table, req_indices=rows, window=window)
    q = qkv_norm_rope_write(qkv, *rope, *theirs, loc, 4, 2)
    expected = decode_attention(q, *theirs, lens, req_to_token=table, req_indices=rows, window=window)[0]
    assert torch.equal(out, expected)
    assert torch.equal(ours[0], theirs[0])
    assert (ours[0] != pools[0]).flatten(1).any(1).sum() == 2
