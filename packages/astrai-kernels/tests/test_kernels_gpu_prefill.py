"""Prefill attention on a GPU: the correctness rule and coverage of the kernels' specification, rows K1-K3, K10."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from astrai_kernels import prefill_attention
from astrai_kernels.reference_attention import prefill_attention as twin

pytestmark = [pytest.mark.gpu, pytest.mark.kernel]

LENS = [300, 1, 129, 0, 64, 65, 500, 128]
CHUNKS = [300, 1, 1, 0, 63, 1, 200, 127]


@dataclass
class Case:
    """Ragged queries over a paged pool whose unused slots, and unused table entries, are poison."""

    n_heads: int = 6
    n_kv_heads: int = 2
    head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    lens: list[int] = field(default_factory=lambda: LENS)
    q_lens: list[int] = field(default_factory=lambda: CHUNKS)
    window: int | None = None
    page_size: int = 16
    operands: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        page, batch = self.page_size, len(self.lens)
        pages = [-(-n // page) for n in self.lens]
        order = torch.randperm(sum(pages) + 3).tolist()
        table = torch.full((batch + 2, max(self.lens) + 5), 2**30, dtype=torch.int32)
        rows = torch.randperm(batch + 2)[:batch]
        shape = (len(order) * page, self.n_kv_heads, self.head_dim)
        k, v = (torch.full(shape, torch.nan, dtype=self.dtype, device="cuda") for _ in range(2))
        for b, (n, q_len) in enumerate(zip(self.lens, self.q_lens, strict=True)):
            own = [order.pop() for _ in range(pages[b])]
            slots = torch.tensor([own[i // page] * page + i % page for i in range(n)], dtype=torch.int32)
            table[rows[b], :n] = slots
            seen = slots[max(0, n - q_len + 1 - self.window) if self.window else 0 :].long().cuda()
            for buffer in (k, v):
                buffer[seen] = torch.randn((len(seen), *shape[1:]), device="cuda").to(self.dtype)
        indptr = torch.tensor([0, *accumulate(self.q_lens)], dtype=torch.int32, device="cuda")
        q = torch.randn((sum(self.q_lens), self.n_heads, self.head_dim), device="cuda").to(self.dtype)
        self.operands = {
            "q": q, "k": k, "v": v, "qo_indptr": indptr, "req_to_token": table.cuda(), "req_indices": rows.cuda(),
            "seq_lens": torch.tensor(self.lens, dtype=torch.int32, device="cuda"),
        }  # fmt: skip

    def run(self, **options: object) -> tuple[Tensor, Tensor]:
        q = self.operands["q"]
        out = torch.full_like(q, torch.nan)
        lse = torch.full(q.shape[:2], torch.nan, device="cuda")
        prefill_attention(**self.operands, window=self.window, out=out, lse=lse, **options)
        return out, lse

    def twin(self, dtype: torch.dtype, **options: object) -> tuple[Tensor, Tensor]:
        cast = {name: x.to(dtype) if name in ("q", "k", "v") else x for name, x in self.operands.items()}
        return twin(**cast, window=self.window, **options)


def check(case: Case, obeys_rule, **options: object) -> None:
    out, lse = case.run(**options)
    exact, exact_lse = case.twin(torch.float32, **options)
    obeys_rule(out, exact, case.twin(case.dtype, **options)[0])
    torch.testing.assert_close(lse, exact_lse, rtol=1e-4, atol=4e-3)  # of weights rounded to bf16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_head_sizes(fresh_seed, obeys_rule, head_dim, dtype):
    check(Case(head_dim=head_dim, dtype=dtype), obeys_rule)


@pytest.mark.parametrize("heads", [(1, 1), (7, 7), (5, 1), (9, 1), (16, 1), (24, 4)])
@pytest.mark.parametrize("q_lens", [LENS, CHUNKS])
def test_heads(fresh_seed, obeys_rule, heads, q_lens):
    check(Case(*heads, q_lens=q_lens), obeys_rule)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_more_requests_than_lanes(fresh_seed, obeys_rule, head_dim):
    """K1: in either order of the tiles each of them is taken, of whole prompts, of chunks and of requests without rows."""
    lens = [1 + 37 * b % 400 for b in range(70)]
    q_lens = [(n, 0, min(n, 130))[b % 3] for b, n in enumerate(lens)]
    check(Case(4, 1, head_dim=head_dim, lens=lens, q_lens=q_lens), obeys_rule)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_page_sizes(fresh_seed, obeys_rule, page_size):
    check(Case(page_size=page_size), obeys_rule)


@pytest.mark.parametrize("window", [1, 33, 64, 200])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("q_lens", [LENS, CHUNKS])
def test_windows(fresh_seed, obeys_rule, window, head_dim, q_lens):
    check(Case(head_dim=head_dim, window=window, q_lens=q_lens), obeys_rule)


def test_softcap(fresh_seed, obeys_rule):
    check(Case(), obeys_rule, softcap=20.0)


def test_sinks(fresh_seed, obeys_rule):
    check(Case(), obeys_rule, sinks=torch.randn(6, device="cuda"))


def test_masks(fresh_seed, obeys_rule):
    """A mask that hides everything gives zeros and -inf."""
    case = Case()
    q, table = case.operands["q"], case.operands["req_to_token"]
    mask = torch.rand((q.shape[0], table.shape[1]), device="cuda") < 0.7
    mask[5] = False
    out, lse = case.run(mask=mask)
    assert not out[5].any()
    assert lse[5].isneginf().all()
    check(case, obeys_rule, mask=mask)


def test_contiguous(fresh_seed, obeys_rule):
    lens = [1, 500, 37]
    k, v = (torch.randn((3, 512, 2, 128), device="cuda").bfloat16() for _ in range(2))
    q = torch.randn((sum(lens), 8, 128), device="cuda").bfloat16()
    indptr = torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device="cuda")
    seq_lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
    out = prefill_attention(q, k, v, indptr, seq_lens)
    exact, _ = twin(q.float(), k.float(), v.float(), indptr, seq_lens)
    obeys_rule(out, exact, twin(q, k, v, indptr, seq_lens)[0])


def test_many_requests(fresh_seed, obeys_rule):
    check(Case(2, 2, lens=[3] * 400 + [200], q_lens=[2] * 400 + [200]), obeys_rule)


def test_batch_mates_leave_no_trace(fresh_seed):
    """A request's rows have the same bits alone and in a batch, with and without out=."""
    case = Case(24, 4)
    together, _ = case.run()
    indptr = case.operands["qo_indptr"].tolist()
    for b in (0, 4, 6):
        alone = dict(case.operands)
        rows = slice(indptr[b], indptr[b + 1])
        alone["q"] = case.operands["q"][rows]
        alone["qo_indptr"] = torch.tensor([0, rows.stop - rows.start], dtype=torch.int32, device="cuda")
        alone["seq_lens"] = case.operands["seq_lens"][b : b + 1]
        alone["req_indices"] = case.operands["req_indices"][b : b + 1]
        assert torch.equal(prefill_attention(**alone), together[rows])


