"""The CUDA backend's choice and logic (A1, A2, A5, A6, A9), with kernels that are stood in for by torch on the CPU."""

from __future__ import annotations

import importlib.metadata
import inspect
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from astrai_core import kernels, ops
from astrai_core.attention import flash
from astrai_core.attention.backend import (
    ENVIRONMENT,
    PRIORITY,
    AttentionBackend,
    AttentionBackendFactory,
    AttentionSpec,
    resolve_backend,
)
from astrai_core.attention.cuda import CudaBackend
from astrai_core.attention.flash import FlashAttnBackend
from astrai_core.attention.rotary import Rope
from astrai_core.attention.torch_native import TorchNativeBackend
from astrai_core.errors import BackendError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BF16, FP32 = torch.bfloat16, torch.float32
READY = kernels.KernelStatus(True, "0.1.0+cu128", "", "")


class FakePlan:
    """Stands in for astrai_kernels.DecodePlan: remembers what it was made for and the step's lengths."""

    made: list[FakePlan]

    def __init__(self, max_batch, n_heads, n_kv_heads, head_dim, device, *, q_len=1, window=None):
        self.max_batch, self.shape, self.window = max_batch, (n_heads, n_kv_heads, head_dim), window
        self.n_updates = self.n_runs = 0
        self.device = device
        FakePlan.made.append(self)

    def update(self, seq_lens, req_indices=None, *, overlap=False):
        assert seq_lens.dtype == torch.int32
        assert req_indices is not None and req_indices.dtype == torch.int64
        assert seq_lens.shape == req_indices.shape
        assert len(seq_lens) <= self.max_batch
        assert seq_lens.is_contiguous() and req_indices.is_contiguous()
        self.n_updates += 1
        self.seq_lens, self.req_indices = seq_lens, req_indices


