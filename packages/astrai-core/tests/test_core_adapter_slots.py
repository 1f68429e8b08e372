"""Adapters served beside one base: each row gets its own, in one pass, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from astrai_core import AutoModel, ModelConfig, kernels, linear_ops, ops, save_pretrained
from astrai_core.checkpoint.adapter import fitting_factors, load_adapter, read_adapter, save_adapter
from astrai_core.config.lora import LoRAConfig
from astrai_core.errors import CheckpointError, ConfigError
from astrai_core.model.adapter_slots import AdapterSlots
from astrai_core.model.lora import adapters, apply_lora
from astrai_core.model.transformer import CausalLM

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "model_type": "llama",
}
IDS = torch.randint(0, 97, (4, 12), generator=torch.Generator().manual_seed(0))
CONFIGS = {
    "all": LoRAConfig(rank=8, alpha=12),
    "some": LoRAConfig(rank=3, alpha=5, target_modules=("q_proj", "v_proj", "down_proj")),
    "middle": LoRAConfig(rank=5, rslora=True, target_modules=("k_proj", "layers.1.mlp.up_proj")),
}


def make_model(dtype: str = "float32", **extra: Any) -> CausalLM:
    model = AutoModel.from_config(
        ModelConfig.from_dict(SHAPE | extra), dtype, "cpu", torch.Generator().manual_seed(1)
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return model


def save_adapters(root: Path, **extra: Any) -> dict[str, Path]:
    """Write the base and the adapters of :data:`CONFIGS`; return name -> directory."""
    save_pretrained(make_model(**extra), root / "base")
    for seed, (name, config) in enumerate(CONFIGS.items()):
        model = make_model(**extra)
        generator = torch.Generator().manual_seed(seed)
        apply_lora(model, config, generator)
        for _, factors in adapters(model):
            factors.lora_B.data.normal_(0.0, 0.2, generator=generator)
        save_adapter(model, root / name, str(root / "base"))
    return {name: root / name for name in CONFIGS}


def put(slots: AdapterSlots, slot: int, directory: Path) -> None:
    files = read_adapter(directory)
    slots.write(slot, fitting_factors(slots, files), files.config.scale)


@torch.inference_mode()
@pytest.mark.parametrize("rank", [8, 16, 32, 64])
@pytest.mark.parametrize("extra", [{}, {"rope_interleave": True}], ids=["halves", "interleaved"])
def test_every_row_is_that_of_its_merged_model(tmp_path: Path, rank: int, extra: dict[str, Any]) -> None:
    """Base and adapters of three ranks mixed in one pass: logits within 1e-5 of each adapter merged into the weights, for
    every way that parts of a fused projection share their factors."""
    directories = save_adapters(tmp_path, **extra)
    model = make_model(**extra)
    base = model(IDS).logits
    slots = AdapterSlots(model, 4, rank)
    order = [3, 0, 2]
    for slot, directory in zip(order, directories.values(), strict=True):
        put(slots, slot, directory)
    ids = torch.tensor([*order, -1]).repeat_interleave(IDS.shape[1])
    with slots.applied(ids):
        mixed = model(IDS).logits
    for i, directory in enumerate(directories.values()):
        merged = AutoModel.from_pretrained(directory, device="cpu")(IDS[i, None]).logits[0]
        torch.testing.assert_close(mixed[i], merged, atol=1e-5, rtol=1e-5)
        assert (merged - base[i]).abs().max() > 0.1, "the adapter matters"
    torch.testing.assert_close(mixed[3], base[3], atol=1e-6, rtol=1e-6)
    assert torch.equal(model(IDS).logits, base), "outside, the model is the base"
    slots.detach()
    assert not any("adapter" in name for name, _ in model.named_modules())


@torch.inference_mode()
def test_rows_equal_peft(tmp_path: Path) -> None:
    """The same against PEFT's own model over transformers."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    directories = save_adapters(tmp_path)
    model = AutoModel.from_pretrained(tmp_path / "base", device="cpu")
    slots = AdapterSlots(model, 3, 8)
    for slot, directory in enumerate(directories.values()):
        put(slots, slot, directory)
    with slots.applied(torch.tensor([0, 1, 2, -1]).repeat_interleave(IDS.shape[1])):
        mixed = model(IDS).logits
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32).eval()
    torch.testing.assert_close(mixed[3], theirs(IDS[3, None]).logits[0], atol=1e-4, rtol=1e-4)
    for i, directory in enumerate(directories.values()):
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
        theirs = peft.PeftModel.from_pretrained(theirs, directory).eval()
        torch.testing.assert_close(mixed[i], theirs(IDS[i, None]).logits[0], atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_a_slot_that_is_written_again_keeps_nothing(tmp_path: Path) -> None:
    """A smaller adapter after a larger one, on fewer projections, at the same addresses."""
    directories = save_adapters(tmp_path)
    model, again = make_model(), make_model()
    slots, fresh = AdapterSlots(model, 2, 8), AdapterSlots(again, 2, 8)
    put(slots, 1, directories["all"])
    before = {name: buffer.data_ptr() for name, buffer in model.named_buffers()}
    put(slots, 1, directories["some"])
    put(fresh, 1, directories["some"])
    ids = torch.ones(IDS.numel(), dtype=torch.int32)
    with slots.applied(ids), fresh.applied(ids):
        assert torch.equal(model(IDS).logits, again(IDS).logits)
    assert {name: buffer.data_ptr() for name, buffer in model.named_buffers()} == before
    with slots.applied(torch.zeros_like(ids)):
        torch.testing.assert_close(model(IDS).logits, make_model()(IDS).logits, atol=1e-6, rtol=1e-6)


def test_slots_are_no_part_of_the_checkpoint(tmp_path: Path) -> None:
    """What is saved, trained and counted are the base's weights alone."""
    model = make_model()
    before = list(model.state_dict()), [name for name, _ in model.named_parameters()]
    slots = AdapterSlots(model, 2, 8)
    assert (list(model.state_dict()), [name for name, _ in model.named_parameters()]) == before
    save_pretrained(model, tmp_path / "saved")
    with pytest.raises(ConfigError, match="beside those that the model has already"):
        AdapterSlots(model, 2, 8)
    slots.detach()
    AdapterSlots(model, 2, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ids", [[0, 2, -1, 2, 1], [1] * 5, [-1] * 5])
def test_the_sum_is_rounded_once(dtype: torch.dtype, ids: list[int]) -> None:
    """fp32 arithmetic on factors of the model's type, and one rounding behind the addition."""
    generator = torch.Generator().manual_seed(4)
    draw = lambda *shape: torch.randn(shape, generator=generator).to(dtype)
    x, base, a, b = draw(5, 16), draw(5, 24), draw(3, 8, 16), draw(3, 24, 8)
    scaling = torch.tensor([0.5, 2.0, 1.5])
    whole = base.clone()
    part = whole[:, 4:20]
    linear_ops.add_lora_inplace(part, x, a, b[:, 4:20], torch.tensor(ids), scaling)
    for row, i in enumerate(ids):
        exact = base[row].double()
        if i >= 0:
            exact = exact + scaling[i].double() * (b[i].double() @ (a[i].double() @ x[row].double()))
        expected = exact.float().to(dtype)
        expected[:4], expected[20:] = base[row, :4], base[row, 20:]
        bound = {"atol": 1e-5, "rtol": 1e-6} if dtype == torch.float32 else {"atol": 0.0, "rtol": 2**-8}
        torch.testing.assert_close(whole[row], expected, **bound)


@torch.no_grad()
def test_half_precision_takes_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two launches, the second in place; without slots none, and outside of a step none."""
    calls: list[str] = []

    def shrink(x: Any, a: Any, adapter_ids: Any) -> torch.Tensor:
        calls.append(f"shrink to {a.shape[1]}")
        return torch.zeros(x.shape[0], a.shape[1])

    def expand(base: Any, hidden: Any, b: Any, adapter_ids: Any, scaling: Any, *, out: Any) -> None:
        assert out is base
        calls.append("expand")

    module = SimpleNamespace(lora_shrink=shrink, lora_expand=expand)
    monkeypatch.setattr(kernels, "module", {"lora": module}.__getitem__)
    model = make_model("bfloat16")
    slots = AdapterSlots(model, 2, 16)
    attention = model.model.layers[0].self_attn
    x = torch.randn(3, 48, dtype=torch.bfloat16)
    with slots.applied(torch.tensor([0, 1, -1])):
        monkeypatch.setattr(ops, "by_kernel", lambda x: x.dtype == torch.bfloat16)
        monkeypatch.setattr(linear_ops, "linear", lambda x, weight, bias, packed: x @ weight.T)
        attention.qkv_proj(x)
        assert calls == ["shrink to 48", "expand"], "q, k and v together"
        attention.o_proj(x)
        assert calls[2:] == ["shrink to 16", "expand"]
        assert not attention.qkv_proj.can_fuse(x), "a fused projection keeps no input for the adapter"
    attention.qkv_proj(x)
    slots.detach()
    attention.qkv_proj(x)
    assert len(calls) == 4


@torch.no_grad()
@pytest.mark.parametrize("rank", [8, 16, 32, 64])
def test_the_kernels_take_what_slots_give_them(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Their own checks of shapes, types and strides, on tensors without memory."""
    lora = pytest.importorskip("astrai_kernels.lora")
    monkeypatch.setattr(kernels, "module", {"lora": lora}.__getitem__)
    with torch.device("meta"):
        model = CausalLM(ModelConfig.from_dict(SHAPE)).to(torch.bfloat16)
        slots = AdapterSlots(model, 3, rank)
        layer = model.model.layers[0]
        with slots.applied(torch.zeros(7, dtype=torch.int32)):
            for linear in (
                layer.self_attn.qkv_proj,
                layer.self_attn.o_proj,
                layer.mlp.gate_up_proj,
                layer.mlp.down_proj,
            ):
                x = torch.zeros(7, linear.in_features, dtype=torch.bfloat16)
                base = torch.zeros(7, linear.out_features, dtype=torch.bfloat16)
                with monkeypatch.context() as patched:
                    patched.setattr(ops, "by_kernel", lambda x: True)
                    assert linear.adapter(x, base) is base


def test_an_adapter_that_does_not_fit_is_refused_in_one_line(tmp_path: Path) -> None:
    """Base mismatch, absent targets, features that are not supported: one line that names file or field; the slot stays."""
    directories = save_adapters(tmp_path)
    slots = AdapterSlots(make_model(), 1, 8)
    path = directories["all"]
    config_path, weights_path = path / "adapter_config.json", path / "adapter_model.safetensors"
    config, weights = json.loads(config_path.read_text()), load_file(weights_path)

    def refused(kind: type[Exception], message: str, where: AdapterSlots = slots, **changes: Any) -> None:
        config_path.write_text(json.dumps(config | changes))
        with pytest.raises(kind, match=message) as caught:
            put(where, 0, path)
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)
        config_path.write_text(json.dumps(config))

    for key, value in (
        ("use_dora", True),
        ("bias", "lora_only"),
        ("modules_to_save", ["lm_head"]),
        ("rank_pattern", {"q_proj": 2}),
        ("alpha_pattern", {"q_proj": 2}),
        ("fan_in_fan_out", True),
        ("layer_replication", [[0, 2]]),
    ):
        refused(ConfigError, f"field {key!r}: .* is not supported; merge this adapter with peft first", **{key: value})
    refused(
        ConfigError, "field 'target_modules': 'w1' names no linear", target_modules=["w1", *config["target_modules"]]
    )
    refused(
        CheckpointError, "'model.layers.0.mlp.down_proj' is not a target; save", target_modules=["q_proj", "v_proj"]
    )
    gone = {name: value for name, value in weights.items() if ".layers.1.self_attn.o_proj." not in name}
    save_file(gone, weights_path)
    refused(CheckpointError, "the adapter of 'model.layers.1.self_attn.o_proj' is missing; save it again")
    save_file(weights, weights_path)
    wide = AdapterSlots(make_model(hidden_size=96), 1, 8)
    refused(CheckpointError, r"down_proj' is for a weight of \[48, 80\], the model's is \[96, 80\]", wide)
    short = AdapterSlots(make_model(num_hidden_layers=1), 1, 8)
    refused(CheckpointError, "the model has no 'model.layers.1.mlp.down_proj'; give the model that it was", short)

    apply_lora(larger := make_model(), LoRAConfig(rank=16))
    save_adapter(larger, path, "base", overwrite=True)
    config = json.loads(config_path.read_text())
    refused(ConfigError, "field 'r': 16 is more than max_lora_rank 8; raise that")
    apply_lora(head := make_model(tie_word_embeddings=False), LoRAConfig(rank=4, target_modules=("q_proj", "lm_head")))
    save_adapter(head, path, "base", overwrite=True)
    config = json.loads(config_path.read_text())
    load_adapter(make_model(tie_word_embeddings=False), path)
    refused(
        CheckpointError, "an adapter of 'lm_head' cannot be served beside its base", AdapterSlots(make_model(), 1, 8)
    )
    assert not any(buffer.any() for name, buffer in slots.model.named_buffers() if ".adapter." in name)
