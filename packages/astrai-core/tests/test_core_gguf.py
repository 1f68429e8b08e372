"""GGUF files: written here as llama.cpp's converter writes them, and the real SmolLM2 file."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from astrai_core.checkpoint.gguf import GGUFFile
from astrai_core.checkpoint.gguf_config import llama3_scaling
from astrai_core.config.model import ModelConfig
from astrai_core.errors import AstraiError, CheckpointError, MissingDependencyError, TokenizerError

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


def write_gguf(
    path: Path,
    config: Any,
    state: dict[str, torch.Tensor],
    kind: Any = Q.F32,
    extra: Callable[[Any], None] = lambda writer: None,
) -> Path:
    """Convert a small transformers model as llama.cpp's converter does."""
    arch = config.model_type
    writer = gguf.GGUFWriter(path, arch)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
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
    rope = config.rope_parameters
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
        if arch == "llama" and stem.endswith("q_proj"):
            values = converter_permute(values, config.num_attention_heads)
        if arch == "llama" and stem.endswith("k_proj"):
            values = converter_permute(values, config.num_key_value_heads)
        if stem in TOP:
            ggml_name = TOP[stem]
        else:
            _, _, layer, part = stem.split(".", 3)
            ggml_name = f"blk.{layer}.{LAYER[part]}"
        stored = kind if values.ndim > 1 else Q.F32
        writer.add_tensor(f"{ggml_name}.{suffix}", gguf.quants.quantize(values, stored), raw_dtype=stored)
    extra(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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
    def test_round_trip(self, tmp_path: Path, family: str) -> None:
        """Tensors come back bit for bit under their names (q and k in their old order), and so does the config."""
        config, state = tiny(family)
        file = GGUFFile(write_gguf(tmp_path / "m.gguf", config, state))
        assert set(file.tensor_names()) == expected_names(config, state)
        for name, tensor in file.tensors():
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor, state[name]), name
        assert type(config)(**file.config()).to_dict() | {"architectures": None} == config.to_dict()
        ours = ModelConfig.from_dict(file.config())
        assert ours == ModelConfig.from_dict(config.to_dict() | {"dtype": None}, strict=False)

    @pytest.mark.parametrize(("kind", "tolerance"), [(Q.F16, 5e-4), (Q.BF16, 4e-3), (Q.Q8_0, 0.01)])
    def test_storage_types(self, tmp_path: Path, kind: Any, tolerance: float) -> None:
        """Half and quantised tensors come back close, norms exact, and as the dtype asked for."""
        config, state = tiny("llama")
        file = GGUFFile(write_gguf(tmp_path / "m.gguf", config, state, kind))
        for name, tensor in file.tensors():
            limit = tolerance * state[name].abs().max() if state[name].ndim > 1 else 0
            assert (tensor - state[name]).abs().max() <= limit, name
        assert file.storage_types() == {kind.name: 16, "F32": 5}
        assert {tensor.dtype for _, tensor in file.tensors(torch.bfloat16)} == {torch.bfloat16}

    def test_tensors_own_their_memory(self, tmp_path: Path) -> None:
        """Writing to a tensor changes neither the file nor the next read."""
        config, state = tiny("qwen2")
        file = GGUFFile(write_gguf(tmp_path / "m.gguf", config, state))
        for _, tensor in file.tensors():
            tensor.zero_()
        assert all(torch.equal(tensor, state[name]) for name, tensor in file.tensors())

    def test_mistral_window(self, tmp_path: Path) -> None:
        """A Llama file with a sliding window is a Mistral model."""
        config, state = tiny("llama")
        path = write_gguf(tmp_path / "m.gguf", config, state, extra=lambda w: w.add_sliding_window(128))
        read = GGUFFile(path).config()
        assert (read["model_type"], read["sliding_window"]) == ("mistral", 128)
        assert ModelConfig.from_dict(read).sliding_window == 128

    def test_generation_config(self, tmp_path: Path) -> None:
        """End-of-turn ids and sampling settings become generation_config.json's."""

        def extra(writer: Any) -> None:
            writer.add_eot_token_id(7)
            writer.add_float32("general.sampling.temp", 0.7)

        config, state = tiny("llama")
        read = GGUFFile(write_gguf(tmp_path / "m.gguf", config, state, extra=extra)).generation_config()
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


