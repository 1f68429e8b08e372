"""rms_norm and add_rms_norm on a GPU: the correctness rule, the reduction contract, views, offsets."""

from __future__ import annotations

import pytest
import torch

from astrai_kernels import add_rms_norm, reference, rms_norm

pytestmark = [pytest.mark.gpu, pytest.mark.kernel]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Every way a row is spread over threads: 8, 16 and 32 lanes; a block with 1, 2 and 4 octets a thread; rows read twice.
# With and without a whole number of octets.
HIDDEN = [1, 7, 64, 80, 100, 128, 192, 256, 264, 576, 1536, 2048, 4096, 4100, 8192, 16384, 16392, 20001, 40000]


def poisoned(rows: int, hidden: int, dtype: torch.dtype, gap: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Return NaN-filled memory and a view of rows in it, each followed by ``gap`` elements that nobody may write."""
    memory = torch.full((rows + 2, hidden + gap), torch.nan, dtype=dtype, device="cuda")
    return memory, memory[1:-1, :hidden]


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float32, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_rms_norm_obeys_the_rule(fresh_seed, obeys_rule, dtype, hidden):
    for rows in (1, 3, 257):
        x, w = randn(rows, hidden, dtype=dtype), randn(hidden, dtype=dtype)
        memory, out = poisoned(rows, hidden, dtype)
        assert rms_norm(x, w, 1e-5, out=out) is out
        obeys_rule(out, reference.rms_norm(x.float(), w.float(), 1e-5), reference.rms_norm(x, w, 1e-5))
        assert memory.isnan().sum() == memory.numel() - rows * hidden, "written outside the rows"
        assert torch.equal(rms_norm(x, w, 1e-5), out), "with and without out= differ"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_add_rms_norm_obeys_the_rule(fresh_seed, obeys_rule, dtype, hidden):
    for rows in (1, 3, 257):
        x, r = randn(rows, hidden, dtype=dtype), randn(rows, hidden, dtype=dtype)
        w = randn(hidden, dtype=dtype)
        memory, normed = poisoned(rows, hidden, dtype)
        _, new_residual = poisoned(rows, hidden, dtype)
        add_rms_norm(x, r, w, 1e-5, out=(normed, new_residual))
        exact, _ = reference.add_rms_norm(x.float(), r.float(), w.float(), 1e-5)
        obeys_rule(normed, exact, reference.add_rms_norm(x, r, w, 1e-5)[0])
        assert torch.equal(new_residual, x + r), "the sum is rounded once, exactly as torch rounds it"
        assert memory.isnan().sum() == memory.numel() - rows * hidden, "written outside the rows"


@pytest.mark.parametrize("hidden", [64, 128, 256, 576, 1536, 2048, 2056, 4096, 16384, 20000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_reduction_contract(fresh_seed, dtype, hidden):
    """A row's bits never depend on how many rows ran with it, on their order, strides or alignment: 1 to 8192 rows."""
    x, r, w = (randn(*shape, dtype=dtype) for shape in ((8192, hidden), (8192, hidden), (hidden,)))
    normed, residual = add_rms_norm(x, r, w)
    assert torch.equal(rms_norm(residual, w), normed), "the fused add changes the norm"
    for rows in (1, 2, 3, 16, 17, 132, 1000, 1056, 4096):
        for start in (0, 8192 - rows):
            part = slice(start, start + rows)
            assert torch.equal(rms_norm(residual[part], w), normed[part]), f"{rows} rows from {start}"
            assert torch.equal(add_rms_norm(x[part], r[part], w)[0], normed[part]), f"{rows} rows from {start}"
    order = torch.randperm(8192, device="cuda")
    assert torch.equal(rms_norm(residual[order], w), normed[order])
    shifted = torch.empty(8192 * (hidden + 1) + 1, dtype=dtype, device="cuda")[1:].view(8192, hidden + 1)[:, :hidden]
    shifted.copy_(residual)
    assert torch.equal(rms_norm(shifted, w), normed), "the unaligned kernel has another tree"


@pytest.mark.parametrize(("hidden", "rows"), [(64, 60_000), (100, 40_000), (128, 40_000), (256, 20_000), (512, 9_000)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_short_rows_keep_their_bits(fresh_seed, dtype, hidden, rows):
    """Reduction contract: the kernel that takes several rows a warp, which needs more rows than above, has the same tree."""
    x, r, w = (randn(*shape, dtype=dtype) for shape in ((rows, hidden), (rows, hidden), (hidden,)))
    normed, residual = add_rms_norm(x, r, w)
    assert torch.equal(rms_norm(residual, w), normed)
    for start in (0, rows - 999):
        part = slice(start, start + 999)
        assert torch.equal(rms_norm(residual[part], w), normed[part])
        assert torch.equal(add_rms_norm(x[part], r[part], w)[0], normed[part])
    view = residual.view(rows // 4, 4, hidden).transpose(0, 1)
    assert torch.equal(rms_norm(view, w), normed.view(rows // 4, 4, hidden).transpose(0, 1)), "two strides"


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_of_a_fused_projection_are_normed_in_place(fresh_seed, dtype):
    """Kernel coverage: non-contiguous q and k views of a fused projection; v and the gaps stay as they are."""
    qkv = randn(33, (5 + 2 + 2) * 128, dtype=dtype)
    before = qkv.clone()
    heads = qkv.view(33, 9, 128)
    w = randn(128, dtype=dtype)
    for part in (slice(0, 5), slice(5, 7)):
        rms_norm(heads[:, part], w, out=heads[:, part])
    expected = rms_norm(before.view(33, 9, 128)[:, :7].contiguous(), w)
    assert torch.equal(heads[:, :7], expected)
    assert torch.equal(heads[:, 7:], before.view(33, 9, 128)[:, 7:])


@pytest.mark.parametrize("hidden", [96, 2048, 20000])
def test_in_place_over_either_input(fresh_seed, hidden):
    x, r = (randn(65, hidden, dtype=torch.bfloat16) for _ in range(2))
    w = randn(hidden, dtype=torch.bfloat16)
    normed, residual = add_rms_norm(x, r, w)
    x1, r1 = x.clone(), r.clone()
    add_rms_norm(x1, r1, w, out=(x1, r1))
    x2, r2 = x.clone(), r.clone()
    add_rms_norm(x2, r2, w, out=(r2, x2))
    assert torch.equal(x1, normed)
    assert torch.equal(r1, residual)
    assert torch.equal(r2, normed)
    assert torch.equal(x2, residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [64, 100, 1536, 4096, 16384, 20000])
def test_an_old_residual_is_read_early(fresh_seed, dtype, hidden):
    """`overlap` behind products, which may still run when the residual is read: the bits of the plain call, in place too."""
    w, weight = randn(hidden, dtype=dtype), randn(hidden, hidden, dtype=dtype) * hidden**-0.5
    for rows in (1, 128, 300):
        x, r = randn(rows, hidden, dtype=dtype), randn(rows, hidden, dtype=dtype)
        torch.cuda.synchronize()
        results = {}
        for overlap in (False, True):
            residual = r.clone()
            rms_norm(x, w)  # neither linear nor a library's product: the residual is older than it
            product = x @ weight.T
            results[overlap] = add_rms_norm(product, residual, w, out=(product, residual), overlap=overlap)
        for got, expected in zip(results[True], results[False], strict=True):
            assert torch.equal(got, expected), f"{rows} rows"


@pytest.mark.parametrize("hidden", [128, 4096])
def test_offsets_past_32_bits(fresh_seed, hidden):
    """Kernel rule "64-bit offsets": rows that start 2^30 elements apart, so past 2^31 and 2^32."""
    rows, stride = 5, 1 << 30
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB of free GPU memory")
    memory = torch.empty((rows - 1) * stride + hidden, dtype=torch.bfloat16, device="cuda")
    far = memory.as_strided((rows, hidden), (stride, 1))
    near, w = randn(rows, hidden, dtype=torch.bfloat16), randn(hidden, dtype=torch.bfloat16)
    far.copy_(near)
    assert torch.equal(rms_norm(far, w), rms_norm(near, w))
    rms_norm(near, w, out=far)
    assert torch.equal(far, rms_norm(near, w))


@pytest.mark.parametrize("shape", [(0, 64), (0, 3, 64), (4, 0, 64)])
def test_empty_batches(shape):
    """No launch, no error."""
    x, w = torch.empty(shape, device="cuda"), torch.ones(64, device="cuda")
    assert rms_norm(x, w).shape == shape
    assert [result.shape for result in add_rms_norm(x, x, w)] == [shape, shape]


def test_more_rows_than_a_grid_dimension(fresh_seed):
    x, w = randn(70_001, 64, dtype=torch.bfloat16), randn(64, dtype=torch.bfloat16)
    assert torch.equal(rms_norm(x, w)[-3:], rms_norm(x[-3:].clone(), w))


def test_infinities_and_nan_stay_in_their_row(fresh_seed):
    x, w = randn(6, 4096, dtype=torch.bfloat16), torch.ones(4096, dtype=torch.bfloat16, device="cuda")
    clean = rms_norm(x, w)
    x[1, 17], x[4, 4095] = torch.nan, torch.inf
    got = rms_norm(x, w)
    assert got[1].isnan().all()
    assert got[4, -1].isnan()
    assert torch.equal(got[[0, 2, 3, 5]], clean[[0, 2, 3, 5]])


def test_arguments_are_checked_on_real_tensors():
    """The checks of test_kernels_arguments.py, and those that need addresses."""
    x, w = torch.ones(4, 64, device="cuda"), torch.ones(64, device="cuda")
    with pytest.raises(ValueError, match="weight is on cpu, expected cuda:0"):
        rms_norm(x, w.cpu())
    with pytest.raises(ValueError, match="out and residual_out are the same memory"):
        add_rms_norm(x, x, w, out=(x, x))
    memory = torch.ones(8, 64, device="cuda")
    with pytest.raises(ValueError, match="out starts where x does"):
        rms_norm(memory[:4], w, out=memory[::2])
