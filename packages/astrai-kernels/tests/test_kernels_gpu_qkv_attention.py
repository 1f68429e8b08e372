"""qkv_decode_attention on a GPU: to the last bit qkv_norm_rope_write and decode_attention in sequence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from astrai_kernels import DecodePlan, decode_attention, linear, qkv_decode_attention, qkv_norm_rope_write, rms_norm
from astrai_kernels.reference_attention import qkv_decode_attention as twin

pytestmark = [pytest.mark.gpu, pytest.mark.kernel]

MAX_POS = 4096
EIGHT = [1, 2, 15, 16, 17, 300, 1025, 129]


@dataclass
class Case:
    """A step of single tokens over a paged pool; the new slots, what no request has and unused entries are poison."""

    lens: list[int]
    n_heads: int = 24
    n_kv_heads: int = 4
    head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    rotary_dim: int | None = None
    interleaved: bool = False
    norms: bool = True
    rotates: bool = True
    window: int | None = None
    page_size: int = 16
    fixed_len: int | None = None
    qkv: Tensor = field(init=False)
    pools: Tensor = field(init=False)
    table: Tensor = field(init=False)
    rows: Tensor = field(init=False)
    loc: Tensor = field(init=False)

    def __post_init__(self) -> None:
        page, batch = self.page_size, len(self.lens)
        pages = [-(-n // page) for n in self.lens]
        order = torch.randperm(sum(pages) + 3).tolist()
        self.table = torch.full((batch + 2, max(self.lens) + 5), 2**30, dtype=torch.int32)
        self.rows = torch.randperm(batch + 2)[:batch].cuda()
        size = len(order) * page
        shape = (2, size, self.n_kv_heads, self.head_dim)
        self.pools = torch.full(shape, torch.nan, dtype=self.dtype, device="cuda")
        newest = []
        for b, n in enumerate(self.lens):
            own = [order.pop() for _ in range(pages[b])]
            slots = torch.tensor([own[i // page] * page + i % page for i in range(n)], dtype=torch.int32)
            self.table[int(self.rows[b]), :n] = slots
            old = slots[max(0, n - self.window) if self.window else 0 : n - 1].long().cuda()
            self.pools[:, old] = torch.randn((2, len(old), *shape[2:]), device="cuda").to(self.dtype)
            newest.append(int(slots[-1]))
        self.table = self.table.cuda()
        self.loc = torch.tensor(newest, device="cuda")
        width = (self.n_heads + 2 * self.n_kv_heads) * self.head_dim
        self.qkv = torch.randn((batch, width + 8), device="cuda").to(self.dtype)[:, :width]
        self.weights = [torch.randn(self.head_dim, device="cuda").to(self.dtype) for _ in "qk"]
        angles = torch.rand(MAX_POS, (self.rotary_dim or self.head_dim) // 2, device="cuda") * 6.3
        self.cos, self.sin = angles.cos(), angles.sin()
        self.seq_lens = torch.tensor(self.lens, dtype=torch.int32, device="cuda")

    def plan(self) -> DecodePlan:
        plan = DecodePlan(
            len(self.lens), self.n_heads, self.n_kv_heads, self.head_dim, self.qkv.device, window=self.window,
            fixed_len=self.fixed_len, max_tokens=sum(self.lens),
        )  # fmt: skip
        plan.partial_out.fill_(torch.nan)
        plan.partial_ml.fill_(torch.nan)
        plan.update(self.seq_lens, self.rows)
        return plan

    @property
    def rope(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return (self.seq_lens.long() - 1, self.cos, self.sin) if self.rotates else (None, None, None)

    @property
    def options(self) -> dict[str, Any]:
        q_norm, k_norm = self.weights if self.norms else (None, None)
        return {"q_norm": q_norm, "k_norm": k_norm, "eps": 1e-5, "interleaved": self.interleaved}

    def in_sequence(self) -> tuple[Tensor, Tensor]:
        """Result, and the pools behind it."""
        pools = self.pools.clone()
        q = qkv_norm_rope_write(self.qkv, *self.rope, *pools, self.loc, self.n_heads, self.n_kv_heads, **self.options)
        return decode_attention(q, *pools, self.plan(), req_to_token=self.table), pools

    def run(self, plan: DecodePlan | None = None, **more: object) -> tuple[Tensor, Tensor]:
        pools, plan = self.pools.clone(), plan or self.plan()
        out = torch.full((len(self.lens), self.n_heads, self.head_dim), torch.nan, dtype=self.dtype, device="cuda")
        qkv_decode_attention(
            self.qkv, *self.rope, *pools, self.loc, plan, req_to_token=self.table, out=out, **self.options, **more
        )
        assert not plan.counters.any(), "a counter is left over"
        return out, pools


def same(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(got[0], expected[0])
    assert not got[0].isnan().any()
    assert torch.equal(got[1].view(torch.int16), expected[1].view(torch.int16)), "the pools, poison included"


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "head_dim"), [((24, 4), 64), ((32, 8), 128), ((16, 8), 128), ((8, 1), 64), ((3, 3), 128), ((9, 3), 64)]
)
def test_bitwise_the_ops_in_sequence(fresh_seed, heads, head_dim, dtype, overlap):
    for lens in (EIGHT, [1], [577], [3000]):
        case = Case(lens, *heads, head_dim, dtype)
        same(case.run(overlap=overlap), case.in_sequence())


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("interleaved", [False, True], ids=["half-split", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [16, 32, 64])
@pytest.mark.parametrize("norms", [False, True])
def test_layouts_of_the_rotation(fresh_seed, head_dim, interleaved, rotary_dim, norms):
    case = Case(EIGHT, 16, 4, head_dim, rotary_dim=rotary_dim, interleaved=interleaved, norms=norms)
    same(case.run(), case.in_sequence())


@pytest.mark.parametrize("norms", [False, True])
def test_without_rotation(fresh_seed, norms):
    case = Case(EIGHT, rotates=False, norms=norms)
    same(case.run(), case.in_sequence())


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("window", [1, 2, 16, 33, 100, 5000])
@pytest.mark.parametrize("fixed_len", [None, 64])
def test_windows_and_fixed_chunks(fresh_seed, head_dim, window, fixed_len):
    """A window of one key leaves nothing old that could be read in the stead of what is masked."""
    for lens in (EIGHT, [64, 65, 128, 129, 1300]):
        case = Case(lens, 8, 2, head_dim, window=window, fixed_len=fixed_len)
        same(case.run(overlap=True), case.in_sequence())


@pytest.mark.parametrize("page_size", [1, 64])
def test_page_sizes(fresh_seed, page_size):
    case = Case(EIGHT, page_size=page_size)
    same(case.run(), case.in_sequence())


@pytest.mark.parametrize("share", [0.5, 1.5, 4.0])
def test_blocks_of_each_size(fresh_seed, share):
    """With eight, four and two warps a block."""
    batch = int(share * torch.cuda.get_device_properties(0).multi_processor_count / 4)
    for head_dim in (64, 128):
        case = Case([37 * (b % 20) + b + 1 for b in range(batch)], 16, 4, head_dim)
        same(case.run(overlap=True), case.in_sequence())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_outside_the_pool_are_not_written(fresh_seed, dtype):
    """Padded rows carry -1: the others' results stay, and theirs are of their own key."""
    case = Case(EIGHT)
    expected, _ = case.run()
    case.loc = torch.tensor([-1, *case.loc[1:-1].tolist(), case.pools.shape[1]], dtype=dtype, device="cuda")
    out, pools = case.run()
    assert torch.equal(out, expected)
    written = torch.zeros(pools.shape[1], dtype=torch.bool, device="cuda")
    written[case.loc[1:-1].long()] = True
    assert torch.equal(pools[:, ~written].view(torch.int16), case.pools[:, ~written].view(torch.int16))


