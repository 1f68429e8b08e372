"""The CUDA backend on a GPU (A2, A9): the same logits and greedy tokens as torch's attention over the same pool."""

from __future__ import annotations

import sys
from collections import Counter

import pytest
import torch

from astrai_core import kernels, linear_ops, ops
from astrai_core.attention import flash
from astrai_core.attention.backend import ENVIRONMENT, AttentionBackend, AttentionSpec, resolve_backend
from astrai_core.attention.cuda import CudaBackend
from astrai_core.attention.rotary import Rope
from astrai_core.attention.torch_native import TorchNativeBackend
from astrai_core.errors import BackendError

pytestmark = [pytest.mark.gpu, pytest.mark.kernel]

CUDA = torch.device("cuda")


def agree(ours: list[torch.Tensor], theirs: list[torch.Tensor], dtype: torch.dtype) -> None:
    """Logits differ by less than six roundings of the largest (two to three were seen between torch's own ways), and the
    greedy token is the same wherever it leads by more than that."""
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.isfinite().all()
        other = other.float()
        tolerance = 6 * torch.finfo(dtype).eps * float(other.abs().max())
        torch.testing.assert_close(mine.float(), other, atol=tolerance, rtol=0)
        top = other.topk(2, -1).values
        clear = top[:, 0] - top[:, 1] > tolerance
        assert clear.float().mean() > 0.25, "the model's choices are clear enough to compare"
        assert torch.equal(mine.argmax(-1)[clear], other.argmax(-1)[clear])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
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
def test_steps_of_every_family_equal_torch_attention(served, options, dtype, monkeypatch):
    """Chunks, mixed steps and decodes; what nobody may read is NaN or leads nowhere."""
    calls = Counter()

    def count(module, name):
        op = getattr(kernels.module(module), name)
        monkeypatch.setattr(kernels.module(module), name, lambda *a, **b: (calls.update(n=1), op(*a, **b))[1])

    count("attention", "decode_attention")
    count("qkv_attention", "qkv_decode_attention")
    ours = served(CudaBackend(), dtype=dtype, device="cuda", **options)
    assert calls["n"] == 7 * 3, "every step with single queries went through the kernel in each layer"
    agree(ours, served(TorchNativeBackend(), dtype=dtype, device="cuda", **options), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_norm_between_two_projections_has_no_launch(served, dtype, monkeypatch):
    """G2: in bf16 the projections around a norm do it, but in front of the first layer and behind the last."""
    calls = Counter()
    for module, name in (("fused", "rms_norm"), ("fused", "add_rms_norm"), ("normed_projection", "linear_after_norm")):
        op = getattr(kernels.module(module), name)
        monkeypatch.setattr(
            kernels.module(module), name, lambda *a, n=name, op=op, **b: (calls.update([n]), op(*a, **b))[1]
        )
    ours = served(CudaBackend(), dtype=dtype, device="cuda", page_size=16)
    halves = calls["linear_after_norm"]
    assert halves > 0 if dtype == torch.bfloat16 else halves == 0
    monkeypatch.setattr(linear_ops, "HALVED_ROWS", range(0))
    agree(ours, served(CudaBackend(), dtype=dtype, device="cuda", page_size=16), dtype)
    assert calls["linear_after_norm"] == halves
    monkeypatch.undo()


def test_with_and_without_the_kernels(served, monkeypatch):
    """A2: the kernels behind the ops door and the backend, against a machine whose compiled module was deleted."""
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    backend = resolve_backend(None, CUDA, 64, torch.bfloat16)
    assert type(backend) is CudaBackend
    by_kernels = served(backend, dtype=torch.bfloat16, device="cuda", page_size=16)
    gone = kernels.KernelStatus(False, "0", "its extension does not load", "reinstall astrai-kernels")
    monkeypatch.setattr(kernels, "status", lambda: gone)
    monkeypatch.setattr(flash, "probe", lambda device: (None, "not installed"))
    backend = resolve_backend(None, CUDA, 64, torch.bfloat16)
    assert type(backend) is TorchNativeBackend
    agree(by_kernels, served(backend, dtype=torch.bfloat16, device="cuda", page_size=16), torch.bfloat16)
    with pytest.raises(BackendError, match="reinstall astrai-kernels"):
        resolve_backend("cuda", CUDA, 64, torch.bfloat16)


@torch.no_grad()
def test_flash_on_a_real_library(step_pool, attention_formula, monkeypatch):
    """A3, A4: the probe and both calls on FlashAttention-3; its forward-only wheel knows neither pages nor windows."""
    library = pytest.importorskip("fa3_fwd_interface", reason="fa3-fwd is not installed")
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("FlashAttention-3 is for Hopper")
    monkeypatch.setitem(sys.modules, flash.GENERATIONS[0].module, library)
    flash.probe.cache_clear()
    try:
        backend = resolve_backend("flash", CUDA, 64, torch.bfloat16)
        assert type(backend) is flash.FlashAttnBackend
        pool = step_pool([None], 2, 64, 3, 256, 256, contiguous=True, dtype=torch.bfloat16, device="cuda")
        for buffer in pool.buffers[0]:
            buffer.normal_()
        spec = AttentionSpec(layer=0, n_heads=8, n_kv_heads=2, head_dim=64)
        for lens, attend in (
            ({0: 5, 2: 130}, backend.fwd_prefill),
            ({2: 1, 0: 1}, backend.fwd_decode),
            ({0: 70, 1: 1}, backend.fwd_prefill),
            ({1: 1, 0: 1, 2: 1}, backend.fwd_decode),
        ):
            cache = pool.step(lens)
            q = torch.randn(sum(lens.values()), 8, 64, device="cuda", dtype=torch.bfloat16)
            backend.plan(cache, [spec])
            torch.testing.assert_close(attend(q, spec, cache), attention_formula(cache, q, spec), atol=2e-2, rtol=2e-2)
    finally:
        flash.probe.cache_clear()


@torch.no_grad()
def test_a_captured_step_replays_for_other_lengths(step_pool):
    """A6: the plan is made on the device from the lengths that it finds there."""
    pool = step_pool([None], 1, 64, 3, 512, 16, dtype=torch.bfloat16, device="cuda")
    for buffer in pool.buffers:
        buffer.normal_()
    spec = AttentionSpec(layer=0, n_heads=4, n_kv_heads=1, head_dim=64)
    backend, q = CudaBackend(), torch.randn(3, 4, 64, device="cuda", dtype=torch.bfloat16)

    def run(cache):
        backend.plan(cache, [spec])
        return backend.fwd_decode(q, spec, cache)

    cache = pool.step({0: 1, 1: 1, 2: 1})
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(cache)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(cache)
    for grown in ({0: 3, 1: 200, 2: 17}, {0: 400, 1: 1, 2: 1}):
        pool.step(grown)
        later = pool.step({0: 1, 1: 1, 2: 1})
        cache.groups[0].seq_lens.copy_(later.groups[0].seq_lens)
        graph.replay()
        assert torch.equal(out, run(later))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp32_models_take_torch(dtype, monkeypatch):
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    monkeypatch.setattr(flash, "probe", lambda device: (None, "not installed"))
    expected = CudaBackend if dtype == torch.bfloat16 else TorchNativeBackend
    assert type(resolve_backend(None, CUDA, 128, dtype)) is expected
    if dtype == torch.float32:
        with pytest.raises(BackendError, match="take float16 or bfloat16"):
            resolve_backend("cuda", CUDA, 128, dtype)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_door_and_its_twins_agree(dtype, interleaved, step_pool):
    """K11: each op by kernel, and by its twin under gradients, on the same input."""
    angles = torch.outer(torch.arange(32.0, device="cuda"), torch.rand(24, device="cuda"))
    rope = Rope(angles.cos(), angles.sin(), torch.tensor([3, 4, 5, 31], device="cuda"), interleaved)
    x, weight, table, qkv = (torch.randn(n, 256, device="cuda", dtype=dtype) for n in (4, 96, 40, 4))
    norms = torch.rand(2, 64, device="cuda", dtype=dtype)
    pools = [step_pool([None], 1, 64, 1, 8, 4, dtype=dtype, device="cuda") for _ in range(2)]
    results = []
    for pool, grad in zip(pools, (False, True), strict=True):
        k, v, metadata = pool.step({0: 4}).of(0)
        loc = metadata.out_cache_loc
        with torch.set_grad_enabled(grad):
            q = ops.qkv_norm_rope_write(qkv, k, v, loc, 2, 1, rope=rope, q_norm=norms[0], k_norm=norms[1], eps=1e-5)
            results.append(
                {
                    "q": q, "k": k[loc], "v": v[loc],
                    "rotary": ops.rotary(x.view(4, 4, 64), rope),
                    "linear": linear_ops.linear(x, weight),
                    "swiglu": ops.swiglu(x),
                    "embedding": ops.embedding(rope.position_ids, table),
                }
            )  # fmt: skip
    for name, kernel in results[0].items():
        tolerance = 4 * max(torch.finfo(dtype).eps, 1e-5) * float(results[1][name].abs().max())
        torch.testing.assert_close(kernel, results[1][name], atol=tolerance, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
    assert torch.equal(results[0]["v"], results[1]["v"])
    assert torch.equal(results[0]["embedding"], results[1]["embedding"])


@torch.no_grad()
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("deterministic", [False, True])
def test_one_launch_has_the_bits_of_two(step_pool, head_dim, deterministic):
    """Issue 5, Deliver 4: norm, rotation, write and attention of up to eight requests in one launch."""
    spec = AttentionSpec(layer=0, n_heads=16, n_kv_heads=4, head_dim=head_dim)
    angles = torch.rand(2048, head_dim // 2, device="cuda") * 6.3
    norms = torch.rand(2, head_dim, device="cuda", dtype=torch.bfloat16)
    backend = CudaBackend()
    pool = step_pool([None], 4, head_dim, 8, 1024, 16, dtype=torch.bfloat16, device="cuda")
    torch.use_deterministic_algorithms(deterministic)
    try:
        pool.step({row: 1 + 120 * row for row in range(8)})
        for buffer in pool.buffers[0]:
            buffer.normal_()
        for _ in range(2):
            cache = pool.step(dict.fromkeys(range(8), 1))
            before = [buffer.clone() for buffer in pool.buffers[0]]
            qkv = torch.randn(8, 24 * head_dim, device="cuda", dtype=torch.bfloat16)
            rope = Rope(angles.cos(), angles.sin(), cache.groups[0].seq_lens.long() - 1)
            backend.plan(cache, [spec])
            assert backend._is_one_launch(qkv, spec, cache, rope, norms.unbind())
            results = []
            for attend in (AttentionBackend.attend, CudaBackend.attend):
                for buffer, old in zip(pool.buffers[0], before, strict=True):
                    buffer.copy_(old)
                results.append([attend(backend, qkv, spec, cache, rope, *norms), *(b.clone() for b in pool.buffers[0])])
            assert all(torch.equal(one, two) for two, one in zip(*results, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)