class TestHeader:
    def test_every_value_type(self, tmp_path: Path) -> None:
        """Metadata and tensor directory equal those of gguf.GGUFReader."""
        config, state = tiny("qwen3")

        def extra(writer: Any) -> None:
            for width in (8, 16, 32, 64):
                getattr(writer, f"add_uint{width}")(f"x.uint{width}", 2**width - 1)
                getattr(writer, f"add_int{width}")(f"x.int{width}", -(2 ** (width - 1)))
            writer.add_float64("x.float64", 0.1)
            writer.add_bool("x.bool", True)
            writer.add_array("x.ints", [1, -2, 3])
            writer.add_array("x.floats", [0.5, -1.25])
            writer.add_array("x.bools", [True, False])
            writer.add_array("x.texts", ["", "é", "a" * 300])

        path = write_gguf(tmp_path / "m.gguf", config, state, Q.Q8_0, extra)
        file, reader = GGUFFile(path), gguf.GGUFReader(path)
        theirs = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
        assert list(file.metadata) == list(theirs)
        for key, value in file.metadata.items():
            assert value == (pytest.approx(theirs[key], rel=1e-6) if isinstance(value, float) else theirs[key]), key
        assert file.metadata["qwen3.attention.layer_norm_rms_epsilon"] == 1e-5
        infos = file._header.tensors
        assert [(i.name, i.offset, i.n_bytes, i.shape[::-1]) for i in infos.values()] == [
            (t.name, t.data_offset, t.n_bytes, tuple(t.shape.tolist())) for t in reader.tensors
        ]

    @settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_truncated(self, small_file: bytes, tmp_path: Path, data: st.DataObject) -> None:
        """A file cut anywhere is refused when it is opened, in one line with its name."""
        path = tmp_path / "cut.gguf"
        path.write_bytes(small_file[: data.draw(st.integers(0, len(small_file) - 1))])
        with pytest.raises(CheckpointError, match=r"cut\.gguf") as caught:
            GGUFFile(path)
        assert "\n" not in str(caught.value)

    @settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_damaged(self, small_file: bytes, tmp_path: Path, data: st.DataObject) -> None:
        """A damaged header is read or refused, never another kind of error."""
        damaged = bytearray(small_file)
        for _ in range(data.draw(st.integers(1, 3))):
            damaged[data.draw(st.integers(0, 6000))] = data.draw(st.integers(0, 255))
        path = tmp_path / "damaged.gguf"
        path.write_bytes(damaged)
        try:
            file = GGUFFile(path)
            file.config()
            file.tokenizer().encode("a fox")
        except AstraiError as error:
            assert "\n" not in str(error)  # noqa: PT017  most damage raises; the rest changes values only

    @pytest.fixture(scope="class")
    def small_file(self, byte_level_backend: tokenizers.Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> bytes:
        config, state = tiny("llama")
        path = tmp_path_factory.mktemp("gguf") / "m.gguf"
        return write_gguf(path, config, state, extra=lambda w: add_byte_level(w, byte_level_backend)).read_bytes()


class TestRefusals:
    """Bad input: one line that names the file, the key, and the remedy."""

    @pytest.mark.parametrize(
        ("content", "error"),
        [
            (b"", "is not a GGUF file"),
            (b"PK\x03\x04zip", "is not a GGUF file"),
            (struct.pack("<4sIQQ", b"GGUF", 1, 0, 0), "has GGUF version 1;"),
            (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), r"version 50331648 \(or big-endian\)"),
            (struct.pack("<4sIQQ", b"GGUF", 3, 0, 0), "key 'general.architecture' is missing"),
            (struct.pack("<4sIQQ", b"GGUF", 3, 0, 2**60), "is truncated: its header goes on"),
        ],
    )
    def test_content(self, tmp_path: Path, content: bytes, error: str) -> None:
        """What is no GGUF file of a known version is refused."""
        (tmp_path / "m.gguf").write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"m\.gguf: .*{error}"):
            GGUFFile(tmp_path / "m.gguf")

    def test_missing_file_and_directory(self, tmp_path: Path) -> None:
        """A path that cannot be read is named, with the reason."""
        with pytest.raises(CheckpointError, match=r"nosuch\.gguf: cannot be read: No such file"):
            GGUFFile(tmp_path / "nosuch.gguf")
        with pytest.raises(CheckpointError, match="cannot be read: Is a directory"):
            GGUFFile(tmp_path)

    def test_missing_package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without the package gguf the pip line is given."""
        monkeypatch.setitem(sys.modules, "gguf", None)
        with pytest.raises(MissingDependencyError, match=r"pip install 'astrai-core\[gguf\]'"):
            GGUFFile(tmp_path / "m.gguf")

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
    def test_unsupported_models(self, tmp_path: Path, extra: Callable[[Any], None], error: str) -> None:
        """A variant that would compute something else is refused by name, never approximated."""
        config, state = tiny("llama")
        path = write_gguf(tmp_path / "m.gguf", config, state, extra=extra)
        with pytest.raises(CheckpointError, match=rf"m\.gguf: .*{error}"):
            GGUFFile(path).config()

    def test_keys_and_types(self, tmp_path: Path) -> None:
        """An unknown architecture, missing keys and wrong value types are named."""

        def write(arch: str, **values: Any) -> Path:
            writer = gguf.GGUFWriter(tmp_path / "m.gguf", arch)
            for key, value in values.items():
                name = f"{arch}.{key.replace('__', '.')}"
                if isinstance(value, list):
                    writer.add_array(name, value)
                else:
                    (writer.add_uint32 if isinstance(value, int) else writer.add_string)(name, value)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            return tmp_path / "m.gguf"

        with pytest.raises(
            CheckpointError, match="architecture 'bert' is not supported.*supported: llama, qwen2, qwen3"
        ):
            GGUFFile(write("bert"))
        with pytest.raises(CheckpointError, match="key 'llama.embedding_length' is missing; convert the model again"):
            GGUFFile(write("llama")).config()
        with pytest.raises(CheckpointError, match="'llama.embedding_length' must be a whole number, not 'x'"):
            GGUFFile(write("llama", embedding_length="x")).config()
        with pytest.raises(CheckpointError, match="'llama.attention.head_count' differs between layers"):
            GGUFFile(write("llama", embedding_length=64, attention__head_count=[4, 8])).config()
        with pytest.raises(CheckpointError, match=r"tensor 'token_embd\.weight' is missing"):
            GGUFFile(write("llama", embedding_length=64, attention__head_count=[4, 4])).config()

    def test_storage_that_cannot_be_read(self, tmp_path: Path) -> None:
        """A storage type that has no dequantisation is named with its tensor."""
        config, state = tiny("llama")
        del state["model.norm.weight"]
        path = write_gguf(
            tmp_path / "m.gguf",
            config,
            state,
            extra=lambda w: w.add_tensor("output_norm.weight", np.zeros(64, np.int32)),
        )
        with pytest.raises(CheckpointError, match=r"'output_norm\.weight' is stored as I32, which the gguf package"):
            list(GGUFFile(path).tensors())

    def test_rows_that_are_no_heads(self, tmp_path: Path) -> None:
        """A q projection that does not divide into heads is named, not reordered wrongly."""
        config, state = tiny("llama")
        path = write_gguf(tmp_path / "m.gguf", config, state)
        content = path.read_bytes()
        key = b"llama.attention.head_count" + struct.pack("<I", 4)
        path.write_bytes(content.replace(key + struct.pack("<I", 4), key + struct.pack("<I", 5)))
        with pytest.raises(
            CheckpointError, match=r"q_proj\.weight has 64 rows, which llama\.attention\.head_count = 5"
        ):
            list(GGUFFile(path).tensors())


def add_byte_level(writer: Any, backend: tokenizers.Tokenizer, pre: str = "gpt-2", padding: int = 0) -> None:
    """tokenizer.ggml.* keys of a byte-level tokenizer, as llama.cpp's converter writes them."""
    state = json.loads(backend.to_str())
    added = {token["id"]: token["special"] for token in state["added_tokens"]}
    vocab = sorted(backend.get_vocab().items(), key=lambda item: item[1])
    tokens = [token for token, _ in vocab] + [f"[PAD{len(vocab) + i}]" for i in range(padding)]
    types = [(3 if added[i] else 4) if i in added else 1 for _, i in vocab] + [5] * padding
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(merge) for merge in state["model"]["merges"]])


