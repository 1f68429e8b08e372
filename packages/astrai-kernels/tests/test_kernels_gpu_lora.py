"""LoRA's two halves on a GPU: against the twin, rows alone and in a batch bit by bit, views, graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from astrai_kernels import lora_expand, lora_shrink, reference

pytestmark = [pytest.mark.gpu, pytest.mark.kernel]

DTYPES = [torch.float16, torch.bfloat16]
# rows, in_features, out_features, rank, adapters: one and many of each, odd sizes, both tiles of rows.
SHAPES = [
    (1, 64, 48, 8, 1),
    (7, 24, 7, 16, 3),
    (33, 520, 258, 64, 5),
    (128, 2048, 3072, 16, 4),
    (3001, 136, 131, 56, 3),
    (5, 64, 66, 32, 0),
]


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, dtype=torch.float32, device="cuda").to(dtype)


def operands(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return x, a, base, b, ids (all adapters, none, and now and then one that does not exist) and scaling."""
    rows, depth, features, rank, adapters = shape
    a = (torch.randn(adapters, rank, depth, device="cuda") / depth**0.5).to(dtype)
    b = randn(adapters, features, rank, dtype=dtype)
    ids = torch.randint(-1, adapters + 1, (rows,), device="cuda")
    return randn(rows, depth, dtype=dtype), a, randn(rows, features, dtype=dtype), b, ids, torch.rand(adapters).cuda()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_the_twin(fresh_seed, obeys_rule, dtype, shape):
    """The correctness rule; x and out are views with poisoned gaps, nothing is written outside the rows."""
    x, a, base, b, ids, scaling = operands(shape, dtype)
    rows, depth, features, rank, adapters = shape
    wide = torch.full((rows, depth + 16), torch.nan, dtype=dtype, device="cuda")
    wide[:, 8:-8] = x
    memory = torch.full((rows + 2, rank + 3), torch.nan, device="cuda")
    hidden = lora_shrink(wide[:, 8:-8], a, ids, out=memory[1:-1, :rank])
    exact = reference.lora_shrink(x, a, ids)
    torch.testing.assert_close(hidden, exact, rtol=1e-5, atol=2e-5, equal_nan=True)
    known = ids < adapters
    expected_nan = memory.numel() - int(known.sum()) * rank
    assert memory.isnan().sum() == expected_nan, "written outside the rows, or poison left behind"

    target = torch.full((rows + 2, features + 3), torch.nan, dtype=dtype, device="cuda")
    out = lora_expand(base, hidden, b, ids, scaling, out=target[1:-1, :features])
    assert target.isnan().sum() == target.numel() - int(known.sum()) * features
    same = (
        base
        + (hidden.to(dtype).unsqueeze(1) @ b[ids.clamp(0, max(adapters - 1, 0))].mT).squeeze(1)
        * scaling[ids.clamp(0, max(adapters - 1, 0))].to(dtype).unsqueeze(1)
        if adapters
        else base
    )
    mine = known & (ids >= 0)
    exact_out = reference.lora_expand(base.float(), exact, b.float(), ids, scaling)
    obeys_rule(out[mine], exact_out[mine], same[mine])
    assert torch.equal(out[ids < 0], base[ids < 0]), "a row without an adapter changes"
    assert torch.equal(lora_expand(base, hidden, b, ids.int(), scaling).nan_to_num(7.0), out.nan_to_num(7.0)), (
        "with int32 ids or without out= it differs"
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(33, 520, 258, 64, 5), (3001, 136, 130, 64, 3)], ids=str)
def test_a_row_does_not_see_the_others(fresh_seed, dtype, shape):
    """The reduction contract: alone, in part of the batch, in another order, among poison."""
    x, a, base, b, ids, scaling = operands(shape, dtype)
    ids = ids.clamp(max=shape[4] - 1)

    def run(rows: Tensor) -> Tensor:
        hidden = lora_shrink(x[rows], a, ids[rows])
        return torch.cat((hidden, lora_expand(base[rows], hidden, b, ids[rows], scaling).float()), 1)

    every = torch.arange(shape[0], device="cuda")
    expected = run(every)
    assert expected.isfinite().all()
    for rows in (
        every[:1],
        every[5:6],
        every[:8],
        every[3:20],
        every[1:],
        every.flip(0),
        torch.randperm(shape[0]).cuda(),
    ):
        assert torch.equal(run(rows), expected[rows])
    x[1:] = torch.nan
    assert torch.equal(run(every)[0], expected[0])


def test_in_place_and_under_a_graph(fresh_seed):
    """Over columns of a fused projection, replayed with other rows and other adapters."""
    x, a, base, b, ids, scaling = operands((9, 256, 96, 16, 3), torch.bfloat16)
    fused = torch.full((9, 224), 3.0, dtype=torch.bfloat16, device="cuda")
    part = fused[:, 64:160]

    def step() -> None:
        part.copy_(base)
        lora_expand(part, lora_shrink(x, a, ids), b, ids, scaling, out=part)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(5):
        x.copy_(randn(9, 256))
        ids.copy_(torch.randint(-1, 3, (9,)))
        graph.replay()
        got = part.clone()
        step()
        assert torch.equal(got, part)
        torch.testing.assert_close(
            got, reference.lora_expand(base, reference.lora_shrink(x, a, ids), b, ids, scaling), rtol=2**-6, atol=2**-6
        )
        assert (fused[:, :64] == 3).all()
        assert (fused[:, 160:] == 3).all()


def test_empty_batches():
    """No launch, no error."""
    a, b, scaling = randn(2, 8, 64), randn(2, 48, 8), torch.ones(2, device="cuda")
    ids = torch.empty(0, dtype=torch.int64, device="cuda")
    hidden = lora_shrink(randn(0, 64), a, ids)
    assert hidden.shape == (0, 8)
    assert lora_expand(randn(0, 48), hidden, b, ids, scaling).shape == (0, 48)


def test_opcheck():
    """torch.library.opcheck, its schema test included."""
    x, a, base, b, ids, scaling = operands((4, 64, 48, 16, 3), torch.bfloat16)
    ids = ids.clamp(max=2)  # NaN, for one that does not exist, equals nothing
    hidden = lora_shrink(x, a, ids)
    torch.library.opcheck(torch.ops.astrai.lora_shrink.default, (x, a, ids))
    torch.library.opcheck(torch.ops.astrai.lora_shrink_out.default, (x, a, ids, torch.empty_like(hidden)))
    torch.library.opcheck(torch.ops.astrai.lora_expand.default, (base, hidden, b, ids, scaling))
    torch.library.opcheck(
        torch.ops.astrai.lora_expand_out.default, (base, hidden, b, ids, scaling, torch.empty_like(base))
    )


def test_arguments_that_need_addresses():
    x, a, base, b, ids, scaling = operands((4, 64, 48, 16, 3), torch.bfloat16)
    shifted = randn(4 * 72 + 1)[1:].view(4, 72)[:, :64]
    with pytest.raises(ValueError, match="x starts at .* expected rows at multiples of 16 bytes"):
        lora_shrink(shifted, a, ids)
    with pytest.raises(ValueError, match="b starts at .* with strides"):
        lora_expand(base, lora_shrink(x, a, ids), randn(3, 48, 20)[:, :, :16], ids, scaling)
    memory = randn(8, 48)
    with pytest.raises(ValueError, match="out starts where base does"):
        lora_expand(memory[:4], lora_shrink(x, a, ids), b, ids, scaling, out=memory[::2])
