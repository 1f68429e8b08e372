"""GGUF models: written here as llama.cpp's converter writes them, and the real SmolLM2 file."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from astrai_core.checkpoint.gguf import GGUFFile
from astrai_core.checkpoint.gguf_config import llama3_scaling
from astrai_core.config.model import ModelConfig
from astrai_core.errors import CheckpointError

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

Q = gguf.GGMLQuantizationType
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, rope_theta=500000.0),
    "llama tied": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True, head_dim=32),
    "llama biases": lambda: transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama3 rope": lambda: transformers.LlamaConfig(**SIZES, rope_theta=500000.0, rope_scaling=dict(LLAMA3_ROPE)),
    "llama linear": lambda: transformers.LlamaConfig(**SIZES, rope_scaling={"rope_type": "linear", "factor": 2.5}),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, rope_theta=1e6, tie_word_embeddings=True),
    "qwen2 yarn": lambda: transformers.Qwen2Config(
        **SIZES, rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=32, rope_theta=1e6),
}


def converter_permute(weight: np.ndarray, n_heads: int) -> np.ndarray:
    """Row order of q and k in Llama GGUF files: the halves of each head become neighbouring pairs."""
    halves = weight.reshape(n_heads, 2, weight.shape[0] // n_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def llama3_divisors(rope: dict[str, Any], theta: float, head_dim: int) -> np.ndarray:
    """rope_freqs.weight as converters compute it: transformers' unscaled frequencies over its scaled ones."""
    config = transformers.LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        rope_theta=theta,
        rope_scaling=dict(rope),
        max_position_embeddings=2**20,
    )
    scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    return (plain / scaled.double()).numpy().astype(np.float32)


