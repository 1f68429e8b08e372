"""Low-rank adapters: PEFT's files both ways, merging, switching off, and what is refused."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from astrai_core import AutoModel, ModelConfig, open_source, save_pretrained
from astrai_core.checkpoint.adapter import load_adapter, read_adapter, save_adapter
from astrai_core.checkpoint.rotary_layout import halves_to_interleaved, interleaved_to_halves
from astrai_core.config.lora import ATTENTION_AND_MLP, LoRAConfig
from astrai_core.errors import CheckpointError, ConfigError
from astrai_core.model.lora import LoRA, adapters, adapters_off, apply_lora, merge_lora, unmerge_lora
from astrai_core.model.transformer import CausalLM

transformers = pytest.importorskip("transformers")

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
IDS = torch.randint(0, 97, (2, 20), generator=torch.Generator().manual_seed(0))
TOLERANCE = {"atol": 1e-4, "rtol": 0.0}
CASES = {
    "every projection": ("llama", {}, LoRAConfig(rank=4, alpha=8)),
    "parts of the fused ones": (
        "qwen2",
        {},
        LoRAConfig(rank=3, alpha=5, target_modules=("q_proj", "v_proj", "up_proj")),
    ),
    "the middle part, rank-stabilised": (
        "qwen3",
        {"head_dim": 16},
        LoRAConfig(rslora=True, target_modules=("k_proj",)),
    ),
    "one layer, the head": (
        "llama",
        {"tie_word_embeddings": False},
        LoRAConfig(rank=2, target_modules=("layers.1.mlp.down_proj", "lm_head")),
    ),
}


def make_model(family: str = "llama", dtype: str = "float32", **extra: Any) -> CausalLM:
    torch.manual_seed(1)
    config = ModelConfig.from_dict({"model_type": family} | SHAPE | extra)
    model = AutoModel.from_config(config, dtype, "cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def fill(model: CausalLM, seed: int = 2) -> None:
    """Give the adapters something to add."""
    generator = torch.Generator().manual_seed(seed)
    for _, factors in adapters(model):
        factors.lora_B.data.normal_(0.0, 0.1, generator=generator)


def adapted(config: LoRAConfig, family: str = "llama", dtype: str = "float32", **extra: Any) -> CausalLM:
    model = make_model(family, dtype, **extra)
    apply_lora(model, config, torch.Generator().manual_seed(3))
    fill(model)
    return model


@pytest.fixture(params=CASES)
def case(request: Any, tmp_path: Path) -> tuple[CausalLM, LoRAConfig, Path]:
    """A model, the adapters it shall get, and the directory that transformers reads it from."""
    family, extra, config = CASES[request.param]
    model = make_model(family, **extra)
    save_pretrained(model, tmp_path / "base")
    return model, config, tmp_path / "base"


def in_peft(base: Path, adapter: Path) -> Any:
    peft = pytest.importorskip("peft")
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(model, adapter).eval()


# ---- fresh ----


def test_fresh_adapters_add_nothing_and_are_all_that_trains(case: Any) -> None:
    """B starts at 0; the base is frozen, so a run changes none of its weights (training rule 7)."""
    model, config, _ = case
    expected = model(IDS).logits
    apply_lora(model, config)
    assert torch.equal(model(IDS).logits, expected)
    model(IDS).logits.square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (parameter.grad is not None) == (".lora_" in name)
    assert all(factors.lora_B.grad.any() for _, factors in adapters(model))
    names = [name for name, _ in adapters(model)]
    assert all(any(f".{name}".endswith(f".{target}") for target in config.target_modules) for name in names)


def test_dropout_only_in_training() -> None:
    model = adapted(LoRAConfig(rank=4, dropout=0.5))
    model.eval()
    assert torch.equal(model(IDS).logits, model(IDS).logits)
    model.train()
    assert not torch.equal(model(IDS).logits, model(IDS).logits)


# ---- PEFT's files ----


@torch.no_grad()
def test_peft_loads_what_we_save(case: Any, tmp_path: Path) -> None:
    """Training rule 7: names, shapes, scale and numbers."""
    model, config, base = case
    apply_lora(model, config)
    fill(model)
    save_adapter(model, tmp_path / "adapter", str(base))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # peft warns of missing keys
        theirs = in_peft(base, tmp_path / "adapter")
    ours = model.eval()(IDS).logits
    torch.testing.assert_close(ours, theirs(IDS).logits, **TOLERANCE)
    with adapters_off(model):
        assert (model(IDS).logits - ours).abs().max() > 0.05, "the adapter matters"


@torch.no_grad()
@pytest.mark.parametrize("targets", [["q_proj", "o_proj", "gate_proj"], "all-linear", r".*layers\.0.*\.(up|k)_proj"])
def test_we_load_what_peft_saves(tmp_path: Path, targets: Any) -> None:
    """Lists, keywords and expressions as targets: the tensors in the file say which modules are meant."""
    peft = pytest.importorskip("peft")
    save_pretrained(make_model(), tmp_path / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    config = peft.LoraConfig(r=5, lora_alpha=7, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(model, config).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    ours = AutoModel.from_pretrained(tmp_path / "base", device="cpu")
    plain = ours(IDS).logits
    load_adapter(ours, tmp_path / "adapter")
    torch.testing.assert_close(ours(IDS).logits, theirs(IDS).logits, **TOLERANCE)
    assert (ours(IDS).logits - plain).abs().max() > 0.05


def test_gradients_equal_peft(tmp_path: Path) -> None:
    model = make_model()
    save_pretrained(model, tmp_path / "base")
    apply_lora(model, LoRAConfig(rank=4, alpha=8))
    fill(model)
    save_adapter(model, tmp_path / "adapter", str(tmp_path / "base"))
    peft = pytest.importorskip("peft")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True)
    model(IDS).logits.logsumexp(-1).mean().backward()
    theirs(IDS).logits.logsumexp(-1).mean().backward()
    expected = {name: p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    assert len(expected) == 2 * len(list(adapters(model))) == 2 * 2 * len(ATTENTION_AND_MLP)
    for name, factors in adapters(model):
        for factor in ("lora_A", "lora_B"):
            theirs_grad = expected[f"base_model.model.{name}.{factor}.default.weight"]
            assert theirs_grad.any()
            torch.testing.assert_close(getattr(factors, factor).grad, theirs_grad, atol=1e-6, rtol=1e-4)


@torch.no_grad()
def test_a_save_and_a_load_are_exact(case: Any, tmp_path: Path) -> None:
    model, config, _ = case
    twin_base = make_model(model.config.model_type, **{k: getattr(model.config, k) for k in ("head_dim",)})
    twin_base.load_state_dict(model.state_dict())
    apply_lora(model, config)
    fill(model)
    save_adapter(model, tmp_path / "adapter", "somewhere")
    load_adapter(twin_base, tmp_path / "adapter")
    assert twin_base.lora == config
    assert torch.equal(twin_base(IDS).logits, model(IDS).logits)


# ---- merging ----


@torch.no_grad()
def test_merge_and_unmerge() -> None:
    model = adapted(LoRAConfig(rank=4)).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = model(IDS).logits
    merge_lora(model)
    merge_lora(model)
    torch.testing.assert_close(model(IDS).logits, expected, **TOLERANCE)
    assert not torch.equal(
        model.state_dict()["model.layers.0.mlp.down_proj.weight"], before["model.layers.0.mlp.down_proj.weight"]
    )
    unmerge_lora(model)
    unmerge_lora(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(IDS).logits, expected)


@torch.no_grad()
def test_merging_rounds_once() -> None:
    """Training rule 7: float32 sums of bf16 weights and float32 factors, then one rounding."""
    model = adapted(LoRAConfig(rank=4, alpha=3), dtype="bfloat16")
    linear = model.model.layers[0].self_attn.o_proj
    assert isinstance(linear.adapter, LoRA)
    ((_, factors, _),) = linear.adapter.parts()
    assert factors.lora_A.dtype == torch.float32
    exact = linear.weight.double() + 0.75 * factors.lora_B.double() @ factors.lora_A.double()
    merge_lora(model)
    assert linear.weight.dtype == torch.bfloat16
    assert (linear.weight.double() - exact).abs().max() <= (exact.abs() * 2**-8).max()
    assert torch.equal(linear.weight, exact.float().bfloat16()), "no rounding before the last"


@torch.no_grad()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_export_has_the_adapter_in_it(tmp_path: Path, dtype: str) -> None:
    """Training rule 7: transformers answers as the adapted model does; the model itself stays as it was."""
    model = adapted(LoRAConfig(rank=4), dtype=dtype).eval()
    before = model(IDS).logits
    save_pretrained(model, tmp_path / "merged")
    assert torch.equal(model(IDS).logits, before)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    merge_lora(model)
    torch.testing.assert_close(theirs(IDS).logits, model.float()(IDS).logits, **TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize("extra", [{}, {"rope_interleave": True}])
def test_an_adapter_directory_opens_as_its_merged_model(tmp_path: Path, extra: dict[str, Any]) -> None:
    """The base keeps its layout: an interleaved one (as GGUF has) takes a half-split adapter."""
    model = adapted(LoRAConfig(rank=4), **extra).eval()
    expected = model(IDS).logits
    save_adapter(model, tmp_path / "adapter", str(tmp_path / "base"))
    with adapters_off(model):
        base = make_model(**extra)
        save_pretrained(base, tmp_path / "base")
    opened = AutoModel.from_pretrained(tmp_path / "adapter", device="cpu")
    torch.testing.assert_close(opened(IDS).logits, expected, **TOLERANCE)
    theirs = in_peft(tmp_path / "base", tmp_path / "adapter")
    torch.testing.assert_close(theirs(IDS).logits, expected, **TOLERANCE)
    load_adapter(base, tmp_path / "adapter")
    torch.testing.assert_close(base(IDS).logits, expected, **TOLERANCE)


@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 3), st.booleans())
def test_the_two_rotary_layouts_are_inverse(heads: int, half: int, rest: int, vector: bool) -> None:
    rows = heads * (2 * half + rest)
    tensor = torch.arange(rows if vector else rows * 2).view(rows, *([] if vector else [2]))
    there = interleaved_to_halves(tensor, 2 * half + rest, 2 * half)
    assert torch.equal(halves_to_interleaved(there, 2 * half + rest, 2 * half), tensor)


# ---- refusals ----


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("q_proj", "w1"), "'w1' names no linear projection of this model; there are down_proj, gate_proj"),
        (("roj",), "'roj' names no linear projection"),
        (("embed_tokens",), "'embed_tokens' names no linear projection"),
        (("lm_head",), "lm_head is the embedding itself in this model"),
    ],
)
def test_targets_that_cannot_be(targets: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        apply_lora(make_model(tie_word_embeddings=True), LoRAConfig(target_modules=targets))


def test_one_set_of_adapters() -> None:
    with pytest.raises(ConfigError, match="has adapters already"):
        apply_lora(adapted(LoRAConfig()), LoRAConfig())
    with pytest.raises(ConfigError, match="has no adapters to save"):
        save_adapter(make_model(), "nowhere", "base")


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    save_adapter(adapted(LoRAConfig(rank=4)), tmp_path / "good", str(tmp_path / "base"))
    config_path, weights_path = (
        tmp_path / "good" / name for name in ("adapter_config.json", "adapter_model.safetensors")
    )
    config, weights = json.loads(config_path.read_text()), load_file(weights_path)
    first = min(weights)

    def refused(kind: type[Exception], message: str, **changes: Any) -> None:
        config_path.write_text(json.dumps(config | changes))
        with pytest.raises(kind, match=message) as caught:
            load_adapter(make_model(), tmp_path / "good")
        assert "\n" not in str(caught.value)
        config_path.write_text(json.dumps(config))

    refused(ConfigError, "field 'use_dora': True is not supported", use_dora=True)
    refused(ConfigError, "field 'bias': 'all' is not supported", bias="all")
    refused(ConfigError, "field 'init_lora_weights': 'pissa' is not supported; merge", init_lora_weights="pissa")
    refused(ConfigError, "field 'use_qalora': True is not supported", use_qalora=True)
    refused(ConfigError, "field 'modules_to_save'", modules_to_save=["lm_head"])
    refused(ConfigError, "field 'rank_pattern'", rank_pattern={"q_proj": 2})
    refused(ConfigError, "field 'peft_type': 'IA3' is not supported", peft_type="IA3")
    refused(CheckpointError, "no two factors of rank 8", r=8)
    refused(CheckpointError, "the adapter of 'model.layers.0.mlp.down_proj' is not a target", target_modules=["q_proj"])
    save_file({name: value for name, value in weights.items() if name != first}, weights_path)
    refused(CheckpointError, "no two factors of rank 4")
    save_file({**weights, first: weights[first][:, :-1].contiguous()}, weights_path)
    refused(CheckpointError, "the model asks for")
    save_file({**weights, "base_model.model.model.embed_tokens.lora_embedding_A": weights[first].clone()}, weights_path)
    refused(CheckpointError, "is no factor of a linear adapter")
    weights_path.write_bytes(b"torn")
    refused(CheckpointError, "truncated or damaged")
    weights_path.unlink()
    refused(CheckpointError, "no such file")


def test_a_base_that_does_not_fit(tmp_path: Path) -> None:
    save_adapter(adapted(LoRAConfig(rank=4)), tmp_path / "adapter", str(tmp_path / "base"))
    save_pretrained(make_model(hidden_size=96), tmp_path / "base")
    with pytest.raises(CheckpointError, match="give the model it was trained on"):
        AutoModel.from_pretrained(tmp_path / "adapter", device="cpu")
    save_pretrained(make_model(num_hidden_layers=1), tmp_path / "base", overwrite=True)
    with pytest.raises(CheckpointError, match=r"the base model has no 'model.layers.1.mlp.down_proj'"):
        AutoModel.from_pretrained(tmp_path / "adapter", device="cpu")
    config_path = tmp_path / "adapter" / "adapter_config.json"
    config_path.write_text(json.dumps(json.loads(config_path.read_text()) | {"base_model_name_or_path": None}))
    assert read_adapter(tmp_path / "adapter").base_model is None
    with pytest.raises(CheckpointError, match="names no base_model_name_or_path"):
        open_source(tmp_path / "adapter")