def test_views_of_a_fused_projection(fresh_seed):
    case = Case()
    expected, _ = case.run()
    fused = torch.randn((sum(CHUNKS), 6 + 4, 64), device="cuda").bfloat16()
    fused[:, :6] = case.operands["q"]
    assert torch.equal(prefill_attention(**{**case.operands, "q": fused[:, :6]}), expected)


def test_empty():
    case = Case(lens=[4], q_lens=[0])
    assert case.run()[0].shape == (0, 6, 64)


def test_opcheck(fresh_seed):
    o = Case().operands
    torch.library.opcheck(
        torch.ops.astrai.attention_prefill_out.default,
        (o["q"], o["k"], o["v"], o["qo_indptr"], o["seq_lens"], o["req_to_token"], o["req_indices"],
         torch.empty_like(o["q"]), None, None, None, 0.125, 0, 0.0),
    )  # fmt: skip


def test_arguments_are_refused(fresh_seed):
    o = Case().operands
    with pytest.raises(ValueError, match="head_dim of 64, 80"):
        prefill_attention(**{**o, "q": o["q"][..., :56]})
    with pytest.raises(ValueError, match="k has 4 heads, expected a divisor of q's 6"):
        prefill_attention(**{**o, "k": torch.empty((32, 4, 64), device="cuda").bfloat16()})
    with pytest.raises(TypeError, match="seq_lens has dtype torch.int64"):
        prefill_attention(**{**o, "seq_lens": o["seq_lens"].long()})
    with pytest.raises(ValueError, match="qo_indptr has shape"):
        prefill_attention(**{**o, "qo_indptr": o["qo_indptr"][:-1].contiguous()})
    with pytest.raises(ValueError, match="scale is -1"):
        prefill_attention(**o, scale=-1.0)
