"""The flash-attn backend (A3, A4) over a stand-in of the package: its functions computed by SDPA, its demands checked."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from astrai_core.attention import flash
from astrai_core.attention.backend import AttentionSpec, resolve_backend
from astrai_core.attention.flash import FlashAttnBackend
from astrai_core.attention.torch_native import TorchNativeBackend
from astrai_core.errors import BackendError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BF16 = torch.bfloat16


def attend(q, k, v, scale, causal, window_size):
    """One request: q ``[q_len, heads, dim]`` are the last positions of k and v ``[kv_len, kv_heads, dim]``."""
    query = torch.arange(len(k) - len(q), len(k)).unsqueeze(1)
    key = torch.arange(len(k))
    assert causal, "attention of a decoder"
    assert window_size == (-1, -1) or (window_size[0] >= 0 and window_size[1] == 0)
    seen = (key <= query) & (key >= query - window_size[0] if window_size[0] >= 0 else True)
    q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


class StandIn(ModuleType):
    """flash_attn, or flash_attn_interface of FlashAttention-3, as far as the backend uses it."""

    def __init__(self, generation: flash.Generation) -> None:
        super().__init__(generation.module)
        self.generation = generation
        self.calls: list[tuple[str, int]] = []

    def flash_attn_with_kvcache(
        self, q, k_cache, v_cache, *, cache_seqlens, cache_batch_idx=None, softmax_scale=None, causal=False,
        window_size=(-1, -1), **named,
    ):  # fmt: skip
        self.calls.append(("with_kvcache", k_cache.data_ptr()))
        table = named.pop(self.generation.page_argument, None)
        if named:
            raise TypeError(f"flash_attn_with_kvcache() got an unexpected keyword argument {next(iter(named))!r}")
        for index in (cache_seqlens, cache_batch_idx, table):
            assert index is None or (index.dtype == torch.int32 and index.stride(-1) == 1 and len(index) == len(q))
        assert q.dim() == k_cache.dim() == v_cache.dim() == 4
        assert table is None or cache_batch_idx is None, "flash-attn takes one or the other"
        assert table is None or k_cache.shape[1] % self.generation.page_multiple == 0
        low = window_size[0]
        out = []
        for i, end in enumerate(cache_seqlens.tolist()):
            first = max(0, end - low - 1) if low >= 0 else 0
            if table is None:
                row = i if cache_batch_idx is None else int(cache_batch_idx[i])
                keys, values = k_cache[row, first:end], v_cache[row, first:end]
            else:
                at = torch.arange(first, end)
                pages, inside = table[i, at // k_cache.shape[1]].long(), at % k_cache.shape[1]
                keys, values = k_cache[pages, inside], v_cache[pages, inside]
            out.append(attend(q[i], keys, values, softmax_scale, causal, window_size))
        return torch.stack(out)

    def flash_attn_varlen_func(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1),
    ):  # fmt: skip
        self.calls.append(("varlen", k.data_ptr()))
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert cu_seqlens_q.is_contiguous() and cu_seqlens_k.is_contiguous()
        q_lens, k_lens = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
        assert (max(q_lens), max(k_lens), sum(k_lens)) == (max_seqlen_q, max_seqlen_k, len(k))
        parts = zip(q.split(q_lens), k.split(k_lens), v.split(k_lens), strict=True)
        return torch.cat([attend(*part, softmax_scale, causal, window_size) for part in parts])


@pytest.fixture
def install(monkeypatch):
    """Puts a stand-in where the package would be, and a GPU of some capability; the probe itself runs on the CPU."""
    monkeypatch.delenv("ASTR_BACKEND", raising=False)
    for generation in flash.GENERATIONS:
        monkeypatch.setitem(sys.modules, generation.module, None)
    flash.probe.cache_clear()

    def put(number: int, capability: tuple[int, int]) -> StandIn:
        flash.probe.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        stand_in = StandIn(flash.GENERATIONS[number])
        monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
        return stand_in

    yield put
    flash.probe.cache_clear()


FA3, FA2 = 0, 1


@pytest.mark.parametrize(
    ("number", "options", "in_place"),
    [
        (FA2, {"page_size": 48, "contiguous": True}, True),
        (FA3, {"page_size": 48, "contiguous": True}, True),
        (FA2, {"page_size": 256}, True),
        (FA2, {"page_size": 16}, False),
        (FA3, {"page_size": 16}, True),
        (FA3, {"page_size": 1}, True),
        (FA3, {"page_size": 4, "group_by_window": True}, True),
        (FA2, {"page_size": 4, "group_by_window": True}, False),
    ],
    ids=["fa2-contiguous", "fa3-contiguous", "fa2-256", "fa2-16", "fa3-16", "fa3-1", "fa3-groups", "fa2-groups"],
)
def test_flash_backend_equals_torch(install, served, number, options, in_place):
    """A3: decodes read the pool in place where the library can address it; the rest is gathered, windows included."""
    stand_in = install(number, (9, 0))
    ours = served(FlashAttnBackend(), **options)
    for mine, theirs in zip(ours, served(TorchNativeBackend(), page_size=16), strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-4, rtol=1e-4)
    probing, (n_decode, n_mixed) = 1, (4, 4)
    names = [name for name, _ in stand_in.calls]
    assert names.count("with_kvcache") == probing + (n_decode * 3 if in_place else 0)
    assert names.count("varlen") == probing + (n_mixed + (0 if in_place else n_decode)) * 3


@pytest.mark.parametrize(
    ("number", "options", "shape"),
    [
        (FA2, {"page_size": 32, "contiguous": True}, (3, 32, 2, 64)),
        (FA3, {"page_size": 8}, ((3 * 4 * 8 + 16) // 8, 8, 2, 64)),
    ],
    ids=["contiguous", "paged"],
)
def test_decoding_in_place_copies_nothing(install, step_pool, monkeypatch, number, options, shape):
    """A3: the library is given a view of the pool's own memory."""
    stand_in = install(number, (9, 0))
    pool = step_pool([None], 2, 64, 3, 32, **options)
    spec = AttentionSpec(layer=0, n_heads=4, n_kv_heads=2, head_dim=64)
    pool.step({0: 5, 2: 9})
    cache = pool.step({2: 1, 0: 1})
    for buffer in pool.buffers[0]:
        buffer.nan_to_num_(0.5)
    seen = []
    original = stand_in.flash_attn_with_kvcache
    stand_in.flash_attn_with_kvcache = lambda q, k, v, **named: (
        seen.append((k, v, named)),
        original(q, k, v, **named),
    )[1]
    flash.probe.cache_clear()
    backend = FlashAttnBackend()
    backend.plan(cache, [spec])
    seen.clear()
    out = backend.fwd_decode(torch.randn(2, 4, 64), spec, cache)
    assert out.shape == (2, 4, 64)
    ((k, v, named),) = seen
    assert k.data_ptr() == cache.k_buffers[0].data_ptr()
    assert v.data_ptr() == cache.v_buffers[0].data_ptr()
    assert k.shape == v.shape == shape
    assert named["cache_seqlens"] is cache.groups[0].seq_lens
    assert named["softmax_scale"] == 64**-0.5
    if pool.contiguous:
        assert named["cache_batch_idx"].tolist() == [2, 0]


