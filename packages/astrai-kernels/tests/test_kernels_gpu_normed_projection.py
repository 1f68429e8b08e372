"""A norm in halves on a GPU: what is around it against a norm by itself, for every kernel of linear, and the embedding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from astrai_kernels import embedding, embedding_before_norm, linear, linear_after_norm, linear_before_norm, reference

pytestmark = [pytest.mark.gpu, pytest.mark.kernel]

# Each kernel (1-8, 9-16, 17-32, 33-64, 65-128 rows), full and not.
ROWS = [1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 64, 65, 100, 128]
# in_features of the first, features between, out_features of the second: those of Qwen3 0.6B, a 1.2B model, Llama 3.2 1B and
# SmolLM2 135M; the fewest features that there can be; more than a team reads at once.
SHAPES = [
    (2048, 1024, 3072),
    (1536, 1536, 6912),
    (6912, 1536, 2048),
    (8192, 2048, 3072),
    (576, 576, 960),
    (8, 64, 7),
    (520, 4160, 1100),
]
EPS = 1e-6


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float32, device="cuda").bfloat16()


def weights(features: int, depth: int) -> Tensor:
    return (torch.randn(features, depth, device="cuda") / depth**0.5).bfloat16()


@pytest.mark.parametrize("extras", ["none", "bias", "residual", "bias and residual"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_first_half(fresh_seed, obeys_rule, shape, extras):
    """The stream has linear's bits, where these are promised; it times the weights is rounded once; the squares are those of
    the rounded stream."""
    depth, hidden, _ = shape
    w, norm = weights(hidden, depth), randn(hidden)
    for rows in ROWS:
        x = randn(rows, depth)
        found = {
            "bias": randn(hidden) if "bias" in extras else None,
            "residual": randn(rows, hidden) if "residual" in extras else None,
        }
        out, weighed, squares = linear_before_norm(x, w, norm, **found)
        if rows <= 16:
            assert torch.equal(out, linear(x, w, **found)), rows
        else:
            wide = {name: None if tensor is None else tensor.float() for name, tensor in found.items()}
            obeys_rule(out, reference.linear(x.float(), w.float(), **wide), reference.linear(x, w, **found))
        assert torch.equal(weighed, (out.float() * norm.float()).bfloat16()), rows
        expected = out.double().square().view(rows, hidden // 16, 16).sum(-1)
        torch.testing.assert_close(squares.double(), expected, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("activation", [None, "swiglu"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_halves_obey_the_rule(fresh_seed, obeys_rule, shape, activation):
    """Correctness rule, against a norm and a product in fp32 of the same stream."""
    _, hidden, features = shape
    w, norm = weights(features * (2 if activation else 1), hidden), 1 + 0.1 * randn(hidden)
    for rows in ROWS:
        stream = 3 * randn(rows, hidden)
        identity = torch.eye(hidden, device="cuda").bfloat16()
        _, weighed, squares = linear_before_norm(stream, identity, norm)
        bias = None if activation else randn(features)
        found = linear_after_norm(weighed, squares, w, eps=EPS, bias=bias, activation=activation)
        wide = None if bias is None else bias.float()
        normed = reference.rms_norm(stream.float(), norm.float(), EPS)
        exact = reference.linear(normed, w.float(), bias=wide, activation=activation)
        plain = reference.linear(reference.rms_norm(stream, norm, EPS), w, bias=bias, activation=activation)
        obeys_rule(found, exact, plain)


def test_a_row_does_not_depend_on_the_others(fresh_seed):
    """Bit by bit among the row counts of one kernel; what other rows hold leaves no trace, not even NaN."""
    norm, first, second = randn(1536), weights(1536, 2048), weights(2048, 1536)
    for counts in ((1, 3, 8), (9, 16), (18, 32), (33, 40, 64), (65, 128)):
        x, residual = randn(counts[-1], 2048), randn(counts[-1], 1536)
        seen = []
        for rows in counts:
            part = x[:rows].clone()
            part[1:] = torch.nan
            _, weighed, squares = linear_before_norm(part, first, norm, residual=residual[:rows])
            seen.append(linear_after_norm(weighed, squares, second, eps=EPS)[0])
        assert all(torch.equal(row, seen[0]) for row in seen[1:])


# Where the kernels of a fixed order change: beside those above more than a tile of 128 rows, and several in turn.
FIXED_ROWS = [*range(1, 301), 511, 1100]


@pytest.mark.parametrize(
    "shape",
    [
        *SHAPES,
        (1536, 5120, 72),  # more tiles of 64 than clusters of two that run at once
        (640, 8512, 128),  # more tiles of 64 than there are multiprocessors
        (640, 192, 20000),  # several tiles of 128 for each block
    ],
    ids=str,
)
def test_fixed_order(fresh_seed, shape):
    """Reduction contract: with ``fixed_order`` a row's bits depend on that row and the weights alone, in the stream,
    weighed, in its squares and behind the second half, whatever the number of rows and whoever is beside it."""
    depth, hidden, features = shape
    most = max(FIXED_ROWS)
    first, norm, bias = weights(hidden, depth), randn(hidden), randn(hidden)
    plain, gated = weights(features, hidden), weights(2 * features, hidden)
    x, residual = randn(most, depth), randn(most, hidden)

    def run(part: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        out, weighed, squares = linear_before_norm(
            part, first, norm, bias=bias, residual=residual[rows], fixed_order=True
        )
        after = [
            linear_after_norm(weighed, squares, plain, eps=EPS, bias=bias_of_plain, fixed_order=True),
            linear_after_norm(weighed, squares, gated, eps=EPS, activation="swiglu", fixed_order=True),
        ]
        return out, weighed, squares, *after

    bias_of_plain = randn(features)
    every = torch.arange(most, device="cuda")
    expected = run(x, every)
    exact = linear(x, first, bias=bias, residual=residual, fixed_order=True)
    assert torch.equal(expected[0], exact), "the stream has linear's bits"
    assert torch.equal(expected[1], (exact.float() * norm.float()).bfloat16())
    names = ("stream", "weighed", "squares", "second half", "second half with swiglu")
    for rows in FIXED_ROWS:
        start = int(torch.randint(0, most + 1 - rows, ()))
        part = every[start : start + rows]
        for name, found, wanted in zip(names, run(x[part], part), expected, strict=True):
            assert torch.equal(found, wanted[part]), f"{name} of {rows} rows from {start}"
    other = x.clone()
    other[1:] = torch.nan
    for name, found, wanted in zip(names, run(other, every), expected, strict=True):
        assert torch.equal(found[0], wanted[0]), f"{name}: a row sees another"


@pytest.mark.parametrize("activation", [None, "swiglu"])
def test_many_rows_in_a_fixed_order_obey_the_rule(fresh_seed, obeys_rule, activation):
    """Correctness rule above 128 rows, against a norm and a product in fp32 of the same stream."""
    for depth, hidden, features in SHAPES:
        x, first, norm = randn(333, depth), weights(hidden, depth), 1 + 0.1 * randn(hidden)
        w = weights(features * (2 if activation else 1), hidden)
        stream, weighed, squares = linear_before_norm(x, first, norm, fixed_order=True)
        expected = stream.double().square().view(333, hidden // 16, 16).sum(-1)
        torch.testing.assert_close(squares.double(), expected, rtol=1e-6, atol=0.0)
        found = linear_after_norm(weighed, squares, w, eps=EPS, activation=activation, fixed_order=True)
        exact = reference.linear(
            reference.rms_norm(stream.float(), norm.float(), EPS), w.float(), activation=activation
        )
        obeys_rule(found, exact, reference.linear(reference.rms_norm(stream, norm, EPS), w, activation=activation))


@pytest.mark.parametrize("hidden", [64, 576, 1024, 2048, 4160])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_the_embedding_begins_a_norm(fresh_seed, hidden, ids_dtype):
    """The rows are the table's, their halves have the bits that a projection gives such rows, an unknown id gives NaN."""
    table, norm = randn(97, hidden + 64)[:, 64:], randn(hidden)
    identity = torch.eye(hidden, device="cuda").bfloat16()
    for rows in (1, 3, 128, 5000):  # the last: several octets a thread
        ids = torch.randint(97, (rows,), device="cuda", dtype=ids_dtype)
        found = embedding_before_norm(ids, table, norm)
        assert torch.equal(found[0], table[ids.long()]) and torch.equal(found[0], embedding(ids, table))
        expected = linear_before_norm(found[0][:128], identity, norm)
        assert all(torch.equal(mine[:128], other) for mine, other in zip(found, expected, strict=True))
        assert torch.equal(found[1], (found[0].float() * norm.float()).bfloat16())
        exact = found[0].double().square().view(rows, hidden // 16, 16).sum(-1)
        torch.testing.assert_close(found[2].double(), exact, rtol=1e-6, atol=0.0)
    ids = torch.tensor([1, 97, -1], device="cuda", dtype=ids_dtype)
    assert [all(part[i].isnan().all() for part in embedding_before_norm(ids, table, norm)) for i in range(3)] == [
        False,
        True,
        True,
    ]
    assert [tuple(part.shape) for part in embedding_before_norm(ids[:0], table, norm)] == [
        (0, hidden),
        (0, hidden),
        (0, hidden // 16),
    ]


def test_large_streams_do_not_overflow(fresh_seed, obeys_rule):
    """A stream of 1e4 and weights of 1e3: their products are far beyond what the result is."""
    stream, w = 1e4 * randn(8, 1024), weights(512, 1024)
    norm = 1e3 * randn(1024)
    _, weighed, squares = linear_before_norm(stream, torch.eye(1024, device="cuda").bfloat16(), norm)
    exact = reference.linear(reference.rms_norm(stream.float(), norm.float(), EPS), w.float())
    plain = reference.linear(reference.rms_norm(stream, norm, EPS), w)
    obeys_rule(linear_after_norm(weighed, squares, w, eps=EPS), exact, plain)


def test_opcheck(fresh_seed):
    """torch.library.opcheck passes."""
    x, w, norm = randn(5, 128), weights(64, 128), randn(64)
    torch.library.opcheck(torch.ops.astrai.linear_before_norm.default, (x, w, norm, None, randn(5, 64)))
    _, weighed, squares = linear_before_norm(x, w, norm)
    torch.library.opcheck(
        torch.ops.astrai.linear_after_norm.default, (weighed, squares, weights(24, 64), None, True, 1e-6)
    )
    ids = torch.tensor([1, 5, 1], device="cuda")
    torch.library.opcheck(torch.ops.astrai.embedding_before_norm.default, (ids, randn(7, 64), norm))
    many = randn(130, 128), w, norm, None, None, True
    torch.library.opcheck(torch.ops.astrai.linear_before_norm.default, many)
    _, weighed, squares = linear_before_norm(many[0], w, norm, fixed_order=True)
    torch.library.opcheck(
        torch.ops.astrai.linear_after_norm.default, (weighed, squares, weights(24, 64), None, True, 1e-6, True)
    )
