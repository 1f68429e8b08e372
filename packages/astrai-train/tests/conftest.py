"""A recipe to vary, a small tokenizer, and a small run."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from astrai_core.errors import ConfigError
from astrai_train import TrainConfig

MINIMAL: dict[str, Any] = {
    "model": {"pretrained": "smollm2"},
    "data": {"train": [{"path": "stories"}], "seq_len": 64},
    "strategy": {"name": "sft"},
    "optimizer": {"name": "adamw", "lr": 1e-3},
    "output_dir": "runs/one",
    "batch_size": 8,
    "max_steps": 100,
}


def _recipe(changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """`MINIMAL` with fields, given by their dotted names, set or (by the value ``...``) removed."""
    data = copy.deepcopy(MINIMAL)
    for dotted, value in (changes or {}).items():
        *groups, last = dotted.split(".")
        inner = data
        for group in groups:
            inner = inner.setdefault(group, {})
        if value is ...:
            del inner[last]
        else:
            inner[last] = value
    return data


@pytest.fixture(scope="session")
def recipe() -> Callable[..., dict[str, Any]]:
    """Function from changes, by dotted name, to a smallest valid recipe with those changes."""
    return _recipe


@pytest.fixture(scope="session")
def error_of() -> Callable[[dict[str, Any]], str]:
    """Function from changes that make a recipe invalid to the one line that says so."""

    def message(changes: dict[str, Any]) -> str:
        with pytest.raises(ConfigError) as caught:
            TrainConfig.from_dict(_recipe(changes))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return message


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def byte_tokenizer() -> Any:
    """One id per byte (0 to 255), then ``<|im_start|>`` 256 and ``<|im_end|>`` 257, which is EOS; ChatML."""
    import tokenizers
    from tokenizers import AddedToken, decoders, models, pre_tokenizers

    from astrai_core import Tokenizer
    from astrai_core.tokenizer import ChatTemplate

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ("<|im_start|>", "<|im_end|>")])
    return Tokenizer(backend, config={"eos_token": "<|im_end|>"}, chat_template=ChatTemplate(CHATML))


ARCHITECTURE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 258,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 257,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="session")
def tokenizer_dir(byte_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of `byte_tokenizer`."""
    path = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def text_store(byte_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Store of 60 short texts, each 3 to 60 tokens with its end-of-text token."""
    import numpy as np

    from astrai_train.data.store import write_store

    draw = random.Random(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "ran"]
    texts = [" ".join(draw.choices(words, k=draw.randint(1, 14))) for _ in range(60)]
    rows = [{"input_ids": np.array([*byte_tokenizer.encode(text), byte_tokenizer.eos_token_id])} for text in texts]
    path = tmp_path_factory.mktemp("data") / "text"
    write_store(path, "text", rows, byte_tokenizer)
    return path


@pytest.fixture
def run_recipe(tokenizer_dir: Path, text_store: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Function from changes, by dotted name, to a small run that trains from scratch on `text_store`."""

    def make(changes: dict[str, Any] | None = None) -> dict[str, Any]:
        return _recipe(
            {
                "model": {"architecture": copy.deepcopy(ARCHITECTURE), "tokenizer": str(tokenizer_dir)},
                "data": {"train": [{"path": str(text_store)}], "seq_len": 32, "packing": "bfd_split", "workers": 0},
                "strategy": {"name": "seq"},
                "optimizer": {"name": "adamw", "lr": 1e-2},
                "output_dir": str(tmp_path / "run"),
                "batch_size": 4,
                "micro_batch_size": 2,
                "max_steps": 6,
                "precision": {"dtype": "fp32"},
                "log": {"interval": 1},
                **(changes or {}),
            }
        )

    return make


@pytest.fixture
def write_rows(tmp_path: Path, byte_tokenizer: Any) -> Callable[..., Path]:
    """Function from a name, a kind and rows to the directory of a store that holds them."""
    from astrai_train.data.store import write_store

    def make(name: str, kind: Any, rows: list[dict[str, Any]]) -> Path:
        write_store(tmp_path / name, kind, rows, byte_tokenizer)
        return tmp_path / name

    return make


@pytest.fixture
def small_disk() -> Iterator[None]:
    """No file of this process grows beyond 8 KB: writes fail where they fail on a full disk."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 10, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
