"""add_rms_norm_partials on a GPU: bitwise add_rms_norm of the summed slices, views, in place, early reads, graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from astrai_kernels import add_rms_norm, add_rms_norm_partials, reference, rms_norm

pytestmark = [pytest.mark.gpu, pytest.mark.kernel]

DTYPES = [torch.float16, torch.bfloat16]
# One warp with lanes to spare and full; several warps; two octets a thread, the last of them missing and there.
HIDDEN = [8, 64, 256, 264, 1024, 1536, 2048, 2056, 4096, 5120, 8192]


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=torch.float32, device="cuda").to(dtype)


def poisoned(rows: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return NaN-filled memory and a view of rows in it, each followed by 8 elements that nobody may write."""
    memory = torch.full((rows + 2, hidden + 8), torch.nan, dtype=dtype, device="cuda")
    return memory, memory[1:-1, :hidden]


def in_sequence(parts: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return add_rms_norm(total.to(residual.dtype), residual, weight, 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("slices", [2, 4])
def test_bitwise_the_ops_in_sequence(fresh_seed, obeys_rule, dtype, hidden, slices):
    """Sum in rising order, one rounding, then add_rms_norm to the last bit; nothing else is written."""
    for rows in (1, 65, 128, 301):
        parts = torch.full((slices, rows + 1, hidden + 4), torch.nan, device="cuda")[:, :rows, :hidden]
        parts.copy_(randn(slices, rows, hidden, dtype=torch.float32))
        r = torch.full((rows, hidden + 8), torch.nan, dtype=dtype, device="cuda")[:, :hidden]
        r.copy_(randn(rows, hidden, dtype=dtype))
        w = randn(hidden, dtype=dtype)
        (memory, normed), (residual_memory, residual) = (poisoned(rows, hidden, dtype) for _ in range(2))
        results = add_rms_norm_partials(parts, r, w, 1e-5, out=(normed, residual))
        assert results[0] is normed
        assert results[1] is residual
        for got, expected in zip(results, in_sequence(parts, r, w), strict=True):
            assert torch.equal(got, expected), f"{rows} rows"
        for written in (memory, residual_memory):
            assert written.isnan().sum() == written.numel() - rows * hidden, "written outside the rows"
        for got, again in zip(results, add_rms_norm_partials(parts, r, w, 1e-5, overlap=True), strict=True):
            assert torch.equal(got, again), "with and without out= and overlap differ"
        exact, _ = reference.add_rms_norm(parts.sum(0), r.float(), w.float(), 1e-5)
        obeys_rule(normed, exact, reference.add_rms_norm_partials(parts, r, w, 1e-5)[0])


@pytest.mark.parametrize("hidden", [64, 1536, 4096])
def test_in_place_over_the_residual(fresh_seed, hidden):
    parts, w = randn(2, 65, hidden, dtype=torch.float32), randn(hidden, dtype=torch.bfloat16)
    r = randn(65, hidden, dtype=torch.bfloat16)
    expected = in_sequence(parts, r, w)
    for which in (0, 1):
        residual, other = r.clone(), torch.full_like(r, torch.nan)
        out = (residual, other) if which == 0 else (other, residual)
        for got, wanted in zip(
            add_rms_norm_partials(parts, residual, w, 1e-5, out=out, overlap=True), expected, strict=True
        ):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("slices", [2, 4])
def test_behind_a_batched_product_in_a_graph(fresh_seed, slices):
    """The chain that core launches, captured: slices of x and of the weight are views, the sums read what is new."""
    x, weight = randn(128, 6912, dtype=torch.bfloat16), randn(1536, 6912, dtype=torch.bfloat16) * 6912**-0.5
    r, w = randn(128, 1536, dtype=torch.bfloat16), randn(1536, dtype=torch.bfloat16)

    def chain() -> tuple[Tensor, Tensor]:
        residual = rms_norm(r, w)  # a step's kernel before the product: the residual is older than the next one
        gated = rms_norm(x, weight[0], 1e-5)
        left = gated.view(128, slices, -1).transpose(0, 1)
        right = weight.view(1536, slices, -1).permute(1, 2, 0)
        parts = torch.bmm(left, right, out_dtype=torch.float32)
        return add_rms_norm_partials(parts, residual, w, 1e-5, overlap=True)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        chain()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for _ in range(3):
        x.copy_(randn(128, 6912, dtype=torch.bfloat16))
        r.copy_(randn(128, 1536, dtype=torch.bfloat16))
        for tensor in captured:
            tensor.fill_(torch.nan)
        graph.replay()
        product = rms_norm(x, weight[0], 1e-5).double() @ weight.double().T
        total = product + rms_norm(r, w).double()
        torch.testing.assert_close(captured[1].double(), total, rtol=2**-7, atol=2**-7)
        assert torch.equal(captured[0], rms_norm(captured[1], w, 1e-5))


def test_infinities_and_nan_stay_in_their_row(fresh_seed):
    parts, r = randn(4, 6, 4096, dtype=torch.float32), randn(6, 4096, dtype=torch.bfloat16)
    w = torch.ones(4096, dtype=torch.bfloat16, device="cuda")
    clean = add_rms_norm_partials(parts, r, w)[0]
    parts[2, 1, 17], parts[3, 4, 4095] = torch.nan, torch.inf
    got = add_rms_norm_partials(parts, r, w)[0]
    assert got[1].isnan().all()
    assert got[4, -1].isnan()
    assert torch.equal(got[[0, 2, 3, 5]], clean[[0, 2, 3, 5]])


def test_arguments_are_checked_on_real_tensors():
    """The checks of test_kernels_partial_norm.py, and those that need addresses."""
    parts, r = torch.ones(2, 4, 64, device="cuda"), torch.ones(4, 64, dtype=torch.half, device="cuda")
    w = torch.ones(64, dtype=torch.half, device="cuda")
    with pytest.raises(ValueError, match="out and residual_out are the same memory"):
        add_rms_norm_partials(parts, r, w, out=(r, r))
    memory = torch.ones(8, 64, dtype=torch.half, device="cuda")
    with pytest.raises(ValueError, match="out starts where residual does"):
        add_rms_norm_partials(parts, memory[:4], w, out=(memory[::2], torch.empty_like(r)))
    with pytest.raises(ValueError, match="weight starts 2 bytes past a multiple of 16"):
        add_rms_norm_partials(parts, r, torch.ones(65, dtype=torch.half, device="cuda")[1:])
    empty = torch.empty(2, 0, 64, device="cuda")
    assert [t.shape for t in add_rms_norm_partials(empty, r[:0], w)] == [(0, 64)] * 2
