"""linear on a GPU: the correctness rule, the reduction contract, epilogues, views, offsets."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from astrai_kernels import linear, reference, rms_norm

pytestmark = [pytest.mark.gpu, pytest.mark.kernel]

DTYPES = [torch.float16, torch.bfloat16]
EPILOGUES = ["none", "bias", "residual", "bias and residual", "swiglu", "norm", "norm and swiglu"]
# Each kernel (1-8, 9-16, 17-32, 33-64, 65-128, more rows), full and not; more than one and more than eight tiles of rows.
ROWS = [1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 300, 1100]
# One feature or many; less than a stage of K, tails of 8 to 56 elements, 1, 2, 4 and 8 slices.
SHAPES = [(1, 8), (7, 24), (100, 136), (260, 520), (520, 1096), (1536, 1536), (1000, 4168), (13000, 328)]


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, dtype=torch.float32, device="cuda").to(dtype)


def weights(features: int, depth: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(features, depth, device="cuda") / depth**0.5).to(dtype)


def poisoned(rows: int, width: int, dtype: torch.dtype, gap: int = 8) -> tuple[Tensor, Tensor]:
    """Return NaN-filled memory and a view of rows in it, each followed by ``gap`` elements that nobody may write."""
    memory = torch.full((rows + 2, width + gap), torch.nan, dtype=dtype, device="cuda")
    return memory, memory[1:-1, :width]


def keywords(epilogue: str, rows: int, features: int, depth: int, dtype: torch.dtype) -> dict[str, object]:
    found: dict[str, object] = {}
    if "bias" in epilogue:
        found["bias"] = randn(features, dtype=dtype)
    if "residual" in epilogue:
        found["residual"] = randn(rows, features, dtype=dtype)
    if "swiglu" in epilogue:
        found["activation"] = "swiglu"
    if "norm" in epilogue:
        found.update(norm_weight=randn(depth, dtype=dtype), norm_eps=1e-5)
    return found


def widened(arguments: dict[str, object]) -> dict[str, object]:
    return {name: value.float() if isinstance(value, Tensor) else value for name, value in arguments.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_obeys_the_rule(fresh_seed, obeys_rule, dtype, epilogue, shape):
    """x and out are views with poisoned gaps; nothing is written outside the rows."""
    features, depth = shape
    w = weights(2 * features if "swiglu" in epilogue else features, depth, dtype)
    for rows in ROWS:
        if "norm" in epilogue and (rows > 8 or rows * depth > 32768):
            continue
        x = poisoned(rows, depth, dtype)[1]
        x.copy_(randn(rows, depth, dtype=dtype))
        arguments = keywords(epilogue, rows, features, depth, dtype)
        memory, out = poisoned(rows, features, dtype, gap=3)
        assert linear(x, w, out=out, **arguments) is out
        if "norm" in epilogue:  # bitwise rms_norm's, below: the rule is about what follows its rounding
            x = rms_norm(x, arguments.pop("norm_weight"), arguments.pop("norm_eps"))
        exact = reference.linear(x.float(), w.float(), **widened(arguments))
        obeys_rule(out, exact, reference.linear(x, w, **arguments))
        assert memory.isnan().sum() == memory.numel() - rows * features, "written outside the rows"
        assert torch.equal(linear(x, w, **arguments), out), "with and without out= differ"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("epilogue", ["none", "bias and residual", "swiglu"])
@pytest.mark.parametrize(
    "shape", [(520, 1096), (1029, 1544), (1536, 1536), (2048, 8192), (6912, 1536), (13000, 328), (52000, 136)], ids=str
)
def test_reduction_contract(fresh_seed, dtype, epilogue, shape):
    """Row i's bits depend on row i and the weight alone: every number of rows from 1 to 128, up to 8,192, any order.

    Up to 16 rows this holds without ``fixed_order`` too.
    """
    features, depth = shape
    most = 8192 if features < 4096 else 600
    w = weights(2 * features if epilogue == "swiglu" else features, depth, dtype)
    x = randn(most, depth, dtype=dtype)
    arguments = keywords(epilogue, most, features, depth, dtype)

    def run(rows: Tensor, fixed_order: bool = True) -> Tensor:
        own = {**arguments}
        if "residual" in own:
            own["residual"] = own["residual"][rows]
        return linear(x[rows], w, fixed_order=fixed_order, **own)

    every = torch.arange(most, device="cuda")
    expected = run(every)
    for rows in [*range(1, 130), 255, 256, 257, 511, 599, *((1025, 4097, 8191) if most > 600 else ())]:
        start = int(torch.randint(0, most + 1 - rows, ()))
        part = every[start : start + rows]
        assert torch.equal(run(part), expected[part]), f"{rows} rows from {start}"
        if rows <= 16:
            assert torch.equal(run(part, fixed_order=False), expected[part]), f"{rows} rows, no fixed order"
    order = torch.randperm(most, device="cuda")
    assert torch.equal(run(order), expected[order])
    other = x.clone()
    other[1:] = torch.nan
    assert torch.equal(linear(other, w, fixed_order=True, **arguments)[0], expected[0]), "a row sees another"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("epilogue", ["none", "bias and residual", "swiglu"])
@pytest.mark.parametrize(
    "shape",
    [
        (7, 1024),  # fewer features than a tile; warps without one
        (1029, 1536),  # requests of three steps, a tile each
        (6912, 1536),  # several tiles: rows are kept
        (72, 896),  # requests of two steps, four slices, a last one that is shorter
        (1536, 6912),  # a ring that goes round
        (9000, 1024),
        (3072, 2048),
        (6144, 4096),  # 16 rows are too long to be kept
    ],
    ids=str,
)
def test_few_rows_have_the_bits_of_many(fresh_seed, dtype, epilogue, shape):
    """Each instance for whole steps of K (on Hopper those of the copy engine), against 40 rows in a fixed order.

    x and out are views with poisoned gaps, a row's stride included; nothing is written outside the rows.
    """
    features, depth = shape
    if epilogue == "swiglu" and features % 8:
        features += 8 - features % 8
    w = weights(2 * features if epilogue == "swiglu" else features, depth, dtype)
    x = poisoned(40, depth, dtype)[1]
    x.copy_(randn(40, depth, dtype=dtype))
    arguments = keywords(epilogue, 40, features, depth, dtype)
    expected = linear(x, w, fixed_order=True, **arguments)
    for rows in range(1, 17):
        own = {**arguments}
        if "residual" in own:
            own["residual"] = own["residual"][:rows]
        memory, out = poisoned(rows, features, dtype, gap=3)
        linear(x[:rows], w, out=out, **own)
        assert torch.equal(out, expected[:rows]), f"{rows} rows"
        assert memory.isnan().sum() == memory.numel() - rows * features, "written outside the rows"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [64, 128, 136, 256, 576, 1536, 2048, 4096, 16384])
def test_norm_first_is_rms_norm_bit_by_bit(fresh_seed, dtype, depth):
    w, norm = weights(264, depth, dtype), randn(depth, dtype=dtype)
    for rows in (1, 2):
        x = randn(rows, depth, dtype=dtype)
        fused = linear(x, w, norm_weight=norm, norm_eps=1e-5)
        assert torch.equal(fused, linear(rms_norm(x, norm, 1e-5), w))


@pytest.mark.parametrize("rows", [1, 8, 33, 128, 300])
def test_in_place_over_the_residual(fresh_seed, rows):
    x, w, residual = randn(rows, 1536), weights(1000, 1536), randn(rows, 1000)
    expected = linear(x, w, residual=residual)
    assert torch.equal(expected, linear(x, w) + residual), "the product is rounded before the residual is added"
    assert linear(x, w, residual=residual, out=residual) is residual
    assert torch.equal(residual, expected)


@pytest.mark.parametrize("rows", [3, 40, 200])
def test_views_and_leading_dimensions(fresh_seed, rows):
    """x as part of a wider tensor, the weight as rows of a fused one, out as columns of another."""
    wide, fused = randn(rows, 3 * 512), weights(1024, 512)
    x, w = wide[:, 512:1024], fused[256:896]
    target = torch.full((rows, 700), torch.nan, dtype=torch.bfloat16, device="cuda")
    linear(x, w, out=target[:, 5:645])
    assert torch.equal(target[:, 5:645], linear(x.contiguous(), w.contiguous()))
    assert target[:, :5].isnan().all()
    assert target[:, 645:].isnan().all()
    assert torch.equal(linear(x.contiguous().view(1, rows, 1, 512), w)[0, :, 0], linear(x, w))
    assert torch.equal(linear(x[0], w), linear(x, w)[0])


@pytest.mark.parametrize("rows", [2, 20, 200])
def test_offsets_past_32_bits(fresh_seed, rows):
    """Kernel rule "64-bit offsets": rows of x, out, residual and of a weight of 4.3 G elements."""
    if torch.cuda.mem_get_info()[0] < 50 << 30:
        pytest.skip("needs 50 GiB of free GPU memory")
    stride = (1 << 32) // rows // 8 * 8 + 8
    memory = torch.empty((rows - 1) * stride + 2048, dtype=torch.bfloat16, device="cuda")
    x, out = (memory[begin:].as_strided((rows, 512), (stride, 1)) for begin in (0, 1024))
    x.copy_(randn(rows, 512))
    w = weights(512, 512)
    expected = linear(x.contiguous(), w)
    linear(x, w, out=out)
    assert torch.equal(out, expected)
    linear(x, w, residual=out, out=out)
    assert torch.equal(out, expected + expected)
    far = torch.empty((1 << 32) + (1 << 20), dtype=torch.bfloat16, device="cuda").view(-1, 512)
    far[-512:] = w
    torch.cuda.synchronize()
    # A weight of another shape may be split otherwise, so these are not the same bits.
    torch.testing.assert_close(linear(x, far)[:, -512:], expected, rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("rows", [2, 20, 200])
def test_infinities_and_nan_stay_in_their_row_and_feature(fresh_seed, rows):
    x, w = randn(rows, 1096), weights(300, 1096)
    clean = linear(x, w)
    w[299, 0] = torch.inf  # before x: a weight must not be written by the kernel just before
    x[1, 1095] = torch.nan
    got = linear(x, w)
    assert got[1].isnan().all()
    assert not got[:, 299].isfinite().any()
    assert torch.equal(got[0, :299], clean[0, :299])


@pytest.mark.parametrize(("shape", "features"), [((0, 64), 48), ((3, 0, 64), 48), ((4, 64), 0)])
def test_empty_batches(shape, features):
    """No launch, no error."""
    x, w = torch.empty(shape, device="cuda").half(), torch.ones(features, 64, device="cuda").half()
    assert linear(x, w).shape == (*shape[:-1], features)


def test_chain_under_a_graph_follows_its_buffers(fresh_seed):
    """Programmatic dependent launch: each product reads what the one before it wrote, eagerly and in a replayed graph."""
    ws = [weights(1024, 1024) for _ in range(24)]

    def chain(x: Tensor) -> Tensor:
        for w in ws:
            x = linear(x, w)
        return x

    static = randn(4, 1024)
    expected = static
    for w in ws:
        expected = linear(expected, w)
        torch.cuda.synchronize()
    assert torch.equal(chain(static), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(static)
    for _ in range(20):
        static.copy_(randn(4, 1024))
        graph.replay()
        assert torch.equal(got, chain(static))


@pytest.mark.parametrize("rows", [1, 16, 32, 64, 128, 300])
def test_early_release_orders_reads_and_writes(fresh_seed, rows):
    """linear lets the next kernel start before it waits itself: buffers used in turn and in place, and other kernels of the
    package in between, must give what they give one at a time."""
    ws = [weights(1024, 1024) for _ in range(24)]
    norm, start = randn(1024), randn(rows, 1024)

    def chain(pause: bool) -> Tensor:
        a, b = start.clone(), torch.full_like(start, torch.nan)
        for i, w in enumerate(ws):
            linear(a, w, out=b)
            if pause:
                torch.cuda.synchronize()
            if i % 3 == 2:
                rms_norm(b, norm, 1e-5, out=a)
            else:
                linear(b, w, residual=a, out=a)
            if pause:
                torch.cuda.synchronize()
        return a

    expected = chain(pause=True)
    assert expected.isfinite().all()
    for _ in range(20):
        assert torch.equal(chain(pause=False), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(pause=False)
    for _ in range(20):
        graph.replay()
        assert torch.equal(got, expected)


def test_opcheck():
    """torch.library.opcheck, its schema test included."""
    x, w, bias, residual, norm = randn(4, 64), weights(48, 64), randn(48), randn(4, 48), randn(64)
    torch.library.opcheck(torch.ops.astrai.linear.default, (x, w, bias, residual, False, norm, 1e-6))
    torch.library.opcheck(torch.ops.astrai.linear.default, (x, w, None, None, True, None, 1e-6))
    many = randn(130, 64)
    torch.library.opcheck(torch.ops.astrai.linear.default, (many, w, bias, None, False, None, 1e-6, True))
    out = torch.empty_like(residual)
    torch.library.opcheck(torch.ops.astrai.linear_out.default, (x, w, bias, residual, False, None, 1e-6, out))


def test_arguments_that_need_addresses():
    x, w = randn(4, 64), weights(64, 64)
    shifted = randn(4 * 72 + 1)[1:].view(4, 72)[:, :64]
    with pytest.raises(ValueError, match="x starts at .* expected multiples of 16 bytes"):
        linear(shifted, w)
    with pytest.raises(ValueError, match="weight starts at .* with rows 68 elements apart"):
        linear(x, randn(64, 68)[:, :64])
    with pytest.raises(ValueError, match="out and x are the same memory"):
        linear(x, w, out=x)
    with pytest.raises(ValueError, match="x has strides .* expected rows one stride apart"):
        linear(randn(2, 5, 3, 64)[:, :4, 0], w)
    memory = randn(8, 64)
    with pytest.raises(ValueError, match="out starts where residual does"):
        linear(x, w, residual=memory[:4], out=memory[::2])
