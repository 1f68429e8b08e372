"""Decode attention on a GPU: the correctness rule and coverage of the kernels' specification, rows K1-K12."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from astrai_kernels import DecodePlan, decode_attention, embedding
from astrai_kernels.reference_attention import decode_attention as twin

pytestmark = [pytest.mark.gpu, pytest.mark.kernel]

RAGGED = [1, 15, 16, 17, 127, 128, 129, 500, 0, 2049, 64, 3]
DEEP = [9, 8, 40, 300, 1025, 12]


@dataclass
class Case:
    """Operands of one step over a paged pool whose unused slots, and unused table entries, are poison."""

    lens: list[int]
    n_heads: int = 24
    n_kv_heads: int = 4
    head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    q_len: int = 1
    window: int | None = None
    page_size: int = 16
    fixed_len: int | None = None
    q: Tensor = field(init=False)
    k: Tensor = field(init=False)
    v: Tensor = field(init=False)
    table: Tensor = field(init=False)
    rows: Tensor = field(init=False)

    def __post_init__(self) -> None:
        page, batch = self.page_size, len(self.lens)
        pages = [-(-n // page) for n in self.lens]
        order = torch.randperm(sum(pages) + 3).tolist()
        self.table = torch.full((batch + 2, max(self.lens, default=0) + 5), 2**30, dtype=torch.int32)
        self.rows = torch.randperm(batch + 2)[:batch].cuda()
        size = len(order) * page
        shape = (size, self.n_kv_heads, self.head_dim)
        self.k, self.v = (torch.full(shape, torch.nan, dtype=self.dtype, device="cuda") for _ in range(2))
        for b, n in enumerate(self.lens):
            own = [order.pop() for _ in range(pages[b])]
            slots = torch.tensor([own[i // page] * page + i % page for i in range(n)], dtype=torch.int32)
            self.table[int(self.rows[b]), :n] = slots
            low = max(0, n - self.q_len + 1 - self.window) if self.window else 0
            for buffer in (self.k, self.v):
                buffer[slots[low:].long().cuda()] = torch.randn(
                    (n - low, self.n_kv_heads, self.head_dim), device="cuda"
                ).to(self.dtype)
        self.table = self.table.cuda()
        self.q = torch.randn((batch * self.q_len, self.n_heads, self.head_dim), device="cuda").to(self.dtype)

    @property
    def seq_lens(self) -> Tensor:
        return torch.tensor(self.lens, dtype=torch.int32, device="cuda")

    def plan(self, max_batch: int | None = None) -> DecodePlan:
        plan = DecodePlan(
            max_batch or max(1, len(self.lens)), self.n_heads, self.n_kv_heads, self.head_dim, self.q.device,
            q_len=self.q_len, window=self.window, fixed_len=self.fixed_len, max_tokens=max(1, sum(self.lens)),
        )  # fmt: skip
        plan.partial_out.fill_(torch.nan)
        plan.partial_ml.fill_(torch.nan)
        plan.update(self.seq_lens, self.rows)
        return plan

    def run(self, plan: DecodePlan | None = None, **options: object) -> tuple[Tensor, Tensor]:
        out = torch.full_like(self.q, torch.nan)
        lse = torch.full(self.q.shape[:2], torch.nan, device="cuda")
        plan = plan or self.plan()
        decode_attention(self.q, self.k, self.v, plan, req_to_token=self.table, out=out, lse=lse, **options)
        assert not plan.counters.any(), "a counter is left over"
        return out, lse

    def twin(self, dtype: torch.dtype, **options: object) -> tuple[Tensor, Tensor]:
        q, k, v = (x.to(dtype) for x in (self.q, self.k, self.v))
        return twin(
            q, k, v, self.seq_lens, req_to_token=self.table, req_indices=self.rows, q_len=self.q_len,
            window=self.window, **options,
        )  # fmt: skip


def check(case: Case, obeys_rule, **options: object) -> None:
    out, lse = case.run(**options)
    exact, exact_lse = case.twin(torch.float32, **options)
    obeys_rule(out, exact, case.twin(case.dtype, **options)[0])
    torch.testing.assert_close(lse, exact_lse, rtol=1e-4, atol=4e-3)  # of weights rounded to bf16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_head_sizes(fresh_seed, obeys_rule, head_dim, dtype):
    check(Case(RAGGED, 12, 4, head_dim, dtype), obeys_rule)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_query_heads_of_a_kv_head(fresh_seed, obeys_rule, group, head_dim):
    check(Case([1, 33, 700], 2 * group, 2, head_dim), obeys_rule)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_page_sizes(fresh_seed, obeys_rule, page_size):
    """Row K3: slots are looked up key by key, so any page size takes the same road."""
    check(Case(RAGGED, page_size=page_size), obeys_rule)


@pytest.mark.parametrize("q_len", [2, 4, 8])
@pytest.mark.parametrize(("heads", "head_dim"), [((24, 4), 64), ((32, 8), 128), ((16, 1), 256)])
def test_query_rows(fresh_seed, obeys_rule, q_len, heads, head_dim):
    check(Case(DEEP, *heads, head_dim, q_len=q_len), obeys_rule)


@pytest.mark.parametrize("window", [1, 16, 33, 100, 5000])
@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("fixed_len", [None, 64])
def test_windows(fresh_seed, obeys_rule, window, q_len, fixed_len):
    check(Case(DEEP, 8, 2, 64, q_len=q_len, window=window, fixed_len=fixed_len), obeys_rule)


def test_softcap(fresh_seed, obeys_rule):
    check(Case(RAGGED), obeys_rule, softcap=20.0)


def test_sinks(fresh_seed, obeys_rule):
    check(Case(RAGGED), obeys_rule, sinks=torch.randn(24, device="cuda"))


@pytest.mark.parametrize("q_len", [1, 3])
def test_masks(fresh_seed, obeys_rule, q_len):
    """A mask that hides everything gives zeros and -inf."""
    case = Case([5, 300, 77], q_len=q_len)
    mask = torch.rand((3 * q_len, case.table.shape[1]), device="cuda") < 0.7
    mask[q_len] = False
    out, lse = case.run(mask=mask)
    assert not out[q_len].any()
    assert lse[q_len].isneginf().all()
    check(case, obeys_rule, mask=mask)


def test_contiguous(fresh_seed, obeys_rule):
    """Row K2: the same kernels over [batch, max_len, heads, head_dim], rows of which are views of a larger buffer."""
    lens = [1, 500, 37, 0]
    memory = torch.full((2, 4, 512, 2, 4, 64), torch.nan, device="cuda", dtype=torch.bfloat16)
    k, v = memory[0, :, :, 0], memory[1, :, :, 1]
    for b, n in enumerate(lens):
        k[b, :n] = torch.randn((n, 4, 64), device="cuda")
        v[b, :n] = torch.randn((n, 4, 64), device="cuda")
    q = torch.randn((4, 24, 64), device="cuda", dtype=torch.bfloat16)
    plan = DecodePlan(4, 24, 4, 64, q.device)
    seq_lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
    plan.update(seq_lens)
    out = decode_attention(q, k, v, plan)
    assert not out[3].any(), "a request without keys gives zeros"
    obeys_rule(out, twin(q.float(), k.float(), v.float(), seq_lens)[0], twin(q, k, v, seq_lens)[0])


def test_views_of_a_fused_projection(fresh_seed):
    """q as a view of [tokens, q | k | v], out as a view of a wider tensor: the same bits as with whole tensors."""
    case = Case([100, 3, 900])
    expected, _ = case.run()
    fused = torch.randn((3, 24 + 8, 64), device="cuda", dtype=torch.bfloat16)
    fused[:, :24] = case.q
    wide = torch.full((3, 30, 64), torch.nan, device="cuda", dtype=torch.bfloat16)
    decode_attention(fused[:, :24], case.k, case.v, case.plan(), req_to_token=case.table, out=wide[:, 3:27])
    assert torch.equal(wide[:, 3:27], expected)
    assert wide[:, :3].isnan().all()
    assert wide[:, 27:].isnan().all()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_deterministic_mode(fresh_seed, head_dim):
    """The reduction contract: with chunks of fixed length a row's bits do not depend on its batch, on the other query
    rows of its request, or on the page table."""
    # With so many more that a block would have two warps instead of eight, were the lengths not fixed.
    case = Case([700, 64, 1300, 65, 2048, 1] + [40] * 200, 8, 2, head_dim, fixed_len=256)
    together, lse = case.run()
    for b in range(6):
        one = Case([case.lens[b]], 8, 2, head_dim, fixed_len=256)
        one.q = case.q[b : b + 1]
        slots = case.table[case.rows[b], : case.lens[b]].long()
        own = one.table[one.rows[0], : case.lens[b]].long()
        one.k[own], one.v[own] = case.k[slots], case.v[slots]
        out, one_lse = one.run()
        assert torch.equal(out[0], together[b])
        assert torch.equal(one_lse[0], lse[b])
    deep = Case([700], 8, 2, head_dim, q_len=4, fixed_len=256)
    rows, _ = deep.run()
    for i in range(4):
        shallow = Case([697 + i], 8, 2, head_dim, fixed_len=256)
        slots = deep.table[deep.rows[0], : 697 + i].long()
        own = shallow.table[shallow.rows[0], : 697 + i].long()
        shallow.k[own], shallow.v[own] = deep.k[slots], deep.v[slots]
        shallow.q = deep.q[i : i + 1]
        assert torch.equal(shallow.run()[0][0], rows[i])


def test_graph_replays_for_any_lengths(fresh_seed):
    """Rows K4, K9: grid and scratch come from capacity; plan and attention are captured once and follow the lengths."""
    case = Case([900] * 8, 24, 4, 64)
    plan, seq_lens = case.plan(), case.seq_lens
    out = torch.empty_like(case.q)

    def step() -> None:
        plan.update(seq_lens, case.rows)
        decode_attention(case.q, case.k, case.v, plan, req_to_token=case.table, out=out)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lens in ([900] * 8, [1, 2, 3, 64, 65, 500, 899, 17], [1] * 8):
        seq_lens.copy_(torch.tensor(lens))
        out.fill_(torch.nan)
        graph.replay()
        case.lens = lens
        assert torch.equal(out, case.run(case.plan())[0])


def test_promise_of_old_keys(fresh_seed):
    """`overlap` fetches what earlier steps wrote before it waits: the result stays the same."""
    case = Case([640, 64, 63, 1, 200], q_len=1)
    assert torch.equal(case.run(overlap=True)[0], case.run()[0])


def test_given_buffers_are_used(fresh_seed):
    """Row K12: with and without out= the same bits."""
    case = Case([40, 4])
    plan = case.plan()
    assert torch.equal(decode_attention(case.q, case.k, case.v, plan, req_to_token=case.table), case.run(plan)[0])


def test_many_requests(fresh_seed, obeys_rule):
    """Batch times heads past 65,535, and more requests than the planner has threads."""
    case = Case([3] * 2100, 32, 32, 64)
    assert 2100 * 32 > 65_535
    check(case, obeys_rule)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("share", [0.5, 1.5, 4.0])
def test_blocks_of_each_size(fresh_seed, obeys_rule, share, q_len, head_dim):
    """A block has eight, four or two warps by how many requests and kv heads come on a multiprocessor (row K4)."""
    batch = int(share * torch.cuda.get_device_properties(0).multi_processor_count / 4)
    check(Case([37 * (b % 20) + b for b in range(batch)], 16, 4, head_dim, q_len=q_len), obeys_rule)


def test_empty_batch():
    case = Case([])
    assert case.run()[0].shape == (0, 24, 64)


def test_pool_past_32_bit_offsets(fresh_seed):
    """Slots whose byte offsets pass 2^31 and 2^32."""
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GiB of free GPU memory")
    size, heads = 9 << 20, 4
    k, v = (torch.empty((size, heads, 64), device="cuda", dtype=torch.bfloat16) for _ in range(2))
    slots = torch.tensor([0, 4 << 20, 5 << 20, size - 1], device="cuda")
    near_k, near_v = (torch.randn((4, heads, 64), device="cuda").bfloat16() for _ in range(2))
    k[slots], v[slots] = near_k, near_v
    q = torch.randn((1, 8, 64), device="cuda").bfloat16()
    plan = DecodePlan(1, 8, heads, 64, q.device)
    plan.update(torch.tensor([4], dtype=torch.int32, device="cuda"))
    far = decode_attention(q, k, v, plan, req_to_token=slots.int().unsqueeze(0))
    near = decode_attention(q, near_k, near_v, plan, req_to_token=torch.arange(4, device="cuda").int().unsqueeze(0))
    assert torch.equal(far, near)


def test_opcheck(fresh_seed):
    case = Case([40, 4])
    plan = case.plan()
    arguments = (
        case.q, case.k, case.v, case.table, torch.empty_like(case.q), None, None, None, plan.chunks, plan.partial_out,
        plan.partial_ml, plan.counters, list(plan.shape), plan.max_chunks, 0.125, 0.0, False,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.astrai.attention_decode_out.default, arguments)
    torch.library.opcheck(
        torch.ops.astrai.attention_plan_out.default,
        (case.seq_lens, case.rows, plan.chunks, plan.max_chunks, list(plan.shape), False),
    )


@pytest.mark.parametrize("fixed_len", [None, 128])
def test_a_plan_made_beside_the_embedding(fresh_seed, fixed_len):
    """W2: the planner reads what is older than the kernel ahead; those behind it find the plan and what it wrote."""
    case = Case([700, 1, 64, 5000, 333], fixed_len=fixed_len)
    expected, plan, lens, rows = case.run()[0], case.plan(), case.seq_lens, case.rows
    table, ids = (
        torch.randn(1000, case.q.shape[1] * case.q.shape[2], device="cuda").to(case.q.dtype),
        torch.arange(5).cuda(),
    )
    table[ids] = case.q.flatten(1)
    torch.cuda.synchronize()
    for _ in range(50):
        plan.chunks.zero_()
        q = embedding(ids, table).view_as(case.q)
        plan.update(lens, rows, overlap=True)
        out = decode_attention(q, case.k, case.v, plan, req_to_token=case.table)
        assert torch.equal(out, expected)


@pytest.mark.slow
def test_compile_keeps_the_op(fresh_seed):
    case = Case([40, 4])
    plan = case.plan()

    def step(q: Tensor) -> Tensor:
        return decode_attention(q * 2, case.k, case.v, plan, req_to_token=case.table) + 1

    with torch.no_grad():
        assert torch.equal(torch.compile(step, fullgraph=True)(case.q), step(case.q))


def test_arguments_are_refused(fresh_seed):
    case = Case([40, 4])
    plan = case.plan()
    q, k, v = case.q, case.k, case.v

    def run(q: Tensor = q, k: Tensor = k, v: Tensor = v, **options: object) -> Tensor:
        return decode_attention(q, k, v, plan, req_to_token=case.table, **options)

    with pytest.raises(TypeError, match="k has dtype torch.float16, expected torch.bfloat16"):
        run(k=k.half())
    with pytest.raises(TypeError, match="q has dtype torch.float32"):
        run(q=q.float(), k=k.float(), v=v.float())
    with pytest.raises(ValueError, match="q has shape"):
        run(q=q[:, :23])
    with pytest.raises(ValueError, match="v has strides"):
        run(v=torch.empty((v.shape[0], 4, 68), device="cuda", dtype=v.dtype)[..., :64])
    with pytest.raises(ValueError, match="softcap is -1"):
        run(softcap=-1.0)
    with pytest.raises(ValueError, match="head_dim is 72, expected one of 64"):
        DecodePlan(1, 8, 2, 72, q.device)
    with pytest.raises(ValueError, match="fixed_len is 100"):
        DecodePlan(1, 8, 2, 64, q.device, fixed_len=100)
    with pytest.raises(ValueError, match="at most max_batch = 2"):
        plan.update(torch.ones(3, dtype=torch.int32, device="cuda"))