def header_only(path: Path, fill: Callable[[Any], None]) -> GGUFFile:
    """A file with metadata and no tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile(path)


CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
PUNCTUATION = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def split_then_bytes(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


ORIGINALS: dict[str, tuple[Any, pre_tokenizers.PreTokenizer]] = {
    "gpt-2": (None, pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "smollm": (
        None,
        pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
    ),
    "llama-bpe": (None, split_then_bytes(CONTRACTIONS + r"\p{N}{1,3}" + PUNCTUATION)),
    "qwen2": (normalizers.NFC(), split_then_bytes(CONTRACTIONS + r"\p{N}" + PUNCTUATION)),
}
"""How the tokenizer.json of GPT-2, SmolLM, Llama 3 and Qwen 2 splits text."""

texts = st.lists(
    st.one_of(
        st.text(max_size=6), st.sampled_from(["the ", "fox's", "I'LL", "12345", " \n\n", "<|im_end|>", "e\u0301"])
    ),
    max_size=6,
).map("".join)
same_file = settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])


class TestByteLevelTokenizer:
    @pytest.fixture(scope="class", params=ORIGINALS)
    def pair(
        self,
        request: pytest.FixtureRequest,
        byte_level_backend: tokenizers.Tokenizer,
        tmp_path_factory: pytest.TempPathFactory,
    ) -> tuple[Any, Any]:
        state = json.loads(byte_level_backend.to_str())
        # "Ġthe" stays in the vocabulary but no merge makes it, as some words of Llama 3, whose model ignores merges then.
        state["model"]["merges"] = [merge for merge in state["model"]["merges"] if "".join(merge) != "Ġthe"]
        assert "Ġthe" in state["model"]["vocab"]
        original = tokenizers.Tokenizer.from_str(json.dumps(state))
        if ORIGINALS[request.param][0] is not None:
            original.normalizer = ORIGINALS[request.param][0]
        original.pre_tokenizer = ORIGINALS[request.param][1]
        if request.param == "llama-bpe":
            original.model.ignore_merges = True

        def fill(writer: Any) -> None:
            add_byte_level(writer, original, request.param, padding=3)
            writer.add_bos_token_id(0)
            writer.add_eos_token_id(2)
            writer.add_add_bos_token(False)

        return original, header_only(tmp_path_factory.mktemp("gguf") / "t.gguf", fill).tokenizer()

    @same_file
    @given(text=texts)
    def test_encode(self, pair: tuple[Any, Any], text: str) -> None:
        """tokenizer.ggml.pre is honoured: encodings equal the original tokenizer's, on any text."""
        original, ours = pair
        assert ours.encode(text) == original.encode(text).ids

    def test_vocabulary(self, pair: tuple[Any, Any]) -> None:
        """Token types become special and added tokens; padding entries are no tokens."""
        original, ours = pair
        assert ours.get_vocab() == original.get_vocab()
        assert len(ours) == original.get_vocab_size()
        ids = original.encode("<|im_start|>a<tool call>b<|im_end|>").ids
        assert ours.decode(ids) == "a<tool call>b"
        assert (ours.bos_token, ours.eos_token, ours.eos_token_ids) == ("<|endoftext|>", "<|im_end|>", (2,))

    def test_saved_files_load_in_transformers(self, pair: tuple[Any, Any], tmp_path: Path) -> None:
        """Converted tokenizer files give transformers the same encodings and special tokens."""
        original, ours = pair
        ours.save_pretrained(tmp_path)
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        text = "The fox's 123 <|im_end|> naïve 你好"
        assert theirs.encode(text) == ours.encode(text) == original.encode(text).ids
        assert theirs.eos_token_id == 2

    @pytest.mark.parametrize("pre", ["llama-bpe", "gpt-2"])
    @pytest.mark.parametrize("flag", [None, True, False])
    def test_bos(self, byte_level_backend: tokenizers.Tokenizer, tmp_path: Path, pre: str, flag: bool | None) -> None:
        """add_bos_token decides; without it Llama 3's pre-tokenizer adds BOS and GPT-2's does not."""

        def fill(writer: Any) -> None:
            add_byte_level(writer, byte_level_backend, pre)
            writer.add_bos_token_id(0)
            writer.add_eos_token_id(2)
            writer.add_add_eos_token(True)
            if flag is not None:
                writer.add_add_bos_token(flag)

        ours = header_only(tmp_path / "t.gguf", fill).tokenizer()
        adds = flag if flag is not None else pre == "llama-bpe"
        assert (ours.encode("fox")[0] == 0) is adds
        assert ours.encode("fox")[-1] == 2
        assert 0 not in ours.encode("fox", add_special_tokens=False)

    def test_templates_and_end_of_turn(self, byte_level_backend: tokenizers.Tokenizer, tmp_path: Path) -> None:
        """Named templates are found; the end-of-turn token that the template writes ends a generation."""

        def fill(writer: Any) -> None:
            add_byte_level(writer, byte_level_backend)
            writer.add_eos_token_id(0)
            writer.add_chat_template(
                [
                    {"name": "default", "template": "{{ messages[0].content }}<|im_end|>"},
                    {"name": "tool_use", "template": "T"},
                ]
            )

        file = header_only(tmp_path / "t.gguf", fill)
        ours = file.tokenizer()
        assert ours.eos_token_ids == (0, 2)
        assert file.generation_config()["eos_token_id"] == [0, 2]
        messages = [{"role": "user", "content": "x"}]
        assert ours.apply_chat_template(messages, tokenize=False) == "x<|im_end|>"
        assert ours.apply_chat_template(messages, tokenize=False, tools=[{"name": "f"}]) == "T"

    @pytest.mark.parametrize(
        ("change", "error"),
        [
            (lambda w: w.add_tokenizer_pre("kimi-k2"), r"tokenizer\.ggml\.pre 'kimi-k2' is not supported"),
            (
                lambda w: w.add_tokenizer_model("bert"),
                r"tokenizer\.ggml\.model 'bert' is not supported; supported: gpt2",
            ),
            (lambda w: w.add_token_types([1]), r"tokenizer\.ggml\.token_type has 1 entries for \d+ tokens"),
            (lambda w: w.add_token_list(["a", "a"]), r"tokenizer\.ggml\.tokens has 'a' twice, as 0 and 1"),
            (lambda w: w.add_token_merges(["a", "b c"]), r"tokenizer\.ggml\.merges has 'a', whose parts are not"),
            (lambda w: w.add_eos_token_id(999), r"tokenizer\.ggml\.eos_token_id is 999, but there are"),
            (lambda w: w.add_add_bos_token(True), r"tokenizer\.ggml\.bos_token_id is missing, though add_bos_token"),
        ],
    )
    def test_refusals(
        self, byte_level_backend: tokenizers.Tokenizer, tmp_path: Path, change: Callable[[Any], None], error: str
    ) -> None:
        """A tokenizer that cannot be rebuilt exactly is refused; the key is named."""

        def fill(writer: Any) -> None:
            add_byte_level(writer, byte_level_backend)
            keys = set(writer.kv_data[0])
            change(writer)
            if set(writer.kv_data[0]) == keys and "tokens" in error and "twice" in error:
                del writer.kv_data[0]["tokenizer.ggml.token_type"]

        with pytest.raises(TokenizerError, match=rf"t\.gguf: {error}"):
            header_only(tmp_path / "t.gguf", fill).tokenizer()


