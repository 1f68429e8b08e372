"""The attention seam: choice of backend (A1, A5, A6, A8), and the torch backend over a scattered pool (C1, A7)."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astrai_core.attention import backend as seam
from astrai_core.attention.backend import AttentionBackend, AttentionBackendFactory, AttentionSpec, resolve_backend
from astrai_core.attention.metadata import KVCache
from astrai_core.attention.rotary import Rope
from astrai_core.attention.torch_native import TorchNativeBackend
from astrai_core.errors import BackendError, RegistryError

CPU = torch.device("cpu")


class Fake(TorchNativeBackend):
    """Stands in for a backend that may be missing and can be captured."""

    reason: str | None = None

    @staticmethod
    def unavailable(device, head_dim, dtype, kv_dtype):
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
    assert resolve_backend(instance, CPU, 64, torch.float32) is instance
    assert type(resolve_backend("torch_native", CPU, 64, torch.float32)) is TorchNativeBackend
    assert type(resolve_backend("torch", CPU, 64, torch.float32)) is TorchNativeBackend
    assert type(resolve_backend(Fake, CPU, 64, torch.float32)) is Fake
    with pytest.raises(RegistryError, match="unknown name 'torhc'"):
        resolve_backend("torhc", CPU, 64, torch.float32)


def test_priority_and_environment_at_resolve_time(fake, monkeypatch):
    """A5."""
    assert type(resolve_backend(None, CPU, 64, torch.float32)) is Fake, "cuda comes first when it can run"
    monkeypatch.setenv(seam.ENVIRONMENT, "torch_native")
    assert type(resolve_backend(None, CPU, 64, torch.float32)) is TorchNativeBackend
    monkeypatch.delenv(seam.ENVIRONMENT)
    fake.reason = "no device"
    assert type(resolve_backend(None, CPU, 64, torch.float32)) is TorchNativeBackend, "priority falls through"


def test_a_backend_chosen_by_hand_is_never_replaced(fake, monkeypatch):
    fake.reason = "no device; install one"
    for choose in (
        lambda: resolve_backend("cuda", CPU, 64, torch.float32),
        lambda: resolve_backend(Fake, CPU, 64, torch.float32),
    ):
        with pytest.raises(BackendError, match="cannot run on cpu: no device; install one"):
            choose()
    monkeypatch.setenv(seam.ENVIRONMENT, "cuda")
    with pytest.raises(BackendError, match="'cuda' cannot run"):
        resolve_backend(None, CPU, 64, torch.float32)


def test_graph_support_is_asked_of_the_backend(fake):
    """A6."""
    assert not AttentionBackend.supports_graph()
    assert not resolve_backend("torch_native", CPU, 64, torch.float32).supports_graph()
    assert resolve_backend("cuda", CPU, 64, torch.float32).supports_graph()


def test_modules_import_in_any_order():
    """A8: no circular import, whichever module comes first."""
    code = (
        "import importlib, sys\n"
        "for first in sys.argv[1:]:\n"
        "    for name in [n for n in sys.modules if n.startswith('astrai_core')]: del sys.modules[name]\n"
        "    importlib.import_module('astrai_core.' + first)\n"
        "    import astrai_core.auto\n"
    )
    firsts = [f"attention.{name}" for name in "backend cuda flash gather metadata rotary torch_native".split()]
    done = subprocess.run([sys.executable, "-c", code, *firsts, "ops", "model"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


HEADS = ((4, 4), (6, 2), (3, 1))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=5),
    st.sampled_from([1, 4, 16]),
    st.sampled_from([None, 1, 3, 8]),
    st.sampled_from(HEADS),
)
def test_torch_backend_equals_the_formula(step_pool, attention_formula, lengths, page_size, window, heads):
    """Ragged steps of chunks and single tokens, any page size, any window; nothing outside a request is read."""
    spec = AttentionSpec(layer=0, n_heads=heads[0], n_kv_heads=heads[1], head_dim=8, window=window)
    cache, q = filled(step_pool, lengths, spec, page_size)
    backend = TorchNativeBackend()
    backend.plan(cache, (spec,))
    run = backend.fwd_decode if cache.phase == "decode" else backend.fwd_prefill
    torch.testing.assert_close(run(q, spec, cache), attention_formula(cache, q, spec), atol=1e-5, rtol=0)


def filled(step_pool, lengths, spec: AttentionSpec, page_size: int, **options) -> tuple[KVCache, torch.Tensor]:
    """A pool with one step over requests of (new tokens, past tokens), decodes first, and queries."""
    lengths = sorted(lengths, key=lambda length: length[0] > 1)
    pool = step_pool([spec.window], spec.n_kv_heads, spec.head_dim, len(lengths) + 1, 40, page_size, **options)
    if past := {row: n for row, (_, n) in enumerate(lengths) if n}:
        pool.step(past)
    cache = pool.step({row: q for row, (q, _) in enumerate(lengths)})
    generator = torch.Generator().manual_seed(sum(pool.lens))
    for row, n in enumerate(pool.lens):
        for buffer in pool.buffers[0]:
            keys = torch.randn(n, spec.n_kv_heads, spec.head_dim, generator=generator)
            buffer[pool.slots[0][row, :n].long()] = keys
    return cache, torch.randn(sum(q for q, _ in lengths), spec.n_heads, spec.head_dim, generator=generator)


def test_each_token_is_written_at_its_slot(step_pool):
    """Decision 3: k, rotated, and v go into the pool in the pass that returns q."""
    spec = AttentionSpec(layer=0, n_heads=2, n_kv_heads=1, head_dim=4)
    cache, _ = filled(step_pool, [(2, 3), (1, 2)], spec, 2)
    before = cache.k_buffers[0].clone()
    qkv, positions = torch.randn(3, 4 * 4), torch.tensor([2, 3, 4])
    angles = torch.outer(torch.arange(8.0), torch.tensor([1.0, 0.1]))
    q = TorchNativeBackend().qkv_norm_rope_write(qkv, spec, cache, Rope(angles.cos(), angles.sin(), positions))
    heads = qkv.view(3, 4, 4)
    turned = torch.view_as_complex(torch.stack(heads[:, :3].chunk(2, -1), -1)) * torch.polar(
        torch.ones(3, 1, 2), angles[positions].unsqueeze(1)
    )
    rotated = torch.cat((turned.real, turned.imag), -1)
    loc = cache.groups[0].out_cache_loc
    torch.testing.assert_close(q, rotated[:, :2])
    torch.testing.assert_close(cache.k_buffers[0][loc], rotated[:, 2:])
    assert torch.equal(cache.v_buffers[0][loc], heads[:, 3:])
    untouched = torch.ones(before.shape[0], dtype=torch.bool)
    untouched[loc] = False
    assert torch.equal(cache.k_buffers[0][untouched].nan_to_num(7.0), before[untouched].nan_to_num(7.0))


def test_each_group_is_planned_for_the_windows_of_its_layers(step_pool):
    """Decision 4: a group that keeps a window is planned for that window only, since the rest of its table may be gone."""
    spec = AttentionSpec(layer=0, n_heads=2, n_kv_heads=1, head_dim=4, window=3)
    specs = (replace(spec, window=None), spec)
    cache = step_pool([None, 3], 1, 4, 2, 16, 2, group_by_window=True).step({0: 1, 1: 1})
    TorchNativeBackend().plan(cache, specs)
    assert [set(metadata.plan.decode) for metadata in cache.groups] == [{None}, {3}]
    assert cache.of(1)[2] is cache.groups[1]
    whole = step_pool([None, 3], 1, 4, 2, 16, 2).step({0: 1, 1: 1})
    TorchNativeBackend().plan(whole, specs)
    assert set(whole.groups[0].plan.decode) == {None, 3}, "a group that keeps everything serves every window"


@pytest.mark.parametrize("options", [{}, {"group_by_window": True}], ids=["one-group", "groups"])
def test_steps_of_every_family_equal_whole_sequences(served, options):
    """Chunked and mixed steps give the logits of a pass over the whole sequence."""
    for ours, whole in zip(served(TorchNativeBackend(), page_size=4, **options), served(None), strict=True):
        torch.testing.assert_close(ours, whole, atol=2e-4, rtol=1e-4)