def test_the_generation_follows_the_card(install):
    """A4: FlashAttention-3 on Hopper if it is there, else FlashAttention-2; probed once."""
    fa2 = install(FA2, (9, 0))
    assert flash.probe(CPU)[0].generation.module == "flash_attn"
    n_calls = len(fa2.calls)
    assert n_calls == 2, "both functions ran"
    assert flash.probe(CPU)[0] is not None
    assert len(fa2.calls) == n_calls
    install(FA3, (9, 0))
    assert flash.probe(CPU)[0].generation.module == "flash_attn_interface"
    install(FA3, (8, 6))
    assert flash.probe(CPU)[0].generation.module == "flash_attn"


def test_a_missing_package(install, monkeypatch):
    """A4: named with the remedy for who asks for it; else the next backend is taken."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(BackendError, match="'flash' cannot run on cuda: flash_attn cannot be imported .*; pip install"):
        resolve_backend("flash", CUDA, 64, BF16)
    monkeypatch.setattr("astrai_core.attention.cuda.CudaBackend.unavailable", staticmethod(lambda *needs: "absent"))
    assert type(resolve_backend(None, CUDA, 64, BF16)) is TorchNativeBackend


def test_a_package_that_does_not_work(install, monkeypatch):
    """A4: kernels that fail, answer wrongly or have another interface are found out before the first request."""
    for broken, said in (
        (
            lambda *a, **b: (_ for _ in ()).throw(RuntimeError("no kernel image\nis available")),
            r"run on cpu \(no kernel image\)",
        ),
        (lambda q, *a, **b: q, "computes wrong results"),
        (lambda q, k, v: q, "does not run on cpu .*unexpected keyword"),
    ):
        stand_in = install(FA2, (8, 9))
        stand_in.flash_attn_with_kvcache = broken
        library, reason = flash.probe(CPU)
        assert library is None
        assert flash.REMEDY in reason
        with pytest.raises(AssertionError, match=said):
            raise AssertionError(reason)
    stand_in = install(FA2, (8, 9))
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    assert "has no attribute 'flash_attn_with_kvcache'" in flash.probe(CPU)[1]
    install(FA2, (7, 5))
    assert "compute capability 7.5, flash-attn needs 8.0" in flash.probe(CPU)[1]


@pytest.mark.parametrize(
    ("needs", "said"),
    [
        ((CPU, 64, BF16), "it needs a CUDA device"),
        ((CUDA, 264, BF16), "head_dim is 264, flash-attn takes multiples of 8 up to 256"),
        ((CUDA, 20, BF16), "head_dim is 20"),
        ((CUDA, 64, torch.float32), "dtype torch.float32"),
        ((CUDA, 64, BF16, torch.float16), "the KV cache torch.float16"),
    ],
)
def test_what_it_cannot_run(install, needs, said):
    install(FA2, (9, 0))
    with pytest.raises(BackendError, match=said):
        resolve_backend("flash", *needs)


def test_importing_the_backend_imports_no_flash_attn(monkeypatch):
    """A4: the package is looked for at first use."""
    monkeypatch.setattr(importlib, "import_module", lambda name: pytest.fail(f"{name} was imported"))
    monkeypatch.delitem(sys.modules, "astrai_core.attention.flash")
    import astrai_core.attention.flash as again

    assert again.probe.cache_info().currsize == 0
