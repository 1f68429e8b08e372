"""The twins of the fused ops and of sampling against functions of others and against first principles, on the CPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astrai_kernels import reference
from astrai_kernels._reference_sampling import kept_weights


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_qkv_is_the_ops_in_sequence(interleaved, dtype):
    """Norm, rotary and index_copy_, each by its own twin; unwritten slots stay."""
    qkv = torch.randn(6, (4 + 2 + 2) * 64).to(dtype)
    angles = torch.rand(32, 16)
    position_ids = torch.randint(0, 32, (6,))
    q_norm, k_norm = torch.randn(64).to(dtype), torch.randn(64).to(dtype)
    pools = [torch.full((9, 2, 64), torch.nan, dtype=dtype) for _ in range(2)]
    slots = torch.tensor([8, 0, -1, 3, 9, 4])
    got = reference.qkv_norm_rope_write(
        *(qkv, position_ids, angles.cos(), angles.sin(), *pools, slots, 4, 2),
        q_norm=q_norm,
        k_norm=k_norm,
        interleaved=interleaved,
    )
    heads = qkv.view(6, 8, 64)
    q, k = reference.rms_norm(heads[:, :4], q_norm), reference.rms_norm(heads[:, 4:6], k_norm)
    q, k = reference.apply_rotary(q, k, angles.cos(), angles.sin(), position_ids, interleaved=interleaved)
    written = [0, 1, 3, 5]
    assert torch.equal(got, q)
    assert torch.equal(pools[0][slots[written]], k[written])
    assert torch.equal(pools[1][slots[written]], heads[written, 6:])
    assert all(pool[[1, 2, 5, 6, 7]].isnan().all() for pool in pools), "a slot that no token owns was written"


def test_qkv_without_norm_or_rotation_splits_and_writes():
    qkv = torch.randn(3, 3 * 8)
    pools = [torch.zeros(4, 1, 8) for _ in range(2)]
    q = reference.qkv_norm_rope_write(qkv, None, None, None, *pools, torch.tensor([3, 1, 0], dtype=torch.int32), 1, 1)
    assert torch.equal(q, qkv[:, None, :8])
    assert torch.equal(pools[0][[3, 1, 0], 0], qkv[:, 8:16])
    assert torch.equal(pools[1][[3, 1, 0], 0], qkv[:, 16:])


def test_fp8_pools_hold_what_their_scales_undo():
    """scale = max|x| / 448 per token and head; four significant bits, so half a unit is a sixteenth."""
    qkv = torch.randn(5, 3 * 64)
    qkv[1, 64:] = 0
    pools = [torch.zeros(5, 1, 64, dtype=torch.float8_e4m3fn) for _ in range(2)]
    scales = [torch.full((5, 1), torch.nan) for _ in range(2)]
    slots = torch.arange(5)
    reference.qkv_norm_rope_write(*(qkv, None, None, None, *pools, slots, 1, 1), k_scale=scales[0], v_scale=scales[1])
    for pool, scale, wide in zip(pools, scales, (qkv[:, 64:128], qkv[:, 128:]), strict=True):
        assert torch.equal(scale[:, 0], wide.abs().amax(-1) / 448)
        narrow = pool[:, 0].float() * scale
        assert ((narrow - wide).abs() <= wide.abs() / 16 + scale / 512).all()
        assert narrow[1].eq(0).all()


@pytest.mark.parametrize(
    ("kind", "activation"),
    [
        ("silu", torch.nn.SiLU()),
        ("gelu_tanh", torch.nn.GELU(approximate="tanh")),
        ("gelu", torch.nn.GELU()),
    ],
)
def test_gated_activation_rounds_twice(kind, activation):
    """``act(gate) * up`` in bf16: the activation is rounded before the product, as in Hugging Face's MLPs."""
    x = torch.randn(64, 2 * 96).bfloat16()
    gate, up = x[:, :96], x[:, 96:]
    got = reference.gated_activation(x, kind)
    # In bf16: an erf in fp32, rounded afterwards, is now and then a unit off.
    assert torch.equal(got, (activation(gate).float() * up.float()).bfloat16())
    assert not torch.equal(got, (activation(gate.float()) * up.float()).bfloat16())


def test_embedding_matches_torch_and_marks_unknown_ids():
    table = torch.randn(11, 8)
    ids = torch.tensor([3, 11, 0, -1, 10], dtype=torch.int32)
    got = reference.embedding(ids, table)
    assert torch.equal(got[[0, 2, 4]], torch.nn.functional.embedding(ids[[0, 2, 4]].long(), table))
    assert got[[1, 3]].isnan().all()