def test_obeys_the_rule(fresh_seed, obeys_rule):
    case = Case(EIGHT, 16, 8, 128)
    out, _ = case.run()
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        pools = case.pools.to(dtype)
        options = {name: x.to(dtype) if isinstance(x, Tensor) else x for name, x in case.options.items()}
        results.append(
            twin(
                *(case.qkv.to(dtype), *case.rope, *pools, case.loc, case.seq_lens),
                n_heads=16,
                req_to_token=case.table,
                req_indices=case.rows,
                **options,
            )
        )
    obeys_rule(out, *results)


def test_behind_a_product_that_still_runs(fresh_seed):
    """`overlap`: linear lets its successor in before it has waited; what it writes is read behind the wait."""
    case = Case(EIGHT, 16, 4, 128)
    x, weight = (torch.randn(n, 2048, device="cuda").bfloat16() for n in (8, 24 * 128))
    case.qkv = linear(x, weight)
    expected = case.in_sequence()
    plan, rope, pools = case.plan(), case.rope, case.pools.clone()
    out, normed = torch.empty_like(expected[0]), torch.empty_like(x)
    for _ in range(20):
        pools.copy_(case.pools)
        case.qkv.fill_(torch.nan)
        rms_norm(x, weight[0], out=normed)
        linear(x, weight, out=case.qkv)
        qkv_decode_attention(
            *(case.qkv, *rope, *pools, case.loc, plan),
            req_to_token=case.table,
            out=out,
            overlap=True,
            **case.options,
        )
        same((out, pools), expected)


