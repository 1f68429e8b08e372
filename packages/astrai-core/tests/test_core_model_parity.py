"""Logits of every family equal transformers' within 1e-4 in fp32: dense, padded, cached; and back through files."""

from __future__ import annotations

import pytest
import torch

from astrai_core import AutoModel, ModelConfig, save_pretrained
from astrai_core.model.transformer import CausalLM

transformers = pytest.importorskip("transformers")

SHAPE = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "llama-tied-bias": ("LlamaConfig", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("LlamaConfig", {"head_dim": 20}),
    "llama-mha": ("LlamaConfig", {"num_key_value_heads": 6}),
    "llama-linear": ("LlamaConfig", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}),
    "llama-yarn": ("LlamaConfig", {"rope_parameters": YARN}),
    "llama-yarn-exact": ("LlamaConfig", {"rope_parameters": YARN | {"truncate": False, "beta_fast": 16.0}}),
    "llama-yarn-mscale": ("LlamaConfig", {"rope_parameters": YARN | {"mscale": 1.2, "mscale_all_dim": 0.7}}),
    "llama-llama3": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral-window": ("MistralConfig", {"sliding_window": 7}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-window": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "qwen3-tied-bias": ("Qwen3Config", {"head_dim": 24, "tie_word_embeddings": True, "attention_bias": True}),
    "smollm3": ("SmolLM3Config", {"no_rope_layer_interval": 2}),
    "qwen2-moe": ("Qwen2MoeConfig", MOE | {"shared_expert_intermediate_size": 40, "decoder_sparse_step": 2}),
    "qwen2-moe-window": (
        "Qwen2MoeConfig",
        MOE
        | {"shared_expert_intermediate_size": 20, "use_sliding_window": True, "sliding_window": 5, "qkv_bias": False},
    ),
    "qwen3-moe": ("Qwen3MoeConfig", MOE | {"head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen3-moe-window": ("Qwen3MoeConfig", MOE | {"head_dim": 8, "use_sliding_window": True, "sliding_window": 6}),
}
TOLERANCE = {"atol": 1e-4, "rtol": 0.0}


def reference(name: str):
    """Build transformers' model of a family with random weights, biases and norms."""
    config_class, extra = FAMILIES[name]
    torch.manual_seed(sum(map(ord, name)))
    config = getattr(transformers, config_class)(**(SHAPE | extra))
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    """transformers' model, the directory it was saved to, and ours loaded from there."""
    theirs = reference(request.param)
    directory = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(directory)
    return theirs, directory, AutoModel.from_pretrained(directory, device="cpu")


def ids(batch: int, seq: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, SHAPE["vocab_size"], (batch, seq), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_dense_logits(pair):
    theirs, _, ours = pair
    tokens = ids(2, 90)
    torch.testing.assert_close(ours(tokens).logits, theirs(tokens).logits, **TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_ragged_batch_with_padding(pair, side):
    theirs, _, ours = pair
    tokens, mask = ids(3, 23), torch.ones(3, 23, dtype=torch.long)
    for row, n_pad in enumerate([0, 5, 17]):
        if n_pad:
            where = slice(0, n_pad) if side == "left" else slice(-n_pad, None)
            tokens[row, where], mask[row, where] = SHAPE["pad_token_id"], 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    expected = theirs(tokens, attention_mask=mask, position_ids=positions).logits
    actual = ours(tokens, position_ids=positions, attention_mask=mask).logits
    assert actual.isfinite().all(), "padding must not produce NaN"
    torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], **TOLERANCE)


@torch.no_grad()
def test_future_token_changes_no_earlier_logit(pair):
    _, _, ours = pair
    tokens = ids(1, 40)
    changed = tokens.clone()
    changed[0, 25] = (changed[0, 25] + 1) % SHAPE["vocab_size"]
    before, after = ours(tokens).logits[0], ours(changed).logits[0]
    assert torch.equal(before[:25], after[:25])
    assert not torch.equal(before[25:], after[25:])


@torch.no_grad()
def test_save_pretrained_loads_in_transformers(pair, tmp_path):
    theirs, _, ours = pair
    save_pretrained(ours, tmp_path / "out", max_shard_bytes=60_000)
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file(), "small shards were asked for"
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    tokens = ids(2, 30, seed=1)
    torch.testing.assert_close(again(tokens).logits, theirs(tokens).logits, **TOLERANCE)
    reloaded = AutoModel.from_pretrained(tmp_path / "out", device="cpu")
    assert torch.equal(reloaded(tokens).logits, ours(tokens).logits)
    assert reloaded.config == ModelConfig.from_pretrained(tmp_path / "out")


@torch.no_grad()
def test_interleaved_rotary_equals_half_split_of_the_export(tmp_path):
    """An interleaved model exported to the half-split layout gives transformers the same logits."""
    for extra in ({}, {"model_type": "qwen3", "head_dim": 20}, {"partial_rotary_factor": 0.5, "head_dim": 16}):
        config = ModelConfig.from_dict({"model_type": "llama", "rope_interleave": True} | SHAPE | extra)
        torch.manual_seed(0)
        ours = AutoModel.from_config(config, dtype="float32", device="cpu").eval()
        for parameter in ours.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        tokens = ids(1, 20)
        target = tmp_path / "-".join(["export", *extra])
        save_pretrained(ours, target)
        halves = AutoModel.from_pretrained(target, device="cpu")
        assert not halves.config.rope_interleave
        torch.testing.assert_close(halves(tokens).logits, ours(tokens).logits, **TOLERANCE)
        if "partial_rotary_factor" not in extra:  # transformers ignores it for these families
            theirs = transformers.AutoModelForCausalLM.from_pretrained(target).eval()
            torch.testing.assert_close(theirs(tokens).logits, ours(tokens).logits, **TOLERANCE)


@pytest.mark.parametrize(
    "legacy", [{"type": "linear", "factor": 3.0}, {"rope_type": "yarn", "factor": 2.0}, LLAMA3, None]
)
def test_old_and_new_rope_keys_mean_the_same(legacy):
    """`rope_theta` + `rope_scaling` (old) and `rope_parameters` (new) give equal configs."""
    base = {"model_type": "llama"} | SHAPE
    scaling = None if legacy is None else {k: v for k, v in legacy.items() if k != "rope_theta"}
    old = ModelConfig.from_dict(base | {"rope_theta": 5e5, "rope_scaling": scaling})
    parameters = {"rope_type": "default"} if scaling is None else dict(scaling)
    parameters["rope_type"] = parameters.pop("type", parameters.get("rope_type"))
    new = ModelConfig.from_dict(base | {"rope_parameters": parameters | {"rope_theta": 5e5}})
    assert old == new
    assert old.rope_parameters.rope_theta == 5e5


def test_dtype_move_keeps_the_rotary_table_in_fp32():
    config = ModelConfig.from_dict({"model_type": "llama"} | SHAPE)
    model = CausalLM(config)
    table = model.model.rotary.cos.clone()
    model.to(torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.model.rotary.cos, table)
