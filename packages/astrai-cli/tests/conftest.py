"""A model whose answers are known: after a line break it writes the alphabet and stops, after a digit it counts on."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTEXT = 4096

Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    """Run the command line in this process: ``run("generate", "--raw", stdin=...)``."""

    def invoke(*args: object, stdin: str | bytes | None = None) -> Result:
        from astrai_cli.main import app

        result = CliRunner().invoke(app, [str(arg) for arg in args], input=stdin, prog_name="astrai")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke


@pytest.fixture
def run_process() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command line in a process of its own."""

    def start(*args: object, **options: Any) -> subprocess.CompletedProcess[str]:
        options = {"capture_output": True, "text": True, "timeout": 300, **options}
        return subprocess.run(command_line(*args), check=False, **options)

    return start


def command_line(*args: object) -> list[str]:
    """The argument list that runs ``astrai``."""
    return [sys.executable, "-m", "astrai_cli", *map(str, args)]


def make_tokenizer(**config: Any) -> Any:
    """Byte-level tokenizer: one id per byte, one merge, and the special tokens of ChatML."""
    import tokenizers
    from tokenizers import AddedToken, decoders, models, pre_tokenizers

    from astrai_core import Tokenizer
    from astrai_core.tokenizer import ChatTemplate

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: i for i, piece in enumerate([*alphabet, "qq"])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [("q", "q")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ("<|im_start|>", "<|im_end|>")])
    settings = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE, **config}
    template = settings.pop("chat_template")
    known = {key: value for key, value in settings.items() if value is not None}
    return Tokenizer(backend, config=known, chat_template=None if template is None else ChatTemplate(template))


def successors(tokenizer: Any) -> list[int]:
    """What follows each token: the alphabet after a line break, then the end; digits go round."""
    byte = lambda text: tokenizer.encode(text)[0]
    following = list(range(tokenizer.vocab_size))
    for before, after in zip("\n" + ALPHABET, ALPHABET, strict=False):
        following[byte(before)] = byte(after)
    following[byte("z")] = tokenizer.token_to_id("<|im_end|>")
    for digit in range(10):
        following[byte(str(digit))] = byte(str((digit + 1) % 10))
    return following


def make_model(tokenizer: Any) -> Any:
    """A Llama whose layers add nothing and whose output projection maps each token to its successor."""
    import torch

    from astrai_core import AutoModel, ModelConfig

    size = tokenizer.vocab_size + tokenizer.vocab_size % 2
    config = ModelConfig.from_dict(
        {
            "model_type": "llama",
            "vocab_size": tokenizer.vocab_size,
            "hidden_size": size,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": CONTEXT,
        }
    )
    model = AutoModel.from_config(config, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size)[: tokenizer.vocab_size])
        model.lm_head.weight.zero_()
        model.lm_head.weight[successors(tokenizer), range(tokenizer.vocab_size)] = 4.0
    return model.eval()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as a Hugging Face directory; do not change it."""
    from astrai_core import save_pretrained

    path = tmp_path_factory.mktemp("models") / "alphabet"
    tokenizer = make_tokenizer()
    save_pretrained(make_model(tokenizer), path, tokenizer=tokenizer)
    return path


@pytest.fixture
def copy_model(model_dir: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy that may be changed, with another tokenizer if any of its settings is given."""

    def make(name: str = "copy", **tokenizer: Any) -> Path:
        path = tmp_path / name
        shutil.copytree(model_dir, path)
        if tokenizer:
            for file in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"):
                (path / file).unlink()
            make_tokenizer(**tokenizer).save_pretrained(path)
        return path

    return make


@pytest.fixture
def counting_dir(copy_model: Callable[..., Path]) -> Path:
    """A copy whose answers are digits without an end: minutes pass before its context is full."""
    path = copy_model("counting", chat_template=TEMPLATE.replace("assistant\n", "assistant 0"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 200_000}))
    return path


@pytest.fixture(scope="session")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as a GGUF file, its matrices in Q8_0."""
    import gguf
    import numpy as np

    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    path = tmp_path_factory.mktemp("gguf") / "alphabet.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    config = model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    add_vocabulary(writer, tokenizer)
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers.0.input_layernorm": "blk.0.attn_norm",
        "model.layers.0.post_attention_layernorm": "blk.0.ffn_norm",
        "model.layers.0.self_attn.q_proj": "blk.0.attn_q",
        "model.layers.0.self_attn.k_proj": "blk.0.attn_k",
        "model.layers.0.self_attn.v_proj": "blk.0.attn_v",
        "model.layers.0.self_attn.o_proj": "blk.0.attn_output",
        "model.layers.0.mlp.gate_proj": "blk.0.ffn_gate",
        "model.layers.0.mlp.up_proj": "blk.0.ffn_up",
        "model.layers.0.mlp.down_proj": "blk.0.ffn_down",
    }
    from astrai_core.checkpoint.hf_adapter import checkpoint_tensors

    for name, tensor in checkpoint_tensors(model):
        values = tensor.detach().numpy().astype(np.float32)
        kind = gguf.GGMLQuantizationType.F32
        if values.ndim == 2 and values.shape[1] % 32 == 0:
            kind = gguf.GGMLQuantizationType.Q8_0
            values = gguf.quants.quantize(values, kind)
        writer.add_tensor(names[name.removesuffix(".weight")] + ".weight", values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_vocabulary(writer: Any, tokenizer: Any) -> None:
    """Write the vocabulary as a byte-level BPE (gpt2) with the pre-tokenizer of SmolLM."""
    vocabulary: Sequence[str] = [tokenizer.id_to_token(i) for i in range(tokenizer.vocab_size)]
    normal, control = 1, 3
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary)
    writer.add_token_types([control if token.startswith("<|im_") else normal for token in vocabulary])
    writer.add_token_merges(["q q"])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(TEMPLATE)
