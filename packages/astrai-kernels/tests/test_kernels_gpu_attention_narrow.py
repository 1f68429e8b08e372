"""Attention over e4m3 caches, and the scalar twin of the attention kernels, on a GPU: rows K1-K3, K10, K14."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from astrai_kernels import DecodePlan, decode_attention, prefill_attention, qkv_norm_rope_write, scalar_attention
from astrai_kernels.reference_attention import prefill_attention as twin

pytestmark = [pytest.mark.gpu, pytest.mark.kernel]

LENS = [300, 1, 129, 0, 64, 65, 500, 128]
CHUNKS = [300, 1, 1, 0, 63, 1, 200, 127]
ONES = [1] * 8


@dataclass
class Case:
    """Ragged queries over a paged pool of e4m3 (or, if not narrow, of q's type); what no query may see is poison."""

    n_heads: int = 6
    n_kv_heads: int = 2
    head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    lens: list[int] = field(default_factory=lambda: LENS)
    q_lens: list[int] = field(default_factory=lambda: CHUNKS)
    window: int | None = None
    page_size: int = 16
    narrow: bool = True
    operands: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        page, batch = self.page_size, len(self.lens)
        pages = [-(-n // page) for n in self.lens]
        order = torch.randperm(sum(pages) + 3).tolist()
        table = torch.full((batch, max(self.lens) + 5), 2**30, dtype=torch.int32)
        shape = (len(order) * page, self.n_kv_heads, self.head_dim)
        pools = [torch.full(shape, torch.nan, device="cuda") for _ in range(2)]
        for b, (n, q_len) in enumerate(zip(self.lens, self.q_lens, strict=True)):
            own = [order.pop() for _ in range(pages[b])]
            slots = torch.tensor([own[i // page] * page + i % page for i in range(n)], dtype=torch.int32)
            table[b, :n] = slots
            seen = slots[max(0, n - q_len + 1 - self.window) if self.window else 0 :].long().cuda()
            for pool in pools:
                # Scales of rows differ by orders of magnitude.
                size = 4.0 ** torch.randint(-2, 2, (len(seen), self.n_kv_heads, 1), device="cuda")
                pool[seen] = torch.randn((len(seen), *shape[1:]), device="cuda") * size
        q = torch.randn((sum(self.q_lens), self.n_heads, self.head_dim), device="cuda").to(self.dtype)
        self.operands = {
            "q": q,
            "qo_indptr": torch.tensor([0, *accumulate(self.q_lens)], dtype=torch.int32, device="cuda"),
            "seq_lens": torch.tensor(self.lens, dtype=torch.int32, device="cuda"),
            "req_to_token": table.cuda(),
        }
        for name, pool in zip("kv", pools, strict=True):
            scales = pool.abs().amax(-1) / 448
            narrow = (pool / scales.unsqueeze(-1)).to(torch.float8_e4m3fn)
            self.operands[name] = narrow if self.narrow else pool.to(self.dtype)
            if self.narrow:
                self.operands[f"{name}_scale"] = scales

    def run(self, op=prefill_attention, **options: object) -> tuple[Tensor, Tensor]:
        q = self.operands["q"]
        out = torch.full_like(q, torch.nan)
        lse = torch.full(q.shape[:2], torch.nan, device="cuda")
        op(**self.operands, window=self.window, out=out, lse=lse, **options)
        return out, lse

    def decode(self, q_len: int = 1, fixed_len: int | None = None, **options: object) -> tuple[Tensor, Tensor]:
        o = dict(self.operands)
        del o["qo_indptr"]
        plan = DecodePlan(
            len(self.lens), self.n_heads, self.n_kv_heads, self.head_dim, o["q"].device, q_len=q_len,
            window=self.window, fixed_len=fixed_len, max_tokens=sum(self.lens),
        )  # fmt: skip
        plan.partial_out.fill_(torch.nan)
        plan.update(o.pop("seq_lens"))
        out = torch.full_like(o["q"], torch.nan)
        lse = torch.full(out.shape[:2], torch.nan, device="cuda")
        decode_attention(o.pop("q"), o.pop("k"), o.pop("v"), plan, out=out, lse=lse, **o, **options)
        return out, lse

    def twin(self, dtype: torch.dtype, **options: object) -> tuple[Tensor, Tensor]:
        cast = ("q",) if self.narrow else ("q", "k", "v")
        operands = {name: x.to(dtype) if name in cast else x for name, x in self.operands.items()}
        return twin(**operands, window=self.window, **options)


def check(case: Case, result: tuple[Tensor, Tensor], obeys_rule, **options: object) -> None:
    exact, exact_lse = case.twin(torch.float32, **options)
    obeys_rule(result[0], exact, case.twin(case.dtype, **options)[0])
    torch.testing.assert_close(result[1], exact_lse, rtol=1e-4, atol=4e-3)  # of rounded weights


def extras(case: Case, name: str) -> dict[str, object]:
    q, table = case.operands["q"], case.operands["req_to_token"]
    if name == "mask":
        return {"mask": torch.rand((q.shape[0], table.shape[1]), device="cuda") < 0.7}
    return {"softcap": {"softcap": 5.0}, "sinks": {"sinks": torch.randn(case.n_heads, device="cuda")}, "none": {}}[name]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_head_sizes_over_e4m3(fresh_seed, obeys_rule, head_dim, dtype):
    case = Case(head_dim=head_dim, dtype=dtype)
    check(case, case.run(), obeys_rule)
    case = Case(head_dim=head_dim, dtype=dtype, lens=[300, 1, 129, 7, 64, 65, 2000, 128], q_lens=ONES)
    check(case, case.decode(), obeys_rule)


@pytest.mark.parametrize("name", ["mask", "softcap", "sinks"])
@pytest.mark.parametrize("window", [None, 33])
def test_options_over_e4m3(fresh_seed, obeys_rule, name, window):
    case = Case(window=window, page_size=1)
    options = extras(case, name)
    check(case, case.run(**options), obeys_rule, **options)
    case = Case(head_dim=128, window=window, lens=[300, 4, 129, 9, 64, 65, 500, 128], q_lens=[4] * 8)
    options = extras(case, name)
    check(case, case.decode(q_len=4, **options), obeys_rule, **options)


@pytest.mark.parametrize("heads", [(12, 1), (16, 2), (9, 3)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_query_heads_over_e4m3(fresh_seed, obeys_rule, heads, head_dim):
    case = Case(*heads, head_dim=head_dim, q_lens=ONES, lens=[300, 1, 129, 7, 64, 65, 2000, 128])
    check(case, case.decode(), obeys_rule)


def test_contiguous_e4m3(fresh_seed, obeys_rule):
    case = Case(lens=[5, 200, 64], q_lens=[1, 1, 1])
    table = case.operands.pop("req_to_token").long()
    inside = table < 2**30
    rows = table.where(inside, 0)
    for name in ("k", "v", "k_scale", "v_scale"):
        case.operands[name] = case.operands[name][rows].contiguous()
    check(case, case.run(), obeys_rule)
    check(case, case.decode(), obeys_rule)
    check(case, case.run(scalar_attention), obeys_rule)


def test_reads_what_the_write_kernel_wrote(fresh_seed, obeys_rule):
    """Layout and scales of qkv_norm_rope_write are those that attention reads."""
    n, heads, kv_heads, dim = 200, 6, 2, 64
    qkv = torch.randn((n, (heads + 2 * kv_heads) * dim), device="cuda").bfloat16()
    pools = [torch.zeros((256, kv_heads, dim), device="cuda").to(torch.float8_e4m3fn) for _ in range(2)]
    scales = [torch.full((256, kv_heads), torch.nan, device="cuda") for _ in range(2)]
    slots = torch.randperm(256, device="cuda")[:n]
    q = qkv_norm_rope_write(
        qkv, None, None, None, *pools, slots, heads, kv_heads, k_scale=scales[0], v_scale=scales[1]
    )  # fmt: skip
    indptr = torch.tensor([0, n], dtype=torch.int32, device="cuda")
    lens = torch.tensor([n], dtype=torch.int32, device="cuda")
    options = {"req_to_token": slots.int().unsqueeze(0), "k_scale": scales[0], "v_scale": scales[1]}
    out = prefill_attention(q, *pools, indptr, lens, **options)
    obeys_rule(out, twin(q.float(), *pools, indptr, lens, **options)[0], twin(q, *pools, indptr, lens, **options)[0])
    wide = [x.reshape(n, kv_heads, dim) for x in qkv[:, heads * dim :].chunk(2, -1)]
    lossless = twin(q.float(), *(x.float() for x in wide), indptr, lens, req_to_token=torch.arange(n).cuda()[None])[0]
    assert (out.float() - lossless).abs().max() < 0.3, "e4m3 has three bits, and no more is lost"


@pytest.mark.parametrize("head_dim", [64, 128])
def test_deterministic_mode_over_e4m3(fresh_seed, head_dim):
    """The reduction contract: with chunks of fixed length a row's bits do not depend on its batch."""
    case = Case(head_dim=head_dim, lens=[700, 64, 1300, 65], q_lens=[1] * 4)
    together, _ = case.decode(fixed_len=256)
    for b in range(4):
        one = Case(head_dim=head_dim, lens=[case.lens[b]], q_lens=[1])
        one.operands |= {name: case.operands[name] for name in ("k", "v", "k_scale", "v_scale")}
        one.operands["q"] = case.operands["q"][b : b + 1]
        one.operands["req_to_token"] = case.operands["req_to_token"][b : b + 1]
        assert torch.equal(one.decode(fixed_len=256)[0][0], together[b])


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("name", ["none", "mask", "softcap", "sinks"])
@pytest.mark.parametrize("window", [None, 33])
def test_scalar_twin(fresh_seed, obeys_rule, narrow, name, window):
    """Row K14's second opinion obeys the rule by itself, with lse to fp32's precision."""
    case = Case(narrow=narrow, window=window)
    options = extras(case, name)
    out, lse = case.run(scalar_attention, **options)
    exact, exact_lse = case.twin(torch.float32, **options)
    obeys_rule(out, exact, case.twin(case.dtype, **options)[0])
    torch.testing.assert_close(lse, exact_lse, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_scalar_twin_of_head_sizes(fresh_seed, obeys_rule, head_dim, dtype):
    case = Case(head_dim=head_dim, dtype=dtype, narrow=False)
    out, _ = case.run(scalar_attention)
    obeys_rule(out, case.twin(torch.float32)[0], case.twin(dtype)[0])


def test_a_softcap_lifts_nothing_hidden(fresh_seed, obeys_rule):
    """A cap of 1 would give hidden keys a visible weight if it came behind the mask."""
    case = Case(narrow=False)
    check(case, case.run(softcap=1.0), obeys_rule, softcap=1.0)


@pytest.mark.parametrize("name", ["attention_scalar_out", "attention_prefill_out"])
def test_opcheck(fresh_seed, name):
    """Registered as torch wants it; with an e4m3 cache, too.

    There the schema is checked by hand: ``test_schema`` compares what went in by ``allclose``, which multiplies, and torch
    multiplies no e4m3.
    """
    op = getattr(torch.ops.astrai, name).default
    for case in (Case(narrow=False), Case()):
        o = case.operands
        out = torch.empty_like(o["q"])
        arguments = (
            o["q"], o["k"], o["v"], o["qo_indptr"], o["seq_lens"], o["req_to_token"], None, out, None, None, None, 0.125,
            0, 0.0, o.get("k_scale"), o.get("v_scale"),
        )  # fmt: skip
        if not case.narrow:
            torch.library.opcheck(op, arguments)
            continue
        others = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        torch.library.opcheck(op, arguments, test_utils=others)
        out.fill_(torch.nan)
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        before = [x.view(torch.uint8).clone() for x in tensors]
        assert op(*arguments) is None
        changed = [not torch.equal(x.view(torch.uint8), was) for x, was in zip(tensors, before, strict=True)]
        assert changed == [x is out for x in tensors]