def test_argmax_takes_the_smallest_id_and_nan_first():
    inf, nan = torch.inf, torch.nan
    rows = torch.tensor([[1, 3, 3.0], [nan, 5, nan], [-inf, -inf, -inf], [-0.0, 0.0, -1], [1, inf, nan]])
    assert reference.argmax(rows).tolist() == [1, 0, 0, 0, 2]
    assert reference.argmax(rows)[:3].tolist() == rows[:3].argmax(-1).tolist()


def softmax_after_filters(row: torch.Tensor, temperature: float, k: int, p: float, m: float) -> torch.Tensor:
    """The distribution by the processors' definitions, one token at a time."""
    probs = (row.double() / temperature).softmax(-1)
    order = sorted(range(len(row)), key=lambda i: (-float(row[i]), i))[: k if k > 0 else None]
    probs /= probs[order].sum()
    kept, before = [], 0.0
    for i in order:
        if not kept or (before < p or p >= 1):
            kept.append(i)
        before += float(probs[i])
    kept = [i for i in kept if i == order[0] or probs[i] >= m * probs[order[0]]]
    result = torch.zeros_like(probs)
    result[kept] = probs[kept] / probs[kept].sum()
    return result


@given(
    vocab=st.integers(1, 40),
    seed=st.integers(0, 2**31),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    k=st.integers(0, 45),
    p=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    m=st.sampled_from([0.0, 0.05, 0.6, 1.0]),
)
@settings(max_examples=60, deadline=None)
def test_kept_weights_are_the_filtered_softmax(vocab, seed, temperature, k, p, m):
    """Temperature, then top-k, then top-p of what is left, then min-p; coarse scores, so that ties occur."""
    row = torch.randint(-6, 7, (vocab,), generator=torch.Generator().manual_seed(seed)) * 0.37
    one = torch.ones(1)
    weights, ids = kept_weights(row[None], one * temperature, torch.tensor([k]), one * p, one * m)
    got = torch.zeros(vocab, dtype=torch.float64).scatter(0, ids[0], weights[0] / weights[0].sum())
    torch.testing.assert_close(got, softmax_after_filters(row, temperature, k, p, m), rtol=1e-6, atol=1e-9)


def test_uniform_is_split_mix():
    """Against SplitMix64 in Python's integers, and equal on equal keys only."""

    def mix(x: int) -> int:
        mask = (1 << 64) - 1
        x = (x + 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    seeds, positions = [0, 1, -5, 2**62, 7], [0, 12, 3, 2**40, 7]
    got = reference.uniform(torch.tensor(seeds), torch.tensor(positions))
    expected = [(mix((s % 2**64) ^ mix(p + 1)) >> 11) * 2.0**-53 for s, p in zip(seeds, positions, strict=True)]
    assert got.tolist() == expected
    assert len(set(expected)) == len(expected)


def test_sample_follows_its_distribution_and_greedy_rows_do_not_draw():
    """Chi-square of 20,000 draws of one row against the filtered softmax: 99.99 % quantile for 11 degrees is 37.4."""
    row = torch.linspace(-2, 1, 30)
    n = 20_000
    logits = row.expand(n, 30)
    params = [torch.full((n,), value) for value in (0.8, 0.95, 0.0)]
    top_k = torch.full((n,), 12)
    seed, position = torch.full((n,), 3), torch.arange(n)
    ids = reference.sample(logits, params[0], top_k, params[1], params[2], seed, position)
    expected = softmax_after_filters(row, 0.8, 12, 0.95, 0.0) * n
    counts = torch.bincount(ids, minlength=30).double()
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    assert ((counts - expected)[kept] ** 2 / expected[kept]).sum() < 37.4
    greedy = reference.sample(logits, torch.zeros(n), top_k, None, None, seed, position)
    assert greedy.eq(29).all()


def test_sample_penalties():
    """Repetition before presence and frequency; a row of infinite scores gives its argmax."""
    logits = torch.tensor([[2.0, -1.0, 0.5], [1.0, torch.inf, 0.0]])
    one = torch.ones(2)
    counts = torch.tensor([[2, 0, 0], [0, 0, 0]], dtype=torch.int32)
    seen = torch.tensor([[True, True, False], [False, False, False]])
    scores = reference.apply_penalties(logits, one * 0.25, one * 0.125, one * 2, counts, seen)
    assert torch.equal(scores[0], torch.tensor([2 / 2 - 0.25 - 2 * 0.125, -2.0, 0.5]))
    ids = reference.sample(
        *(logits, one, None, None, None, one.long(), one.long()), penalties=(one, one, one * 2, counts, seen)
    )
    assert ids[1] == 1