def test_graph_replays_for_any_lengths(fresh_seed):
    """Rows K4, K9: plan and op are captured once and follow lengths, slots and positions."""
    case = Case([900] * 8)
    plan, rope, pools = case.plan(), case.rope, case.pools.clone()
    out = torch.empty((8, 24, 64), dtype=torch.bfloat16, device="cuda")

    def step() -> None:
        plan.update(case.seq_lens, case.rows)
        qkv_decode_attention(case.qkv, *rope, *pools, case.loc, plan, req_to_token=case.table, out=out, **case.options)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lens in ([900] * 8, [1, 2, 3, 64, 65, 500, 899, 17], [1] * 8):
        case.lens = lens
        case.seq_lens.copy_(torch.tensor(lens))
        assert rope[0] is not None
        rope[0].copy_(case.seq_lens - 1)
        case.loc.copy_(case.table[case.rows].gather(1, case.seq_lens.long()[:, None] - 1)[:, 0])
        pools.copy_(case.pools)
        out.fill_(torch.nan)
        graph.replay()
        same((out, pools), case.in_sequence())


def test_empty_requests_are_left_alone(fresh_seed):
    """A padded row may have no keys at all: zeros, and its slot is written if it has one."""
    case = Case([1, 40], rotates=False)
    case.seq_lens = torch.tensor([0, 40], dtype=torch.int32, device="cuda")
    out, pools = case.run()
    assert not out[0].any()
    assert not pools[:, case.loc].isnan().any()
    same((out, pools), case.in_sequence())


def test_opcheck(fresh_seed):
    case = Case([40, 4])
    plan, pools = case.plan(), case.pools.clone()
    arguments = (
        *(case.qkv, *case.rope, pools[0].clone(), pools[1].clone(), case.loc, *case.weights, 1e-6, False, case.table),
        *(torch.empty((2, 24, 64), dtype=case.dtype, device="cuda"), plan.chunks, plan.partial_out, plan.partial_ml),
        *(plan.counters, list(plan.shape), plan.max_chunks, 0.125, False),
    )
    torch.library.opcheck(torch.ops.astrai.qkv_decode_attention_out.default, arguments)


@pytest.mark.slow
def test_compile_keeps_the_op(fresh_seed):
    case = Case([40, 4])
    plan, rope, pools = case.plan(), case.rope, case.pools.clone()

    def step(qkv: Tensor) -> Tensor:
        return qkv_decode_attention(qkv * 2, *rope, *pools, case.loc, plan, req_to_token=case.table) + 1

    with torch.no_grad():
        assert torch.equal(torch.compile(step, fullgraph=True)(case.qkv), step(case.qkv))


def test_misaligned_rows_are_refused(fresh_seed):
    case = Case([40, 4])
    width = case.qkv.shape[1]
    case.qkv = torch.zeros(2 * width + 1, dtype=torch.bfloat16, device="cuda")[1:].view(2, width)
    with pytest.raises(ValueError, match="qkv starts 2 bytes past a multiple of 16"):
        case.run()
