"""The attention seam: choice of backend (A1, A5, A6, A8), and the torch backend over a scattered pool (C1, A7)."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astrai_core.attention import backend as seam
from astrai_core.attention.backend import AttentionBackend, AttentionBackendFactory, AttentionSpec, resolve_backend
from astrai_core.attention.metadata import AttentionMetadata, KVCache
from astrai_core.attention.torch_native import TorchNativeBackend
from astrai_core.errors import BackendError, RegistryError

CPU = torch.device("cpu")


class Fake(TorchNativeBackend):
    """Stands in for a backend that may be missing and can be captured."""

    reason: str | None = None

    @staticmethod
    def unavailable(device, head_dim):
        return Fake.reason

    @staticmethod
    def supports_graph():
        return True


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(AttentionBackendFactory, "_entries", dict(AttentionBackendFactory._entries))
    monkeypatch.delenv(seam.ENVIRONMENT, raising=False)
    monkeypatch.setattr(Fake, "reason", None)
    AttentionBackendFactory._entries["cuda"] = Fake
    return Fake


def test_selection_by_name_class_instance(fake):
    """A1."""
    instance = TorchNativeBackend()
    assert resolve_backend(instance, CPU, 64) is instance
    assert type(resolve_backend("torch_native", CPU, 64)) is TorchNativeBackend
    assert type(resolve_backend("torch", CPU, 64)) is TorchNativeBackend
    assert type(resolve_backend(Fake, CPU, 64)) is Fake
    with pytest.raises(RegistryError, match="unknown name 'torhc'"):
        resolve_backend("torhc", CPU, 64)


def test_priority_and_environment_at_resolve_time(fake, monkeypatch):
    """A5."""
    assert type(resolve_backend(None, CPU, 64)) is Fake, "cuda comes first when it can run"
    monkeypatch.setenv(seam.ENVIRONMENT, "torch_native")
    assert type(resolve_backend(None, CPU, 64)) is TorchNativeBackend
    monkeypatch.delenv(seam.ENVIRONMENT)
    fake.reason = "no device"
    assert type(resolve_backend(None, CPU, 64)) is TorchNativeBackend, "priority falls through"


def test_a_backend_chosen_by_hand_is_never_replaced(fake, monkeypatch):
    fake.reason = "no device; install one"
    for choose in (lambda: resolve_backend("cuda", CPU, 64), lambda: resolve_backend(Fake, CPU, 64)):
        with pytest.raises(BackendError, match="cannot run on cpu: no device; install one"):
            choose()
    monkeypatch.setenv(seam.ENVIRONMENT, "cuda")
    with pytest.raises(BackendError, match="'cuda' cannot run"):
        resolve_backend(None, CPU, 64)


def test_graph_support_is_asked_of_the_backend(fake):
    """A6."""
    assert not AttentionBackend.supports_graph()
    assert not resolve_backend("torch_native", CPU, 64).supports_graph()
    assert resolve_backend("cuda", CPU, 64).supports_graph()


@pytest.mark.parametrize(
    "first", ["attention.metadata", "attention.torch_native", "attention.backend", "model.transformer"]
)
def test_modules_import_in_any_order(first):
    """A8: no circular import, whichever module comes first."""
    code = f"import astrai_core.{first}, astrai_core.attention.torch_native, astrai_core.auto"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def build(seq_lens, q_lens, spec: AttentionSpec, page_size: int, seed: int) -> tuple[KVCache, torch.Tensor]:
    """A pool whose pages are shuffled and whose unused slots, tables' tails included, are poisoned with NaN."""
    generator = torch.Generator().manual_seed(seed)
    n_pages = sum(-(-n // page_size) for n in seq_lens) + 3
    size = n_pages * page_size
    pages = iter(torch.randperm(n_pages, generator=generator).tolist())
    table = torch.full((len(seq_lens) + 1, max(seq_lens) + 5), size - 1, dtype=torch.int32)
    k, v = (torch.full((1, size, spec.n_kv_heads, spec.head_dim), torch.nan) for _ in range(2))
    out_loc = []
    for row, (n, q) in enumerate(zip(seq_lens, q_lens, strict=True)):
        slots = [
            page * page_size + i for page in (next(pages) for _ in range(-(-n // page_size))) for i in range(page_size)
        ]
        loc = torch.tensor(slots[:n])
        table[row, :n] = loc.int()
        k[0, loc] = torch.randn(n, spec.n_kv_heads, spec.head_dim, generator=generator)
        v[0, loc] = torch.randn(n, spec.n_kv_heads, spec.head_dim, generator=generator)
        out_loc.append(loc[n - q :])
    lens, q_indptr = torch.tensor(seq_lens), torch.tensor([0, *q_lens]).cumsum(0).int()
    metadata = AttentionMetadata(
        phase="decode" if set(q_lens) == {1} else "prefill",
        req_to_token=table,
        req_indices=torch.arange(len(seq_lens)),
        seq_lens=lens.int(),
        kv_indptr=torch.tensor([0, *seq_lens]).cumsum(0).int(),
        qo_indptr=q_indptr,
        out_cache_loc=torch.cat(out_loc),
        seq_lens_host=tuple(seq_lens),
        q_lens_host=tuple(q_lens),
    )
    q = torch.randn(sum(q_lens), spec.n_heads, spec.head_dim, generator=generator)
    return KVCache((k[0],), (v[0],), (0,), (metadata,)), q


def expected(cache: KVCache, q: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """Softmax written out, one query and one head at a time."""
    metadata, out, token = cache.groups[0], torch.empty_like(q), 0
    group = spec.n_heads // spec.n_kv_heads
    for row, (n, n_q) in enumerate(zip(metadata.seq_lens_host, metadata.q_lens_host, strict=True)):
        for i in range(n_q):
            position = n - n_q + i
            first = 0 if spec.window is None else max(0, position - spec.window + 1)
            loc = metadata.req_to_token[row, first : position + 1].long()
            for head in range(spec.n_heads):
                k, v = cache.k_buffers[0][loc, head // group], cache.v_buffers[0][loc, head // group]
                weights = ((k @ q[token, head]) * spec.scale).softmax(0)
                out[token, head] = weights @ v
            token += 1
    return out


requests = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=5)


@settings(deadline=None, max_examples=60)
@given(
    requests, st.sampled_from([1, 4, 16]), st.sampled_from([None, 1, 3, 8]), st.sampled_from([(4, 4), (6, 2), (3, 1)])
)
def test_torch_backend_equals_the_formula(lengths, page_size, window, heads):
    """Ragged steps of chunks and single tokens, any page size, any window; nothing outside a request is read."""
    q_lens = sorted((q for q, _ in lengths), key=lambda q: q > 1)
    seq_lens = [q + past for q, (_, past) in zip(q_lens, lengths, strict=True)]
    spec = AttentionSpec(layer=0, n_heads=heads[0], n_kv_heads=heads[1], head_dim=8, window=window)
    cache, q = build(seq_lens, q_lens, spec, page_size, seed=sum(seq_lens))
    backend = TorchNativeBackend()
    backend.plan(cache, (window,))
    run = backend.fwd_decode if cache.phase == "decode" else backend.fwd_prefill
    torch.testing.assert_close(run(q, spec, cache), expected(cache, q, spec), atol=1e-5, rtol=0)


def test_write_puts_each_token_at_its_slot():
    spec = AttentionSpec(layer=0, n_heads=2, n_kv_heads=1, head_dim=4)
    cache, _ = build([5, 3], [2, 1], spec, 2, seed=0)
    before = cache.k_buffers[0].clone()
    k, v = torch.randn(3, 1, 4), torch.randn(3, 1, 4)
    cache.write(0, k, v)
    loc = cache.groups[0].out_cache_loc
    assert torch.equal(cache.k_buffers[0][loc], k)
    assert torch.equal(cache.v_buffers[0][loc], v)
    untouched = torch.ones(before.shape[0], dtype=torch.bool)
    untouched[loc] = False
    assert torch.equal(cache.k_buffers[0][untouched].nan_to_num(7.0), before[untouched].nan_to_num(7.0))


def test_each_group_is_planned_for_the_windows_of_its_layers():
    """Decision 4: a group that keeps a window is planned for that window only, since the rest of its table may be gone."""
    spec = AttentionSpec(layer=0, n_heads=2, n_kv_heads=1, head_dim=4, window=3)
    full, _ = build([9, 7], [1, 1], spec, 2, seed=0)
    kept, _ = build([9, 7], [1, 1], spec, 2, seed=1)
    kept.groups[0].window = 3
    cache = KVCache(
        (*full.k_buffers, *kept.k_buffers), (*full.v_buffers, *kept.v_buffers), (0, 1), (full.groups[0], kept.groups[0])
    )
    TorchNativeBackend().plan(cache, (None, 3))
    assert [set(metadata.plan.decode) for metadata in cache.groups] == [{None}, {3}]
    k_buffer, _, metadata = cache.of(1)
    assert k_buffer is kept.k_buffers[0]
    assert metadata is kept.groups[0]
    TorchNativeBackend().plan(full, (None, 3))
    assert set(full.groups[0].plan.decode) == {None, 3}, "a group that keeps everything serves every window"