class TestSentencePieceTokenizer:
    @pytest.fixture(scope="class", params=[True, False], ids=["prefix", "no prefix"])
    def pair(
        self,
        request: pytest.FixtureRequest,
        byte_fallback_backend: tokenizers.Tokenizer,
        tmp_path_factory: pytest.TempPathFactory,
    ) -> tuple[Any, Any]:
        vocab = byte_fallback_backend.get_vocab()
        tokens = sorted(vocab, key=vocab.__getitem__)
        types = [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259)
        scores = [0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)]
        pieces = {token: i for token, i in vocab.items() if types[i] == 1}
        merges = transformers.tokenization_utils_base.generate_merges(pieces, {t: scores[i] for t, i in pieces.items()})
        original = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        original.normalizer, original.decoder = byte_fallback_backend.normalizer, byte_fallback_backend.decoder
        if not request.param:
            original.normalizer = normalizers.Replace(" ", "▁")
            original.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        original.add_special_tokens(["<unk>", "<s>", "</s>"])
        original.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])

        def fill(writer: Any) -> None:
            writer.add_tokenizer_model("llama")
            writer.add_token_list(tokens)
            writer.add_token_scores(scores)
            writer.add_token_types(types)
            if not request.param:
                writer.add_add_space_prefix(False)

        return original, header_only(tmp_path_factory.mktemp("gguf") / "t.gguf", fill).tokenizer()

    @same_file
    @given(text=texts)
    def test_encode_and_decode(self, pair: tuple[Any, Any], text: str) -> None:
        """Merges from scores, byte fallback, prefix space and the default BOS equal the original's, on any text."""
        original, ours = pair
        ids = original.encode(text).ids
        assert ours.encode(text) == ids
        assert ours.decode(ids) == original.decode(ids)

    def test_special_tokens(self, pair: tuple[Any, Any]) -> None:
        """Early files name no special ids; SentencePiece Llama's are taken."""
        _, ours = pair
        assert (ours.unk_token_id, ours.bos_token_id, ours.eos_token_ids) == (0, 1, (2,))
        assert ours.decode(ours.encode("<s>")) == ""

    def test_scores_are_needed(self, tmp_path: Path) -> None:
        """Without merges and scores there is no tokenizer to rebuild."""

        def fill(writer: Any) -> None:
            writer.add_tokenizer_model("llama")
            writer.add_token_list(["<unk>", "<s>", "</s>", "a"])

        with pytest.raises(CheckpointError, match=r"key 'tokenizer\.ggml\.scores' is missing"):
            header_only(tmp_path / "t.gguf", fill).tokenizer()


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

    def test_tokenizer(self, file: GGUFFile) -> None:
        """Digits are split one by one; no BOS; ChatML with a default system prompt; EOS <|im_end|>."""
        tokenizer = file.tokenizer()
        assert len(tokenizer) == 49152
        digits = tokenizer.encode("12345")
        assert [tokenizer.id_to_token(i) for i in digits] == list("12345")
        assert tokenizer.encode("In 2024")[1:] == [tokenizer.token_to_id(t) for t in ("Ġ", "2", "0", "2", "4")]
        assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.pad_token_id) == (1, (2,), 2)
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
        assert len(prompt) == 37
        assert tokenizer.decode(prompt, skip_special_tokens=False) == (
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
            "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
        )
