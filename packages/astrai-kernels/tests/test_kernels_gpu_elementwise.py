"""gated_activation and embedding on a GPU: the correctness rule, views, contract, offsets."""

from __future__ import annotations

import pytest
import torch

from astrai_kernels import embedding, gated_activation, reference

pytestmark = [pytest.mark.gpu, pytest.mark.kernel]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
KINDS = ["silu", "gelu_tanh", "gelu"]


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float32, device="cuda").to(dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 64, 100, 1536, 6912, 8192])
def test_gated_activation_obeys_the_rule(fresh_seed, obeys_rule, kind, dtype, width):
    inputs, outputs = [], []
    for rows in (1, 3, 257):
        x = randn(rows, 2 * width, dtype=dtype) * 3
        memory = torch.full((rows + 2, width + 8), torch.nan, dtype=dtype, device="cuda")
        out = memory[1:-1, :width]
        assert gated_activation(x, kind, out=out) is out
        assert memory.isnan().sum() == memory.numel() - rows * width, "written outside the rows"
        assert torch.equal(gated_activation(x, kind), out), "with and without out= differ"
        inputs.append(x)
        outputs.append(out)
    x = torch.cat(inputs)  # at once: the greatest of one element's errors says little
    obeys_rule(torch.cat(outputs), reference.gated_activation(x.float(), kind), reference.gated_activation(x, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_gated_activation_limits(kind):
    """Far tails and NaN as torch has them."""
    gates = torch.tensor(
        [-1e30, -200.0, -90.0, -20.0, -0.0, 0.0, 20.0, 90.0, 1e30, torch.nan, torch.inf], device="cuda"
    )
    x = torch.cat((gates, torch.full_like(gates, 2.0)))[None]
    got, expected = gated_activation(x, kind), reference.gated_activation(x, kind)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [100, 6912])
def test_gated_activation_contract(fresh_seed, dtype, width):
    """A row's bits do not depend on how many came with it, on strides or on alignment: 1 to 8,192 rows."""
    x = randn(8192, 2 * width, dtype=dtype)
    full = gated_activation(x)
    for rows in (1, 2, 17, 128, 1000):
        assert torch.equal(gated_activation(x[-rows:]), full[-rows:]), f"{rows} rows"
    shifted = torch.empty(1000, 2 * width + 1, dtype=dtype, device="cuda")[:, 1:]
    shifted.copy_(x[:1000])
    assert torch.equal(gated_activation(shifted), full[:1000]), "the unaligned kernel differs"
    grid = x[:600].view(20, 30, 2 * width)[:, :7]
    assert torch.equal(gated_activation(grid), full[:600].view(20, 30, width)[:, :7]), "two strides differ"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("hidden", [1, 60, 2048, 2049])
def test_embedding_gathers(fresh_seed, dtype, index, hidden):
    """Exactly the rows; ids outside the table give NaN and read nothing."""
    table = randn(1000, hidden + 8, dtype=dtype)[:, :hidden]
    for tokens in (1, 3, 700, 5000):
        ids = torch.randint(0, 1000, (2 * tokens,), device="cuda", dtype=index)[::2]
        out = torch.full((tokens, hidden), torch.nan, dtype=dtype, device="cuda")
        assert embedding(ids, table, out=out) is out
        assert torch.equal(out, table[ids.long()])
        assert torch.equal(embedding(ids, table), out)
    bad = torch.tensor([-1, 1000, torch.iinfo(index).max, torch.iinfo(index).min, 999], dtype=index, device="cuda")
    got = embedding(bad, table)
    assert got[:4].isnan().all()
    assert torch.equal(got[4], table[999])


def test_offsets_past_32_bits(fresh_seed):
    """Kernel rule "64-bit offsets": rows that start 2^30 elements apart, so past 2^31 and 2^32."""
    stride = 1 << 30
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB of free GPU memory")
    memory = torch.empty(4 * stride + 256, dtype=torch.bfloat16, device="cuda")
    far, near = memory.as_strided((5, 256), (stride, 1)), randn(5, 256, dtype=torch.bfloat16)
    far.copy_(near)
    ids = torch.tensor([4, 0, 3, 4], device="cuda")
    assert torch.equal(embedding(ids, far), near[ids])
    assert torch.equal(gated_activation(far), gated_activation(near))


def test_empty_batches():
    """No launch, no error."""
    assert gated_activation(torch.empty(0, 64, device="cuda")).shape == (0, 32)
    assert gated_activation(torch.empty(3, 0, 64, device="cuda")).shape == (3, 0, 32)
    none = torch.empty(0, dtype=torch.int64, device="cuda")
    assert embedding(none, torch.empty(4, 8, device="cuda")).shape == (0, 8)