def as_gguf(
    config: Any,
    state: dict[str, torch.Tensor],
    kind: Any = Q.F32,
    extra: Callable[[Any], None] = lambda writer: None,
) -> Callable[[Any], None]:
    """What llama.cpp's converter writes for a transformers model; to be given to the fixture write_gguf."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    rope = config.rope_parameters

    def fill(writer: Any) -> None:
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_bos_token_id(config.bos_token_id)
        writer.add_eos_token_id(config.eos_token_id)
        writer.add_rope_freq_base(rope["rope_theta"])
        if rope["rope_type"] in ("linear", "yarn"):
            writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
            writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if rope["rope_type"] == "llama3":
            writer.add_tensor("rope_freqs.weight", llama3_divisors(rope, rope["rope_theta"], head_dim))
        for name, tensor in state.items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            stem, suffix = name.rsplit(".", 1)
            values = tensor.float().numpy()
            part = stem.rsplit(".", 1)[-1]
            if config.model_type == "llama" and part in heads:
                values = converter_permute(values, heads[part])
            ggml_name = TOP.get(stem) or f"blk.{stem.split('.')[2]}.{LAYER[stem.split('.', 3)[3]]}"
            stored = kind if values.ndim > 1 else Q.F32
            writer.add_tensor(f"{ggml_name}.{suffix}", gguf.quants.quantize(values, stored), raw_dtype=stored)
        extra(writer)

    return fill


def tiny(family: str) -> tuple[Any, dict[str, torch.Tensor]]:
    config = FAMILIES[family]()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    state = model.state_dict()
    for name, value in state.items():
        if name.endswith(("bias", "norm.weight")):  # transformers starts them at constants
            value.normal_()
    return config, {name: value.clone() for name, value in state.items()}


def expected_names(config: Any, state: dict[str, torch.Tensor]) -> set[str]:
    return set(state) - ({"lm_head.weight"} if config.tie_word_embeddings else set())


class TestModels:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_round_trip(self, tmp_path: Path, write_gguf: Callable[..., Path], family: str) -> None:
        """Tensors come back bit for bit under their names (q and k in their old order), and so does the config."""
        config, state = tiny(family)
        file = GGUFFile(write_gguf(tmp_path / "m.gguf", as_gguf(config, state), config.model_type))
        assert set(file.tensor_names()) == expected_names(config, state)
        for name, tensor in file.tensors():
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor, state[name]), name
        assert type(config)(**file.config()).to_dict() | {"architectures": None} == config.to_dict()
        ours = ModelConfig.from_dict(file.config())
        assert ours == ModelConfig.from_dict(config.to_dict() | {"dtype": None}, strict=False)

    @pytest.mark.parametrize(("kind", "tolerance"), [(Q.F16, 5e-4), (Q.BF16, 4e-3), (Q.Q8_0, 0.01)])
    def test_storage_types(self, tmp_path: Path, write_gguf: Callable[..., Path], kind: Any, tolerance: float) -> None:
        """Half and quantised tensors come back close, norms exact, and as the dtype asked for."""
        config, state = tiny("llama")
        file = GGUFFile(write_gguf(tmp_path / "m.gguf", as_gguf(config, state, kind), config.model_type))
        for name, tensor in file.tensors():
            limit = tolerance * state[name].abs().max() if state[name].ndim > 1 else 0
            assert (tensor - state[name]).abs().max() <= limit, name
        assert file.storage_types() == {kind.name: 16, "F32": 5}
        assert {tensor.dtype for _, tensor in file.tensors(torch.bfloat16)} == {torch.bfloat16}

    def test_tensors_own_their_memory(self, tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
        """Writing to a tensor changes neither the file nor the next read."""
        config, state = tiny("qwen2")
        file = GGUFFile(write_gguf(tmp_path / "m.gguf", as_gguf(config, state), config.model_type))
        for _, tensor in file.tensors():
            tensor.zero_()
        assert all(torch.equal(tensor, state[name]) for name, tensor in file.tensors())

    def test_mistral_window(self, tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
        """A Llama file with a sliding window is a Mistral model."""
        config, state = tiny("llama")
        path = write_gguf(
            tmp_path / "m.gguf", as_gguf(config, state, extra=lambda w: w.add_sliding_window(128)), config.model_type
        )
        read = GGUFFile(path).config()
        assert (read["model_type"], read["sliding_window"]) == ("mistral", 128)
        assert ModelConfig.from_dict(read).sliding_window == 128

    def test_generation_config(self, tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
        """End-of-turn ids and sampling settings become generation_config.json's."""

        def extra(writer: Any) -> None:
            writer.add_eot_token_id(7)
            writer.add_float32("general.sampling.temp", 0.7)

        config, state = tiny("llama")
        read = GGUFFile(
            write_gguf(tmp_path / "m.gguf", as_gguf(config, state, extra=extra), config.model_type)
        ).generation_config()
        assert read == {"bos_token_id": 1, "eos_token_id": [2, 7], "temperature": 0.7}

    @settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        factor=st.sampled_from([2.0, 8.0, 32.0]),
        low=st.sampled_from([1.0, 2.0]),
        ratio=st.sampled_from([1.5, 4.0, 8.0]),
        original=st.sampled_from([2048, 8192]),
        head_dim=st.sampled_from([8, 16, 64, 128]),
        theta=st.sampled_from([1e4, 5e5]),
    )
    def test_llama3_scaling(
        self, factor: float, low: float, ratio: float, original: int, head_dim: int, theta: float
    ) -> None:
        """The recovered parameters give the same frequencies; for published head sizes they are the original ones."""
        rope = LLAMA3_ROPE | {"factor": factor, "low_freq_factor": low, "high_freq_factor": low * ratio}
        rope["original_max_position_embeddings"] = original
        divisors = llama3_divisors(rope, theta, head_dim)
        assume(divisors[-1] == np.float32(factor))  # some frequency is scaled in full, as with any real head and base
        found = llama3_scaling(divisors.astype(np.float64), theta, head_dim)
        assert found is not None
        np.testing.assert_allclose(llama3_divisors(found, theta, head_dim), divisors, rtol=1e-3)
        if low == 1 and ratio >= 4 and head_dim >= 64:
            assert found == rope