def fake_decode(q, k, v, plan, *, req_to_token, scale, out, overlap=False):
    """Stands in for astrai_kernels.decode_attention; reads what a query can see and nothing else."""
    assert q.shape == (len(plan.seq_lens), plan.shape[0], plan.shape[2])
    assert k.shape[1:] == v.shape[1:] == plan.shape[1:]
    assert req_to_token.dtype == torch.int32
    assert not any(stride % 8 for tensor in (q, k, v) for stride in tensor.stride()[:-1])
    plan.n_runs += 1
    assert out.shape == q.shape
    for i, (row, end) in enumerate(zip(plan.req_indices.tolist(), plan.seq_lens.tolist(), strict=True)):
        slots = req_to_token[row, max(0, end - (plan.window or end)) : end].long()
        keys, values = (x[slots].to(q).repeat_interleave(plan.shape[0] // plan.shape[1], 1) for x in (k, v))
        weights = (torch.einsum("hd,khd->hk", q[i], keys) * scale).softmax(-1)
        out[i] = torch.einsum("hk,khd->hd", weights, values)
    return out


def fake_prefill(q, k, v, qo_indptr, seq_lens, *, req_to_token, req_indices, scale, window, out):
    """Stands in for astrai_kernels.prefill_attention; leaves the rows in front of its requests alone."""
    assert qo_indptr.dtype == seq_lens.dtype == req_to_token.dtype == torch.int32
    assert req_indices.dtype == torch.int64
    assert len(qo_indptr) == len(seq_lens) + 1 == len(req_indices) + 1
    starts = qo_indptr.tolist()
    for b, (row, end) in enumerate(zip(req_indices.tolist(), seq_lens.tolist(), strict=True)):
        for token in range(starts[b], starts[b + 1]):
            position = end - (starts[b + 1] - token)
            slots = req_to_token[row, max(0, position + 1 - (window or end)) : position + 1].long()
            keys, values = (buffer[slots].repeat_interleave(q.shape[1] // k.shape[1], 1) for buffer in (k, v))
            weights = (torch.einsum("hd,khd->hk", q[token], keys) * scale).softmax(-1)
            out[token] = torch.einsum("hk,khd->hd", weights, values)
    return out


def fake_write(
    qkv,
    position_ids,
    cos,
    sin,
    k_buffer,
    v_buffer,
    out_cache_loc,
    n_heads,
    n_kv_heads,
    *,
    q_norm,
    k_norm,
    eps,
    interleaved,
    overlap,
):
    """Stands in for astrai_kernels.qkv_norm_rope_write: the q part as it is, and nothing written."""
    return qkv.view(len(qkv), n_heads + 2 * n_kv_heads, -1)[:, :n_heads]


def fake_qkv_decode(
    qkv, position_ids, cos, sin, k_buffer, v_buffer, out_cache_loc, plan, *, req_to_token, q_norm, k_norm, eps,
    interleaved, scale, overlap,
):  # fmt: skip
    """Stands in for astrai_kernels.qkv_decode_attention: writes and attends as the ops' twins and fake_decode do."""
    rope = None if cos is None else Rope(cos, sin, position_ids, interleaved)
    n_heads, n_kv_heads, _ = plan.shape
    named = {"rope": rope, "q_norm": q_norm, "k_norm": k_norm, "eps": eps, "overlap": overlap}
    q = ops.qkv_norm_rope_write(qkv, k_buffer, v_buffer, out_cache_loc, n_heads, n_kv_heads, **named)
    return fake_decode(q, k_buffer, v_buffer, plan, req_to_token=req_to_token, scale=scale, out=torch.empty_like(q))


def test_the_stand_ins_take_what_the_kernels_take():
    """Names, kinds and order of the parameters; what the backend passes to a stand-in, the kernel accepts."""
    attention, prefill, qkv, both = (
        pytest.importorskip(f"astrai_kernels.{name}") for name in ("attention", "prefill", "qkv", "qkv_attention")
    )
    for fake, real in (
        (FakePlan, attention.DecodePlan),
        (FakePlan.update, attention.DecodePlan.update),
        (fake_decode, attention.decode_attention),
        (fake_prefill, prefill.prefill_attention),
        (fake_write, qkv.qkv_norm_rope_write),
        (fake_qkv_decode, both.qkv_decode_attention),
    ):
        real_parameters = inspect.signature(real).parameters
        ours = [(p.name, p.kind) for p in inspect.signature(fake).parameters.values()]
        assert ours == [(name, p.kind) for name, p in real_parameters.items() if name in dict(ours)]
        left = [p for name, p in real_parameters.items() if name not in dict(ours)]
        assert all(p.default is not p.empty for p in left), "the backend leaves out what has a default"
    known = {name: getattr(both, name) for name in ("HEAD_DIMS", "MAX_GROUP", "ROTARY_MULTIPLE")}
    assert known.items() <= vars(FAKE_QKV_ATTENTION).items()


FAKE_QKV_ATTENTION = SimpleNamespace(
    qkv_decode_attention=fake_qkv_decode, HEAD_DIMS=(64, 128), MAX_GROUP=8, ROTARY_MULTIPLE=16
)


@pytest.fixture
def by_hand(monkeypatch):
    """A machine with a GPU of capability 9.0, the stood-in kernels, and no flash-attn."""
    FakePlan.made = []
    fake = SimpleNamespace(DecodePlan=FakePlan, decode_attention=fake_decode, HEAD_DIMS=(64, 128))
    monkeypatch.setattr(kernels, "status", lambda: READY)
    prefill = SimpleNamespace(prefill_attention=fake_prefill)
    modules = {"attention": fake, "prefill": prefill, "qkv_attention": FAKE_QKV_ATTENTION}
    monkeypatch.setattr(kernels, "module", modules.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(flash, "probe", lambda device: (None, "not installed; install it"))
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    return monkeypatch


def test_the_backends_by_name_and_their_order(by_hand):
    """A1, A5: cuda before flash before torch."""
    assert PRIORITY == ("cuda", "flash", "torch_native")
    classes = {"cuda": CudaBackend, "flash": FlashAttnBackend, "torch": TorchNativeBackend}
    assert {name: AttentionBackendFactory.get(name) for name in classes} == classes
    assert type(resolve_backend(None, CUDA, 64, BF16)) is CudaBackend
    library = flash.FlashLibrary(flash.GENERATIONS[1], fake_decode, fake_decode)
    by_hand.setattr(flash, "probe", lambda device: (library, ""))
    assert type(resolve_backend(None, CUDA, 64, BF16)) is CudaBackend
    by_hand.setattr(kernels, "status", lambda: kernels.KernelStatus(False, None, "it is not installed", "get it"))
    assert type(resolve_backend(None, CUDA, 64, BF16)) is FlashAttnBackend
    by_hand.setattr(flash, "probe", lambda device: (None, "not installed"))
    assert type(resolve_backend(None, CUDA, 64, BF16)) is TorchNativeBackend
    by_hand.setenv(ENVIRONMENT, "torch")
    by_hand.setattr(kernels, "status", lambda: READY)
    assert type(resolve_backend(None, CUDA, 64, BF16)) is TorchNativeBackend, "the environment is read when asked"


@pytest.mark.parametrize(
    ("needs", "said"),
    [
        ((CPU, 64, BF16, BF16), "it needs a CUDA device; use"),
        ((CUDA, 72, BF16, BF16), "head_dim is 72, the kernels know 64, 128; use the backend torch_native"),
        (
            (CUDA, 64, FP32, FP32),
            "dtype torch.float32 .* take float16 or bfloat16, .* for the cache; load the model in",
        ),
        ((CUDA, 64, BF16, FP32), "dtype torch.bfloat16 and the KV cache torch.float32"),
    ],
)
def test_what_the_kernels_cannot_run_is_left_to_torch_unless_asked_for(by_hand, needs, said):
    """A2: one line with the remedy for who named the backend; automatic choice goes on."""
    for choice in ("cuda", CudaBackend):
        with pytest.raises(BackendError, match=said) as refusal:
            resolve_backend(choice, *needs)
        assert "\n" not in str(refusal.value)
    assert type(resolve_backend(None, *needs)) is TorchNativeBackend
    by_hand.setenv(ENVIRONMENT, "cuda")
    with pytest.raises(BackendError, match=said):
        resolve_backend(None, *needs)


def test_an_old_card(by_hand):
    by_hand.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(
        BackendError, match="compute capability 7.5, the kernels need 8.0; use the backend torch_native"
    ):
        resolve_backend("cuda", CUDA, 64, BF16)
    assert type(resolve_backend(None, CUDA, 64, BF16)) is TorchNativeBackend
    by_hand.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert type(resolve_backend("cuda", CUDA, 64, torch.float16)) is CudaBackend


def test_a_wheel_whose_compiled_module_was_deleted(monkeypatch, served):
    """A2: everything still runs; who asks for the kernels by name learns what to do."""

    def build_info():
        raise ImportError("no compiled module here")

    wheel = ModuleType("astrai_kernels")
    wheel.build_info = build_info
    monkeypatch.setitem(sys.modules, "astrai_kernels", wheel)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9")
    monkeypatch.setattr(flash, "probe", lambda device: (None, "not installed"))
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    kernels.status.cache_clear()
    try:
        assert kernels.status().version == "9.9"
        backend = resolve_backend(None, CUDA, 64, BF16)
        assert type(backend) is TorchNativeBackend
        for ours, whole in zip(served(backend, page_size=16), served(None), strict=True):
            torch.testing.assert_close(ours, whole, atol=2e-4, rtol=1e-4)
        message = "astrai-kernels cannot be used: its extension does not load: no compiled module here; reinstall"
        with pytest.raises(BackendError, match=message):
            resolve_backend("cuda", CUDA, 64, BF16)
        with pytest.raises(BackendError, match="astrai-kernels cannot be used"):
            CudaBackend()
    finally:
        kernels.status.cache_clear()


def test_which_backends_can_be_captured():
    """A6: asked of the class, False unless it says otherwise."""
    assert not AttentionBackend.supports_graph()
    assert not TorchNativeBackend.supports_graph()
    assert not FlashAttnBackend.supports_graph()
    assert CudaBackend.supports_graph()


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 1},
        {"page_size": 16},
        {"page_size": 48, "contiguous": True},
        {"page_size": 4, "group_by_window": True},
    ],
    ids=["page1", "page16", "contiguous", "groups"],
)
def test_cuda_backend_equals_torch(by_hand, served, options):
    """A2, A9: chunks, mixed steps and decodes, windows and groups, whatever the pages."""
    backend = CudaBackend()
    for ours, theirs in zip(served(backend, **options), served(TorchNativeBackend(), page_size=16), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)
    assert len({plan.window for plan in FakePlan.made}) == len(FakePlan.made) <= 2, "one plan for each kind of layer"
    for plan in FakePlan.made:
        assert (plan.max_batch, plan.shape, plan.device) == (5, (2, 1, 64), CPU), "sized by the table's rows"
        assert plan.n_updates == 7, "once in each step with single queries, never per layer"
    assert sum(plan.n_runs for plan in FakePlan.made) == 7 * 3


def test_plans_keep_their_addresses(by_hand, step_pool):
    """W1: steps of any batch share the plan that was made first; other shapes of layers get their own."""
    backend = CudaBackend()
    specs = [AttentionSpec(layer=i, n_heads=4, n_kv_heads=2, head_dim=64, window=w) for i, w in enumerate((None, 8))]
    pool = step_pool([None, 8], 2, 64, 6, 32, 4)
    for rows in ((0,), (0, 3, 5), (5, 1)):
        cache = pool.step(dict.fromkeys(rows, 1))
        backend.plan(cache, specs)
        assert [cache.groups[0].plan.decode[window] for window in (None, 8)] == FakePlan.made
        for plan in FakePlan.made:
            assert plan.req_indices.tolist() == list(rows)
            assert plan.seq_lens.tolist() == [pool.lens[row] for row in rows]
    other = AttentionSpec(layer=0, n_heads=2, n_kv_heads=2, head_dim=64)
    backend.plan(step_pool([None], 2, 64, 6, 32, 4).step({0: 1}), [other])
    assert [plan.shape for plan in FakePlan.made] == [(4, 2, 64), (4, 2, 64), (2, 2, 64)]


def test_a_step_of_chunks_plans_no_decode(by_hand, step_pool):
    backend = CudaBackend()
    spec = AttentionSpec(layer=0, n_heads=4, n_kv_heads=2, head_dim=64)
    backend.plan(step_pool([None], 2, 64, 2, 32, 4).step({0: 3, 1: 2}), [spec])
    assert FakePlan.made == []


def test_the_kernels_write_keys_into_the_pool_where_the_types_allow(by_hand, step_pool):
    """Decision 3: one launch gets tables and positions, not the expanded angles; another dtype of the pool is torch's."""
    calls = []

    def write(*arguments, **named):
        calls.append(inspect.signature(fake_write).bind(*arguments, **named).arguments)
        return fake_write(*arguments, **named)

    by_hand.setattr(kernels, "module", {"qkv": SimpleNamespace(qkv_norm_rope_write=write)}.__getitem__)
    by_hand.setattr(ops, "by_kernel", lambda x: True)
    rope = Rope(torch.ones(8, 32), torch.zeros(8, 32), torch.tensor([0, 1]), interleaved=True)
    spec = AttentionSpec(layer=0, n_heads=2, n_kv_heads=1, head_dim=64, norm_eps=1e-5)
    cache = step_pool([None], 1, 64, 1, 8, 4).step({0: 2})
    k, v, metadata = cache.of(0)
    qkv, norms = torch.randn(2, 4 * 64), (torch.ones(64), torch.ones(64))
    TorchNativeBackend().qkv_norm_rope_write(qkv, spec, cache, rope, *norms)
    given = dict(zip(("q_norm", "k_norm"), norms, strict=True)) | {"eps": 1e-5, "interleaved": True, "overlap": True}
    given |= {"qkv": qkv, "position_ids": rope.position_ids, "cos": rope.cos, "sin": rope.sin, "k_buffer": k}
    given |= {"v_buffer": v, "out_cache_loc": metadata.out_cache_loc, "n_heads": 2, "n_kv_heads": 1}
    assert calls[0].keys() == given.keys()
    assert all(calls[0][name] is value for name, value in given.items())
    assert rope._of_tokens is None, "nothing was expanded"
    narrow = step_pool([None], 1, 64, 1, 8, 4, dtype=torch.float16).step({0: 2})
    by_hand.setattr(ops, "rotary", lambda x, rope: x)
    TorchNativeBackend().qkv_norm_rope_write(qkv.to(BF16), spec, narrow, rope)
    assert len(calls) == 1
    assert not narrow.of(0)[0][narrow.groups[0].out_cache_loc].isnan().any()


@pytest.mark.parametrize(
    ("changed", "one_launch"),
    [
        ({}, True),
        ({"lens": 8}, True),
        ({"norms": True, "interleaved": True}, True),
        ({"use_rope": False, "rotary_dim": 24}, True),
        ({"window": 4}, True),
        ({"lens": 9}, False),
        ({"n_heads": 18}, False),
        ({"head_dim": 96}, False),
        ({"rotary_dim": 24}, False),
        ({"cache": torch.float16}, False),
        ({"dtype": FP32, "cache": FP32}, False),
        ({"reads_own_keys": True}, False),
        ({"chunk": True}, False),
        ({"grad": True}, False),
    ],
    ids=str,
)
def test_few_single_queries_are_one_launch(by_hand, step_pool, changed, one_launch):
    """Issue 5, Deliver 4: no launch between the projection and attention of up to eight requests; else two, of the same
    result."""
    options = {"lens": 3, "n_heads": 4, "head_dim": 64, "dtype": BF16, "cache": BF16, "use_rope": True, "window": None}
    options |= {"rotary_dim": 64, "interleaved": False, "norms": False, "reads_own_keys": False, "chunk": False}
    o = SimpleNamespace(**{**options, "grad": False, **changed})
    calls = []

    def once(*arguments, **named):
        calls.append(named)
        return fake_qkv_decode(*arguments, **named)

    by_hand.setattr(FAKE_QKV_ATTENTION, "qkv_decode_attention", once)
    backend = CudaBackend()
    spec = AttentionSpec(0, o.n_heads, 2, o.head_dim, window=o.window, use_rope=o.use_rope, norm_eps=1e-5)
    pools = [step_pool([None], 2, o.head_dim, 10, 64, 4, dtype=o.cache) for _ in "ab"]
    lens = dict.fromkeys(range(o.lens), 1)
    angles = torch.rand(64, o.rotary_dim // 2)
    results = []
    torch.manual_seed(1)
    qkv = torch.randn(o.lens + o.chunk, (o.n_heads + 4) * o.head_dim).to(o.dtype)
    norms = torch.rand(2, o.head_dim).to(o.dtype) if o.norms else (None, None)
    for pool, attend in zip(pools, (backend.attend, lambda *a: AttentionBackend.attend(backend, *a)), strict=True):
        for buffer in pool.step(dict.fromkeys(range(o.lens), 5)).of(0)[:2]:
            buffer.fill_(0.5)
        cache = pool.step(lens | {0: 2} if o.chunk else lens)
        cache.groups[0].reads_own_keys = o.reads_own_keys
        rope = Rope(angles.cos(), angles.sin(), torch.arange(len(qkv)), o.interleaved)
        with torch.set_grad_enabled(o.grad):
            backend.plan(cache, [spec])
            results.append(attend(qkv, spec, cache, rope, *norms))
    assert torch.equal(*results)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(pools[0].buffers[0], pools[1].buffers[0], strict=True))
    assert len(calls) == one_launch
    if one_launch:
        assert calls[0]["overlap"] is ops.OVERLAP
        assert calls[0]["eps"] == 1e-5
        assert calls[0]["scale"] == spec.scale
