"""qkv_norm_rope_write on a GPU: bitwise the ops in sequence, pools, slots, views, fp8, offsets."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from astrai_kernels import apply_rotary, qkv_norm_rope_write, reference, rms_norm

pytestmark = [pytest.mark.gpu, pytest.mark.kernel]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
MAX_POS = 512
# (head_dim, rotary_dim): every head_dim of the kernel rules; partial; with and without whole octets in each half.
DIMS = [
    (64, 64),
    (80, 80),
    (96, 96),
    (128, 128),
    (192, 192),
    (256, 256),
    (128, 32),
    (96, 48),
    (80, 20),
    (100, 40),
    (6, 2),
]


def tables(rotary_dim: int) -> tuple[Tensor, Tensor]:
    angles = torch.rand(MAX_POS, rotary_dim // 2, device="cuda") * 6.3
    return angles.cos(), angles.sin()


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=torch.float32, device="cuda").to(dtype)


class Inputs:
    """A strided QKV matrix, poisoned pools with gaps, slots in random order."""

    def __init__(
        self,
        tokens: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        rotary_dim: int,
        dtype: torch.dtype,
        gap: int = 8,
    ) -> None:
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, head_dim
        width = (n_heads + 2 * n_kv_heads) * head_dim
        self.qkv = randn(tokens, width + gap, dtype=dtype)[:, :width]
        self.position_ids = torch.randint(0, MAX_POS, (tokens,), device="cuda")
        self.cos, self.sin = tables(rotary_dim)
        self.q_norm, self.k_norm = randn(head_dim, dtype=dtype), randn(head_dim, dtype=dtype)
        self.size = tokens + 5
        self.slots = torch.randperm(self.size, device="cuda")[:tokens]
        self.memory = torch.full((2, self.size, n_kv_heads, head_dim + gap), torch.nan, dtype=dtype, device="cuda")
        self.k, self.v = self.memory[..., :head_dim]

    def run(
        self,
        *,
        norm: bool,
        rotate: bool,
        interleaved: bool = False,
        out: Tensor | None = None,
        overlap: bool = False,
    ) -> Tensor:
        rotary = (self.position_ids, self.cos, self.sin) if rotate else (None, None, None)
        return qkv_norm_rope_write(
            *(self.qkv, *rotary, self.k, self.v, self.slots, self.n_heads, self.n_kv_heads),
            q_norm=self.q_norm if norm else None,
            k_norm=self.k_norm if norm else None,
            eps=1e-5,
            interleaved=interleaved,
            out=out,
            overlap=overlap,
        )

    def heads(self) -> tuple[Tensor, Tensor, Tensor]:
        heads = self.qkv.unflatten(1, (-1, self.head_dim))
        q, k, v = heads.split((self.n_heads, self.n_kv_heads, self.n_kv_heads), dim=1)
        return q, k, v

    def in_sequence(self, *, norm: bool, rotate: bool, interleaved: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.heads()
        if norm:
            q, k = rms_norm(q, self.q_norm, 1e-5), rms_norm(k, self.k_norm, 1e-5)
        if rotate:
            q, turned = apply_rotary(q, k, self.cos, self.sin, self.position_ids, interleaved=interleaved)
            assert turned is not None
            k = turned
        return q, k, v


@pytest.mark.parametrize("interleaved", [False, True], ids=["half-split", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), DIMS)
def test_bitwise_the_ops_in_sequence(fresh_seed, interleaved, dtype, head_dim, rotary_dim):
    """rms_norm, apply_rotary and index_copy_, to the last bit; nothing else is written."""
    for tokens, n_heads, n_kv_heads, gap in ((1, 1, 1, 8), (7, 9, 1, 8), (33, 5, 2, 1), (4500, 24, 4, 8)):
        if tokens > 1000 and dtype == torch.float32 and head_dim > 128:
            continue
        inputs = Inputs(tokens, n_heads, n_kv_heads, head_dim, rotary_dim, dtype, gap)
        for norm, rotate in ((True, True), (False, True), (True, False), (False, False)):
            inputs.memory.fill_(torch.nan)
            q = inputs.run(norm=norm, rotate=rotate, interleaved=interleaved)
            expected = inputs.in_sequence(norm=norm, rotate=rotate, interleaved=interleaved)
            for name, got, want in zip(
                "qkv", (q, inputs.k[inputs.slots], inputs.v[inputs.slots]), expected, strict=True
            ):
                assert torch.equal(got, want), f"{name}: {tokens} tokens, norm {norm}, rotate {rotate}, gap {gap}"
            written = 2 * tokens * n_kv_heads * head_dim
            assert inputs.memory.isnan().sum() == inputs.memory.numel() - written, "written outside the slots"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (128, 128), (128, 32), (80, 20)])
def test_old_positions_and_slots_are_read_early(fresh_seed, dtype, head_dim, rotary_dim):
    """`overlap` behind a product, which may still run when they are read: the bits of the plain call."""
    for tokens in (1, 33, 4500):
        inputs = Inputs(tokens, 24, 4, head_dim, rotary_dim, dtype)
        x, weight = randn(tokens, 512, dtype=dtype), randn(inputs.qkv.shape[1], 512, dtype=dtype)
        torch.cuda.synchronize()
        results = {}
        for overlap in (False, True):
            inputs.memory.fill_(torch.nan)
            rms_norm(x, weight[0])  # neither linear nor a library's product: positions and slots are older than it
            torch.mm(x, weight.T, out=inputs.qkv)
            q = inputs.run(norm=True, rotate=True, overlap=overlap)
            results[overlap] = (q, inputs.k[inputs.slots].clone(), inputs.v[inputs.slots].clone())
        for got, expected in zip(results[True], results[False], strict=True):
            assert torch.equal(got, expected), f"{tokens} tokens"


@pytest.mark.parametrize("dtype", DTYPES)
def test_obeys_the_rule(fresh_seed, obeys_rule, dtype):
    inputs = Inputs(301, 16, 8, 128, 128, dtype)
    q = inputs.run(norm=True, rotate=True)
    results = {}
    for wide in (True, False):
        pools = [torch.zeros(inputs.size, 8, 128, dtype=torch.float32 if wide else dtype, device="cuda") for _ in "kv"]
        cast = Tensor.float if wide else Tensor.contiguous
        results[wide] = (
            reference.qkv_norm_rope_write(
                *(cast(inputs.qkv), inputs.position_ids, inputs.cos, inputs.sin, *pools, inputs.slots, 16, 8),
                q_norm=cast(inputs.q_norm),
                k_norm=cast(inputs.k_norm),
                eps=1e-5,
            ),
            pools[0][inputs.slots],
        )
    obeys_rule(q, results[True][0], results[False][0])
    obeys_rule(inputs.k[inputs.slots], results[True][1], results[False][1])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_outside_the_pool_are_not_written(fresh_seed, dtype):
    """Padded rows carry -1; their q is computed all the same."""
    inputs = Inputs(6, 4, 2, 64, 64, torch.bfloat16)
    expected = inputs.run(norm=True, rotate=True)
    k = inputs.k.clone()
    inputs.memory.fill_(torch.nan)
    slots = inputs.slots.clone()
    bad = [-1, inputs.size, torch.iinfo(dtype).max, torch.iinfo(dtype).min]
    inputs.slots = torch.tensor([*bad, *slots[4:].tolist()], dtype=dtype, device="cuda")
    assert torch.equal(inputs.run(norm=True, rotate=True), expected)
    assert torch.equal(inputs.k[slots[4:]], k[slots[4:]])
    assert inputs.memory.isnan().sum() == inputs.memory.numel() - 2 * 2 * 2 * 64


def test_positions_outside_the_tables_give_nan(fresh_seed):
    """Only that token's rotated elements, as apply_rotary."""
    inputs = Inputs(3, 4, 2, 96, 32, torch.bfloat16)
    inputs.position_ids = torch.tensor([-1, 3, MAX_POS], device="cuda", dtype=torch.int32)
    q = inputs.run(norm=True, rotate=True)
    expected = inputs.in_sequence(norm=True, rotate=True)
    assert q[[0, 2], :, :32].isnan().all()
    assert torch.equal(q.nan_to_num(7), expected[0].nan_to_num(7))
    assert torch.equal(inputs.k[inputs.slots].nan_to_num(7), expected[1].nan_to_num(7))