class TestRefusals:
    """A variant that would compute something else: one line that names the file, the key, and the remedy."""

    @pytest.mark.parametrize(
        ("extra", "error"),
        [
            (lambda w: w.add_expert_count(8), "a mixture of experts is not supported"),
            (lambda w: w.add_rope_dimension_count(8), "rope.dimension_count or value_length other than the head size"),
            (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "rope.scaling.type 'longrope'"),
            (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), "'llama.rope.scaling.factor' is missing"),
            (lambda w: w.add_uint16("split.count", 3), "is one of 3 parts; merge them"),
            (
                lambda w: w.add_tensor("blk.0.attn_sinks.weight", np.zeros(4, np.float32)),
                "'blk.0.attn_sinks.weight' is",
            ),
            (lambda w: w.add_tensor("rope_freqs.weight", np.ones(3, np.float32)), r"shape \[3\], not \[8\]"),
            (
                lambda w: w.add_tensor("rope_freqs.weight", np.array([1, 9, 2, 7, 1, 3, 2, 5], np.float32)),
                "rope_freqs.weight that is no Llama 3 scaling",
            ),
        ],
    )
    def test_unsupported_models(
        self, tmp_path: Path, write_gguf: Callable[..., Path], extra: Callable[[Any], None], error: str
    ) -> None:
        """A variant that would compute something else is refused by name, never approximated."""
        config, state = tiny("llama")
        path = write_gguf(tmp_path / "m.gguf", as_gguf(config, state, extra=extra), config.model_type)
        with pytest.raises(CheckpointError, match=rf"m\.gguf: .*{error}"):
            GGUFFile(path).config()

    def test_storage_that_cannot_be_read(self, tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
        """A storage type that has no dequantisation is named with its tensor."""
        config, state = tiny("llama")
        del state["model.norm.weight"]
        path = write_gguf(
            tmp_path / "m.gguf",
            as_gguf(config, state, extra=lambda w: w.add_tensor("output_norm.weight", np.zeros(64, np.int32))),
            config.model_type,
        )
        with pytest.raises(CheckpointError, match=r"'output_norm\.weight' is stored as I32, which the gguf package"):
            list(GGUFFile(path).tensors())

    def test_rows_that_are_no_heads(self, tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
        """A q projection that does not divide into heads is named, not reordered wrongly."""
        config, state = tiny("llama")
        path = write_gguf(tmp_path / "m.gguf", as_gguf(config, state), config.model_type)
        content = path.read_bytes()
        key = b"llama.attention.head_count" + struct.pack("<I", 4)
        path.write_bytes(content.replace(key + struct.pack("<I", 4), key + struct.pack("<I", 5)))
        with pytest.raises(
            CheckpointError, match=r"q_proj\.weight has 64 rows, which llama\.attention\.head_count = 5"
        ):
            list(GGUFFile(path).tensors())


class TestSmolLM2:
    """Facts of the real file (SmolLM2-135M-Instruct, Q4_1)."""

    @pytest.fixture(scope="class")
    def file(self, smollm2_gguf: Path) -> GGUFFile:
        return GGUFFile(smollm2_gguf)

    def test_config(self, file: GGUFFile) -> None:
        """Architecture as published; eps is the short decimal, not its float32 neighbour."""
        config = ModelConfig.from_dict(file.config())
        assert (config.model_type, config.hidden_size, config.num_hidden_layers) == ("llama", 576, 30)
        assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
        assert (config.intermediate_size, config.vocab_size, config.max_position_embeddings) == (1536, 49152, 8192)
        assert (config.rms_norm_eps, config.rope_parameters.rope_theta) == (1e-5, 100000.0)
        assert config.tie_word_embeddings
        assert not config.attention_bias
        assert file.generation_config() == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}

    def test_tensors(self, file: GGUFFile) -> None:
        """272 tensors, 134.5 M values; the embedding equals gguf's own dequantisation."""
        assert file.storage_types() == {"Q4_1": 210, "F32": 61, "Q8_0": 1}
        assert len(file.tensor_names()) == 272
        assert "lm_head.weight" not in file.tensor_names()
        name, embedding = next(iter(file.tensors()))
        assert (name, tuple(embedding.shape)) == ("model.embed_tokens.weight", (49152, 576))
        assert 0.05 < embedding.std() < 0.5
