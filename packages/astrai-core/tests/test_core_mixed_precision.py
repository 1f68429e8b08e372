"""A pass without gradients in mixed precision: fp32 weights under autocast, beside kernels that take one type a launch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from astrai_core import AutoModel, ModelConfig, kernels, linear_ops, ops
from astrai_core.attention.rotary import Rope
from astrai_core.model.transformer import CausalLM

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True},
    "mistral": {"sliding_window": 9},
    "qwen3": {"head_dim": 64, "sliding_window": None},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    | {"shared_expert_intermediate_size": 64},
}


def make_model(family: str, device: str) -> CausalLM:
    config = ModelConfig.from_dict(
        {"model_type": family, "vocab_size": 96, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 3}
        | {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
        | FAMILIES[family]
    )
    return AutoModel.from_config(config, "float32", device, torch.Generator(device).manual_seed(0)).eval()


def logits(
    model: CausalLM, doc_lens: tuple[int, ...] | None, *, grad: bool = True, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Logits ``[2, 24, 96]`` under autocast to `dtype`, as a training step computes them or as an evaluation does."""
    ids = torch.randint(96, (2, 24), generator=torch.Generator().manual_seed(1)).to(model.device)
    autocast = torch.autocast(model.device.type, dtype, enabled=dtype != torch.float32)
    with autocast, torch.set_grad_enabled(grad):
        return model.lm_head(model.hidden_states(ids, doc_lens=doc_lens)).detach()


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the kernels that the door takes on what pretends to be a CUDA device.

    Each is its twin behind the check of types that astrai_kernels makes.
    """
    names: Counter[str] = Counter()

    def kernel(name: str, twin: Callable[..., Any], n_checked: int | None = None) -> Callable[..., Any]:
        def run(*args: Any, **named: Any) -> Any:
            values = (*args, *named.values())[:n_checked]
            types = {value.dtype for value in values if isinstance(value, Tensor) and value.is_floating_point()}
            if types not in ({torch.float32}, {torch.float16}, {torch.bfloat16}):
                raise TypeError(f"{name}: dtypes {types}")
            names[name] += 1
            with torch.enable_grad():
                return twin(*args, **named)

        return run

    def rotary(x: Tensor, k: None, *angles: Tensor, interleaved: bool) -> tuple[Tensor, None]:
        return ops.rotary(x, Rope(*angles, interleaved)), None

    def write(
        qkv: Tensor, position_ids: None, cos: None, sin: None, *rest: Any, interleaved: bool, **named: Any
    ) -> Any:
        return ops.qkv_norm_rope_write(qkv, *rest, rope=None, **named)

    modules = {
        "fused": SimpleNamespace(
            rms_norm=kernel("rms_norm", ops.rms_norm), add_rms_norm=kernel("add_rms_norm", ops.add_rms_norm)
        ),
        "elementwise": SimpleNamespace(
            embedding=kernel("embedding", ops.embedding),
            gated_activation=kernel("swiglu", lambda x, kind: ops.swiglu(x)),
        ),
        "rotary": SimpleNamespace(apply_rotary=kernel("rotary", rotary, 1)),  # its angles are fp32
        "qkv": SimpleNamespace(qkv_norm_rope_write=kernel("write", write)),
        "projection": SimpleNamespace(
            linear=kernel("linear", lambda x, weight, bias, fixed_order: linear_ops.linear(x, weight, bias))
        ),
    }
    monkeypatch.setattr(kernels, "module", modules.__getitem__)
    monkeypatch.setattr(ops, "by_kernel", lambda x: not torch.is_grad_enabled())
    return names


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_a_kernel_gets_one_type(taken: Counter[str]) -> None:
    """K11: where a weight, the residual stream or the pool has another type, or one that no kernel knows, the twin runs."""
    half, wide, double = (torch.ones(4, 64, dtype=dtype) for dtype in (torch.bfloat16, torch.float32, torch.float64))
    slots, heads = torch.arange(4), {"n_heads": 2, "n_kv_heads": 1, "rope": None, "eps": 1e-5}

    def write(qkv: Tensor, pool: torch.dtype, norm: torch.dtype | None) -> Tensor:
        k, v = torch.zeros(2, 4, 1, 16, dtype=pool)
        weight = None if norm is None else torch.ones(16, dtype=norm)
        return ops.qkv_norm_rope_write(qkv, k, v, slots, **heads, q_norm=weight, k_norm=weight)

    for x, other in ((half, wide), (half, half.half()), (double, double)):
        assert ops.rms_norm(x, other[0], 1e-5).dtype == x.dtype
        assert ops.add_rms_norm(x, x, other[0], 1e-5)[1].dtype == x.dtype
        write(x, x.dtype, other.dtype)
        write(x, other.dtype, None)
    ops.add_rms_norm(half, wide, half[0], 1e-5)
    ops.swiglu(double)
    ops.embedding(slots, double)
    ops.rotary(double.view(4, 1, 64), Rope(wide[:, :32], wide[:, :32], slots))
    assert not taken
    for x in (half, wide):
        ops.rms_norm(x, x[0], 1e-5)
        ops.add_rms_norm(x, x, x[0], 1e-5)
        write(x, x.dtype, x.dtype)
        ops.swiglu(x)
        ops.embedding(slots, x)
        ops.rotary(x.view(4, 1, 64), Rope(wide[:, :32], wide[:, :32], slots))
    kinds = ("rms_norm", "add_rms_norm", "write", "swiglu", "embedding", "rotary")
    assert taken == Counter(dict.fromkeys(kinds, 2))


@pytest.mark.parametrize("doc_lens", [None, (10, 20, 18)], ids=["rows", "documents"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_evaluation_computes_what_a_training_step_does(
    family: str, doc_lens: tuple[int, ...] | None, taken: Counter[str]
) -> None:
    """K11: under autocast, with kernels that refuse fp32 weights beside bf16 activations."""
    model = make_model(family, "cpu")
    expected = logits(model, doc_lens)
    assert not taken and expected.dtype == torch.bfloat16
    assert torch.equal(logits(model, doc_lens, grad=False), expected)
    assert taken["rotary"] and taken["swiglu"] and not taken["rms_norm"] + taken["add_rms_norm"] + taken["linear"]


@pytest.mark.gpu
@pytest.mark.kernel
@pytest.mark.parametrize("doc_lens", [None, (10, 20, 18)], ids=["rows", "documents"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_an_evaluation_on_a_gpu(family: str, doc_lens: tuple[int, ...] | None) -> None:
    """K11: the same by the real kernels. Both are held against fp32, and are as far from it but for chance."""
    model = make_model(family, "cuda")
    exact = logits(model, doc_lens, dtype=torch.float32)
    step, evaluation = (logits(model, doc_lens, grad=grad).float() for grad in (True, False))
    assert 0 < (step - exact).norm() < 0.02 * exact.norm()
    assert (evaluation - exact).norm() < 1.5 * (step - exact).norm()
