"""The engine on a CUDA device: the same tokens as a dense forward, with and without the kernels behind the ops door."""

from __future__ import annotations

import pytest
import torch

from astrai_core import SamplingParams, kernels, ops
from astrai_infer import EngineConfig, InferenceEngine
from astrai_infer.testing import byte_tokenizer, tiny_model

pytestmark = pytest.mark.gpu

PROMPTS = [list(range(10 + i, 10 + i + length)) for i, length in enumerate([1, 5, 16, 17, 40])]


@torch.no_grad()
def test_greedy_equals_a_dense_forward_on_the_device():
    """Rule 1 in fp32 on a GPU: chunked, batched and preempted."""
    model = tiny_model().cuda()
    config = EngineConfig(max_num_seqs=4, max_batch_tokens=24, kv_cache_bytes=6 * 16 * 2 * 2 * 2 * 8 * 4)
    with InferenceEngine(model, byte_tokenizer(), config) as engine:
        results = engine.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
    for prompt, result in zip(PROMPTS, results, strict=True):
        ids = torch.tensor([[*prompt, *result.token_ids]], device="cuda")
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
        assert tuple(logits.argmax(-1).tolist()) == result.token_ids


@torch.no_grad()
def test_the_device_and_the_cpu_give_the_same_logits():
    cpu = tiny_model(model_type="qwen3", head_dim=16)
    ids = torch.tensor([PROMPTS[4]])
    expected = cpu(ids).logits
    torch.testing.assert_close(cpu.cuda()(ids.cuda()).logits.cpu(), expected, atol=1e-3, rtol=1e-4)


@torch.no_grad()
@pytest.mark.kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_door_takes_the_kernel_and_it_equals_the_twin(dtype, monkeypatch):
    """K11 and A2: kernels in inference; with gradients, or without the wheel, the twin."""
    status = kernels.status()
    assert status.available, status.reason
    x, residual = (torch.randn(7, 3, 64, device="cuda", dtype=dtype) for _ in range(2))
    weight = torch.randn(64, device="cuda", dtype=dtype)
    calls = []
    fused = kernels.module("fused")
    for name in ("rms_norm", "add_rms_norm"):
        original = getattr(fused, name)
        monkeypatch.setattr(fused, name, lambda *a, _f=original, _n=name, **k: (calls.append(_n), _f(*a, **k))[1])
    by_kernel = [ops.rms_norm(x, weight, 1e-5), *ops.add_rms_norm(x, residual, weight, 1e-5)]
    assert calls == ["rms_norm", "add_rms_norm"]
    with torch.enable_grad():
        by_twin = [ops.rms_norm(x, weight, 1e-5), *ops.add_rms_norm(x, residual, weight, 1e-5)]
    assert calls == ["rms_norm", "add_rms_norm"], "with gradients the twin runs"
    for kernel, twin in zip(by_kernel, by_twin, strict=True):
        assert kernel.shape == twin.shape
        torch.testing.assert_close(
            kernel.float(), twin.float(), atol=2e-2 if dtype != torch.float32 else 1e-5, rtol=1e-2
        )


def test_gradients_flow_on_the_device():
    """K11: rotary and norms in training on CUDA bf16."""
    model = tiny_model().cuda().bfloat16().train()
    ids = torch.tensor([PROMPTS[4]], device="cuda")
    model(ids).logits.float().logsumexp(-1).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
