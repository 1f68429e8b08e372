"""Float8 products: what they round, what they leave alone, and that a model learns by them as by bf16."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from astrai_core import AutoModel, ModelConfig
from astrai_core.errors import ConfigError
from astrai_train import TrainConfig, float8
from astrai_train.compilation import compile_training
from astrai_train.float8 import compute_in_float8, scaled_linear
from astrai_train.recompute import recompute_activations
from astrai_train.run import build
from astrai_train.strategy.seq import SeqStrategy

Recipe = Callable[..., dict[str, Any]]
SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def make_model(**changes: Any) -> Any:
    config = ModelConfig.from_dict(SHAPE | changes)
    generator = torch.Generator().manual_seed(0)
    return AutoModel.from_config(config, torch.bfloat16, "cpu", generator).train()


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def rounded(wide: Tensor, dtype: torch.dtype) -> Tensor:
    """What is left of a tensor after one scale for all of it: float32."""
    step = wide.abs().max().float() / torch.finfo(dtype).max
    return (wide.float() / step).to(dtype).float() * step


def gradients(model: Any, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    hidden = model.hidden_states(ids).float()
    (hidden * drawn(*hidden.shape)).sum().backward()  # the sum of squares behind a norm would be a constant
    return {name: value.grad.clone() for name, value in model.named_parameters()}


def distance(found: Tensor, wanted: Tensor) -> float:
    """Relative error in the Frobenius norm."""
    return float((found.detach().float() - wanted.detach().float()).norm() / wanted.detach().float().norm())


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(64,), (3, 7)], ids=["rows of 16", "other rows"])
def test_a_product_is_that_of_the_rounded(shape: tuple[int, ...], weight_dtype: torch.dtype) -> None:
    """e4m3 forward, e5m2 for the gradient, float32 sums; the weight's gradient has the weight's type."""
    x, weight = drawn(*shape, 48), drawn(32, 48, dtype=weight_dtype, scale=0.02)
    x.requires_grad_()
    weight.requires_grad_()
    out = scaled_linear(x, weight)
    grad = drawn(*shape, 32, scale=1e-4)
    out.backward(grad)
    narrow_x, narrow_w = (rounded(t.detach(), torch.float8_e4m3fn) for t in (x, weight))
    narrow_g = rounded(grad, torch.float8_e5m2)
    wanted_w = narrow_g.flatten(0, -2).T @ narrow_x.flatten(0, -2)
    assert (out.dtype, out.shape) == (torch.bfloat16, (*shape, 32))
    assert x.grad is not None and weight.grad is not None
    assert weight.grad.dtype == weight_dtype
    # A value halfway between two of the narrow type may go either way: a thousandth of all is left for them.
    for found, wanted in ((out, narrow_x @ narrow_w.T), (x.grad, narrow_g @ narrow_w), (weight.grad, wanted_w)):
        assert distance(found, wanted) < 0.01
    # Against what was not rounded: e4m3 has 3 bits behind the point, e5m2 has 2.
    assert distance(out, x.detach().float() @ weight.detach().float().T) < 0.05
    assert distance(x.grad, grad.float() @ weight.detach().float()) < 0.08
    assert distance(weight.grad, grad.flatten(0, -2).float().T @ x.detach().flatten(0, -2).float()) < 0.08


def test_scales_fit_any_magnitude() -> None:
    """Gradients of 1e-9 and weights of 1e3 are multiplied as exactly as others; zeros give zeros."""
    x, weight = drawn(32, 48), drawn(32, 48)
    near = distance(scaled_linear(x, weight), x.float() @ weight.float().T)
    far = distance(scaled_linear(x * 2**-30, weight * 2**10), (x.float() @ weight.float().T) * 2**-20)
    assert far == pytest.approx(near, rel=1e-3)
    assert torch.equal(scaled_linear(torch.zeros_like(x), weight), torch.zeros(32, 32, dtype=torch.bfloat16))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden(value: float) -> None:
    """Rule 8: the trainer has to see it in the gradient."""
    x, weight = drawn(16, 48).requires_grad_(), drawn(32, 48).requires_grad_()
    grad = drawn(16, 32)
    grad[3, 3] = value
    scaled_linear(x, weight).backward(grad)
    assert weight.grad is not None
    assert not weight.grad.isfinite().all()
    spoilt = x.detach().clone()
    spoilt[0, 0] = value
    assert not scaled_linear(spoilt, weight).isfinite().all()


def test_only_projections_of_blocks_and_only_for_gradients() -> None:
    """Rule 7: names, classes and weights stay; without a gradient the model computes what it did, bit for bit."""
    plain = make_model(attention_bias=True)
    model = copy.deepcopy(plain)
    names = compute_in_float8(model)
    parts = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    assert names == [f"model.layers.{layer}.{part}" for layer in range(2) for part in parts]
    ids = torch.arange(48).view(2, 24) % 61
    with torch.no_grad():
        assert torch.equal(model(ids).logits, plain(ids).logits)
    assert {n: type(m).__name__ for n, m in model.named_modules()} == {
        n: type(m).__name__ for n, m in plain.named_modules()
    }
    found, wanted = gradients(model, ids), gradients(plain, ids)
    assert list(found) == list(wanted)
    for name in wanted:
        assert found[name].dtype == wanted[name].dtype
        assert distance(found[name], wanted[name]) < 0.25, name
    # Rounding shows up wherever a projection lies behind, so that the comparison above compares something.
    assert all(distance(found[name], wanted[name]) > 1e-3 for name in wanted if "proj.weight" in name)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(torch.equal(value, found[name]) for name, value in gradients(twin, ids).items())


def test_experts_and_routers_stay() -> None:
    """Stacks of experts and what chooses among them are in bf16; a shared expert's projections are not."""
    model = make_model(
        model_type="qwen2_moe",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        decoder_sparse_step=1,
    )
    names = compute_in_float8(model)
    assert "model.layers.0.mlp.shared_expert.down_proj" in names
    assert not any(name.endswith("gate") or ".experts" in name for name in names)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputation_changes_no_gradient(mode: Any) -> None:
    """Rule 12: bit for bit, and selective keeps the results of float8 products."""
    ids = torch.arange(48).view(2, 24) % 61
    plain, other = make_model(), make_model()
    for model in (plain, other):
        compute_in_float8(model)
    recompute_activations(other, mode)
    expected, found = gradients(plain, ids), gradients(other, ids)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_compiled_gradients_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile traces the products and their backward pass without a break."""
    monkeypatch.setattr("astrai_train.compilation.BACKEND", "aot_eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    ids = torch.arange(48).view(2, 24) % 61
    plain, other = make_model(), make_model()
    for model in (plain, other):
        compute_in_float8(model)
    compile_training(other, SeqStrategy(other, label_smoothing=0.0, loss_chunk_tokens=16), "default")
    expected, found = gradients(plain, ids), gradients(other, ids)
    for name in expected:
        assert distance(found[name], expected[name]) < 1e-2, name
    assert not torch._dynamo.utils.counters["graph_break"]
    torch._dynamo.reset()


def test_a_model_learns_as_by_bf16(run_recipe: Recipe, tmp_path: Path) -> None:
    """Losses fall alike over master weights and in pure bf16, under fsdp too; checkpoints are the ones of any run."""
    losses: dict[str, list[float]] = {}
    for name, precision, mode in (
        ("bf16", {"dtype": "bf16_mixed"}, "none"),
        ("fp8", {"dtype": "bf16_mixed", "fp8": True}, "none"),
        ("pure", {"dtype": "bf16", "fp8": True}, "none"),
        ("fsdp", {"dtype": "bf16_mixed", "fp8": True}, "fsdp"),
    ):
        recipe = run_recipe(
            {
                "max_steps": 24,
                "output_dir": str(tmp_path / name),
                "precision": precision,
                "parallel": {"mode": mode},
                "lr_schedule": {"name": "constant", "warmup": 0},
            }
        )
        result = build(TrainConfig.from_dict(recipe), device="cpu").train()
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses[name] = [json.loads(line)["loss"] for line in lines]
        exported = AutoModel.from_pretrained(result.checkpoint, device="cpu")
        assert all(parameter.isfinite().all() for parameter in exported.parameters())
    assert losses["bf16"][-1] < 0.75 * losses["bf16"][0]
    for name in ("fp8", "pure", "fsdp"):
        assert losses[name] == pytest.approx(losses["bf16"], rel=0.04), name
        assert losses[name] != losses["bf16"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precision": {"fp8": True, "dtype": "fp32"}}, "field 'precision.fp8': dtype 'fp32' is float32 throughout"),
        (
            {"precision": {"fp8": True}, "strategy": {"name": "dpo"}},
            "field 'precision': fp8: the policy would differ from its bf16 reference",
        ),
        ({"precision": {"fp8": True}, "lora": {}}, "field 'lora': precision.fp8: an adapter would learn"),
    ],
)
def test_recipes_that_contradict_it(error_of: Callable[..., str], changes: dict[str, Any], message: str) -> None:
    assert message in error_of(changes)


def test_what_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No silent fallback: one line with the field, for devices, old versions and shapes."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert float8.unavailable(torch.device("cuda")) == ("float8 products need compute capability 8.9, this GPU has 8.0")
    assert "not on mps" in str(float8.unavailable(torch.device("mps")))
    with pytest.raises(ConfigError, match=r"field 'precision.fp8': model.layers.0.mlp.down_proj is 64 x 40"):
        compute_in_float8(make_model(intermediate_size=40))

    def missing(*_: Any, **__: Any) -> Tensor:
        raise NotImplementedError("no such kernel\nin this build")

    monkeypatch.setattr(torch, "_scaled_mm", missing)
    with pytest.raises(
        ConfigError, match=r"field 'precision.fp8': torch .* no float8 product here \(no such kernel\); remove it"
    ):
        compute_in_float8(make_model())


@pytest.mark.gpu
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_a_gpu_computes_what_a_cpu_does(weight_dtype: torch.dtype) -> None:
    """The tensor cores' products beside torch's on a CPU, forward and backward, rows of any number."""
    results = []
    for device in ("cpu", "cuda"):
        x = drawn(2, 333, 256).to(device).requires_grad_()
        weight = drawn(512, 256, dtype=weight_dtype, scale=0.02).to(device).requires_grad_()
        out = scaled_linear(x, weight)
        out.backward(drawn(2, 333, 512, scale=1e-4).to(device))
        assert x.grad is not None and weight.grad is not None
        results.append([tensor.detach().cpu() for tensor in (out, x.grad, weight.grad)])
    for cpu, gpu in zip(*results, strict=True):
        assert distance(gpu, cpu) < 0.01