def test_q_in_place(fresh_seed):
    """``out`` may be the q part of qkv; k and v of the matrix stay."""
    for tokens in (33, 4096):
        inputs = Inputs(tokens, 16, 8, 128, 128, torch.bfloat16)
        expected = inputs.run(norm=True, rotate=True)
        before = inputs.qkv.clone()
        q = inputs.heads()[0]
        inputs.run(norm=True, rotate=True, out=q)
        assert torch.equal(q, expected)
        assert torch.equal(inputs.qkv[:, 16 * 128 :], before[:, 16 * 128 :])


@pytest.mark.parametrize(("n_heads", "n_kv_heads", "head_dim", "norm"), [(24, 4, 64, False), (16, 8, 128, True)])
def test_reduction_contract(fresh_seed, n_heads, n_kv_heads, head_dim, norm):
    """A token's bits do not depend on how many came with it, which picks the kernel: 1 to 8,192 rows."""
    inputs = Inputs(8192, n_heads, n_kv_heads, head_dim, head_dim, torch.bfloat16)
    q = inputs.run(norm=norm, rotate=True)
    k = inputs.k.clone()
    slots, qkv, position_ids = inputs.slots, inputs.qkv, inputs.position_ids
    for tokens in (1, 2, 17, 128, 1000):
        part = slice(8192 - tokens, None)
        inputs.slots, inputs.qkv, inputs.position_ids = slots[part], qkv[part], position_ids[part]
        inputs.memory.fill_(torch.nan)
        assert torch.equal(inputs.run(norm=norm, rotate=True), q[part]), f"{tokens} tokens"
        assert torch.equal(inputs.k[inputs.slots], k[inputs.slots]), f"{tokens} tokens"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "tokens"), [(64, 5), (64, 18_000), (128, 9000), (80, 33), (256, 5), (100, 9)])
