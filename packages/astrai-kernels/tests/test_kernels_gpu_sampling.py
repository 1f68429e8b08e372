"""argmax and sample on a GPU: the twin's tokens, the distribution, the contract, ties, penalties."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from astrai_kernels import argmax, reference, sample
from astrai_kernels._reference_sampling import kept_weights

pytestmark = [pytest.mark.gpu, pytest.mark.kernel]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# (temperature, top_k, top_p, min_p): each filter alone and together, listed candidates and whole rows.
WISHES = [
    (1.0, 0, 1.0, 0.0),
    (0.0, 50, 0.9, 0.0),
    (0.7, 50, 0.9, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (1.5, 0, 1.0, 0.05),
    (1.0, 300, 0.95, 0.02),
    (0.8, 5000, 0.97, 0.0),
    (1.0, 0, 0.0, 0.0),
    (1.0, 1 << 40, 1.0, 0.0),
    (2.0, 512, 1.0, 0.0),
    (1.0, 0, 0.5, 0.3),
    (1.0, 64, 1.0, 1.0),
    (3.0, 0, 0.99, 0.0),
]


def wishes(rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    chosen = [WISHES[row % len(WISHES)] for row in range(rows)]
    temperature, top_p, min_p = (torch.tensor([w[i] for w in chosen], device="cuda") for i in (0, 2, 3))
    return temperature, torch.tensor([w[1] for w in chosen], device="cuda"), top_p, min_p


def keys(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randint(-(2**62), 2**62, (rows,), device="cuda"), torch.randint(0, 2**20, (rows,), device="cuda")


def assert_drawn(ids: Tensor, scores: Tensor, filters: tuple[Tensor, ...], seed: Tensor, position: Tensor) -> None:
    """Each token is the twin's, or one whose boundary u missed by less than rounding; nothing excluded is drawn."""
    twin = reference.sample(scores, *filters, seed, position)
    differ = (ids != twin).nonzero().squeeze(1)
    assert len(differ) <= max(1, len(ids) // 20), f"{len(differ)} of {len(ids)} tokens differ"
    for row in differ.tolist():
        temperature, top_k, top_p, min_p = (value[row : row + 1] for value in filters)
        weights, order = kept_weights(scores[row : row + 1], temperature, top_k, top_p, min_p)
        weights, order = weights[0], order[0]
        u = reference.uniform(seed[row : row + 1], position[row : row + 1]).item()
        cumulative = weights.cumsum(0) / weights.sum()
        column = (order == ids[row]).nonzero().item()
        begin, end = (cumulative[column] - weights[column] / weights.sum()).item(), cumulative[column].item()
        assert begin - 5e-5 <= u <= end + 5e-5, f"row {row}: u {u} outside [{begin}, {end}]"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 7, 1000, 4104, 50257, 151936])
def test_argmax(fresh_seed, dtype, vocab):
    """bf16 rows are full of ties: the smallest id, as the twin says, for one row on a cluster or a block a row."""
    for rows in (1, 5, 20, 40, 150):
        logits = torch.randn(rows, vocab + 8, device="cuda").to(dtype)[:, :vocab]
        out = torch.full((2 * rows,), -1, device="cuda")[::2]
        assert argmax(logits, out=out) is out
        assert torch.equal(out, reference.argmax(logits))
        assert torch.equal(argmax(logits), out)
        assert torch.equal(logits.gather(1, out[:, None]).squeeze(1), logits.amax(1))


def test_argmax_of_special_values():
    inf, nan = torch.inf, torch.nan
    rows = [[1, 3, 3.0], [nan, 5, nan], [-inf, -inf, -inf], [-0.0, 0.0, -1], [1, inf, nan], [2, inf, inf]]
    logits = torch.tensor(rows, device="cuda")
    assert argmax(logits).tolist() == [1, 0, 0, 0, 2, 1]
    assert argmax(-logits[:2]).tolist() == [0, 0], "a NaN with its sign set is a NaN"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [0.5, 3.0])