def test_fp8_pools(fresh_seed, dtype, head_dim, tokens):
    """Scale and bits as the twin makes them from the values that a wide pool gets."""
    inputs = Inputs(tokens, 4, 2, head_dim, head_dim, dtype)
    wide_q = inputs.run(norm=True, rotate=True)
    pools = torch.full((2, inputs.size, 2, head_dim), 0x7F, dtype=torch.uint8, device="cuda")
    narrow = pools.view(torch.float8_e4m3fn)
    scales = torch.full((2, inputs.size, 2), torch.nan, device="cuda")
    q = qkv_norm_rope_write(
        *(inputs.qkv, inputs.position_ids, inputs.cos, inputs.sin, *narrow, inputs.slots, 4, 2),
        q_norm=inputs.q_norm,
        k_norm=inputs.k_norm,
        eps=1e-5,
        k_scale=scales[0],
        v_scale=scales[1],
    )
    assert torch.equal(q, wide_q)
    for bits, scale, pool in zip(pools, scales, (inputs.k, inputs.v), strict=True):
        wide = pool[inputs.slots].float()
        expected = wide.abs().amax(-1) / torch.tensor(448.0, device="cuda")
        assert torch.equal(scale[inputs.slots], expected)
        twin = (wide * (1 / expected).unsqueeze(-1)).to(torch.float8_e4m3fn).view(torch.uint8)
        assert torch.equal(bits[inputs.slots], twin)
        untouched = torch.ones(inputs.size, dtype=torch.bool, device="cuda")
        untouched[inputs.slots] = False
        assert bits[untouched].eq(0x7F).all()
        assert scale[untouched].isnan().all()


def test_fp8_zero_heads(fresh_seed):
    inputs = Inputs(3, 1, 1, 64, 64, torch.bfloat16)
    inputs.qkv.zero_()
    pools = torch.zeros(2, inputs.size, 1, 64, device="cuda").to(torch.float8_e4m3fn)
    scales = torch.full((2, inputs.size, 1), torch.nan, device="cuda")
    qkv_norm_rope_write(
        *(inputs.qkv, None, None, None, *pools, inputs.slots, 1, 1), k_scale=scales[0], v_scale=scales[1]
    )
    assert scales[:, inputs.slots].eq(0).all()
    assert pools.float().eq(0).all()


def test_offsets_past_32_bits(fresh_seed):
    """Kernel rule "64-bit offsets": slots that start 2^30 elements apart, so past 2^31 and 2^32."""
    stride = 1 << 30
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free GPU memory")
    inputs = Inputs(5, 4, 2, 64, 64, torch.bfloat16)
    inputs.run(norm=True, rotate=True)
    near_k, near_v = inputs.k[inputs.slots], inputs.v[inputs.slots]
    far = [torch.empty(4 * stride + 128, dtype=torch.bfloat16, device="cuda") for _ in "kv"]
    inputs.k, inputs.v = (memory.as_strided((5, 2, 64), (stride, 64, 1)) for memory in far)
    inputs.slots = torch.arange(5, device="cuda")
    inputs.run(norm=True, rotate=True)
    assert torch.equal(inputs.k, near_k)
    assert torch.equal(inputs.v, near_v)


def test_empty_batch():
    """No launch, no error."""
    inputs = Inputs(0, 4, 2, 64, 64, torch.bfloat16)
    assert inputs.run(norm=True, rotate=True).shape == (0, 4, 64)