@pytest.mark.parametrize("vocab", [1, 7, 1000, 4104, 50257, 151936])
def test_sample_draws_the_twins_tokens(fresh_seed, dtype, spread, vocab):
    """Row by row the twin's token, whichever path the kernel takes."""
    for rows in (len(WISHES), 10 * len(WISHES)):
        logits = (torch.randn(rows, vocab + 8, device="cuda") * spread).to(dtype)[:, :vocab]
        filters, (seed, position) = wishes(rows), keys(rows)
        out = torch.full((rows,), -1, device="cuda")
        assert sample(logits, *filters, seed, position, out=out) is out
        assert_drawn(out, logits.float(), filters, seed, position)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [5001, 32768])
def test_penalties(fresh_seed, dtype, vocab):
    """Penalised scores have the twin's bits: equal argmax, and draws from them."""
    rows = 4 * len(WISHES)
    logits = (torch.randn(rows, vocab, device="cuda") * 2).to(dtype)
    numbers = torch.rand(rows, 6, device="cuda")
    presence, frequency, repetition = (numbers[:, i : i + 1] for i in (3, 4, 5))
    repetition = repetition + 1
    counts = torch.randint(0, 4, (rows, vocab), device="cuda", dtype=torch.int32) * (
        torch.rand_like(logits.float()) < 0.3
    )
    counts = counts.int()
    seen = (counts > 0) | (torch.rand(rows, vocab, device="cuda") < 0.1)
    penalties = (presence, frequency, repetition, counts, seen)
    scores = reference.apply_penalties(logits.float(), *penalties)
    filters, (seed, position) = wishes(rows), keys(rows)
    assert_drawn(sample(logits, *filters, seed, position, penalties=penalties), scores, filters, seed, position)
    greedy = sample(logits, torch.zeros(rows, device="cuda"), None, None, None, seed, position, penalties=penalties)
    assert torch.equal(greedy, reference.argmax(scores))


@pytest.mark.parametrize(
    ("wish", "vocab"), [((0.8, 12, 0.95, 0.0), 4096), ((1.0, 0, 1.0, 0.0), 40), ((1.2, 0, 0.9, 0.02), 32768)]
)
def test_the_distribution(fresh_seed, wish, vocab):
    """Chi-square of 200,000 draws against the filtered softmax, rare tokens pooled; the 1 - 1e-6 quantile."""
    n, columns = 200_000, 2_000
    row = torch.randn(1, vocab, device="cuda") * 2.5
    temperature, top_k, top_p, min_p = (torch.tensor([value], device="cuda") for value in wish)
    weights, order = kept_weights(row, temperature, top_k, top_p, min_p)
    probs = torch.zeros(vocab, dtype=torch.float64, device="cuda").scatter(0, order[0], weights[0] / weights.sum())
    counts = torch.zeros(vocab, device="cuda", dtype=torch.float64)
    for start in range(0, n, columns):
        position = torch.arange(start, start + columns, device="cuda")
        filters = (value.expand(columns) for value in (temperature, top_k, top_p, min_p))
        seed = torch.full((columns,), fresh_seed % 2**62, device="cuda")
        counts += torch.bincount(sample(row.expand(columns, -1), *filters, seed, position), minlength=vocab)
    assert counts[probs == 0].sum() == 0, "an excluded token was drawn"
    common = probs * n >= 10
    observed = torch.cat((counts[common], counts[~common].sum()[None]))
    expected = torch.cat((probs[common], probs[~common].sum()[None])) * n
    observed, expected = observed[expected > 0], expected[expected > 0]
    chi_square = ((observed - expected) ** 2 / expected).sum().item()
    degrees = len(expected) - 1
    # Wilson & Hilferty 1931: the cube root of chi^2 / degrees is nearly normal; 4.753 is the normal quantile.
    limit = degrees * (1 - 2 / (9 * degrees) + 4.753 * (2 / (9 * degrees)) ** 0.5) ** 3
    assert chi_square <= limit, f"chi-square {chi_square:.1f} of {degrees} degrees, limit {limit:.1f}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [50257, 151936])
def test_reduction_contract(fresh_seed, dtype, vocab):
    """A row's token does not depend on the other rows, which decide how many blocks share it, nor on alignment."""
    rows = 140
    logits = (torch.randn(rows, vocab, device="cuda") * 2).to(dtype)
    filters, (seed, position) = wishes(rows), keys(rows)
    full = sample(logits, *filters, seed, position)
    assert torch.equal(sample(logits, *filters, seed, position), full), "two runs differ"
    for n in (1, 2, 14, 16, 30, 60, 100):
        part = slice(rows - n, None)
        got = sample(logits[part], *(value[part] for value in filters), seed[part], position[part])
        assert torch.equal(got, full[part]), f"{n} rows"
    shifted = torch.empty(rows, vocab + 1, dtype=dtype, device="cuda")[:, 1:]
    shifted.copy_(logits)
    assert torch.equal(sample(shifted, *filters, seed, position), full), "the unaligned kernel differs"


def test_ties_are_broken_by_id(fresh_seed):
    """All scores equal: top-k keeps the first k ids, top-p the first of the mass; every path agrees."""
    for vocab in (100, 20_000):
        logits = torch.full((400, vocab), 1.5, dtype=torch.bfloat16, device="cuda")
        ones, (seed, position) = torch.ones(400, device="cuda"), keys(400)
        top_k = torch.full((400,), 7, device="cuda")
        assert sample(logits, ones, top_k, None, None, seed, position).unique().tolist() == list(range(7))
        kept = sample(logits, ones, None, ones * 0.25, None, seed, position)
        assert kept.max() < vocab // 4
        assert kept.max() > vocab // 5
        assert sample(logits, ones, None, None, ones, seed, position).max() > vocab // 2


def test_rows_without_a_distribution_give_their_argmax(fresh_seed):
    inf, nan = torch.inf, torch.nan
    logits = torch.tensor([[0.0, inf, inf], [0.0, nan, 1.0], [-inf, -inf, -inf], [-inf, 2.0, -inf]], device="cuda")
    ones, (seed, position) = torch.ones(4, device="cuda"), keys(4)
    assert sample(logits, ones, None, None, None, seed, position).tolist() == [1, 1, 0, 1]
    assert sample(logits, ones, None, ones * 0.5, None, seed, position).tolist() == [1, 1, 0, 1]


def test_cuda_graph_replays_on_new_inputs(fresh_seed):
    """No allocation of our own, no sync, no host read: a captured draw follows its buffers."""
    rows, vocab = 14, 151936
    logits, filters = torch.randn(rows, vocab, device="cuda").bfloat16(), wishes(rows)
    seed, position = keys(rows)
    out, best = (torch.zeros(rows, dtype=torch.int64, device="cuda") for _ in range(2))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        sample(logits, *filters, seed, position, out=out)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        argmax(logits, out=best)
        sample(logits, *filters, seed, position, out=out)
    for _ in range(3):
        logits.copy_(torch.randn(rows, vocab, device="cuda") * 3)
        position.add_(1)
        out.fill_(-1)
        best.fill_(-1)
        graph.replay()
        assert torch.equal(best, reference.argmax(logits))
        assert torch.equal(out, sample(logits, *filters, seed, position))


def test_offsets_past_32_bits(fresh_seed):
    """Kernel rule "64-bit offsets": rows that start 2^30 elements apart, so past 2^31 and 2^32."""
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB of free GPU memory")
    far = torch.empty(4 * (1 << 30) + 5000, dtype=torch.bfloat16, device="cuda").as_strided((5, 5000), (1 << 30, 1))
    near = torch.randn(5, 5000, device="cuda").bfloat16()
    far.copy_(near)
    assert torch.equal(argmax(far), argmax(near))


def test_empty_batches():
    """No launch, no error."""
    logits = torch.empty(0, 100, device="cuda")
    none = torch.empty(0, device="cuda")
    assert argmax(logits).shape == (0,)
    assert sample(logits, none, None, None, None, none.long(), none.long()).shape == (0,)
