"""Fine-tuning runs from recipes: SFT, preferences and adapters, on preprocessed data, resumed bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from astrai_core import AutoModel, ModelConfig, save_pretrained
from astrai_core.errors import AstraiError, ConfigError
from astrai_core.model.lora import adapters
from astrai_train import TrainConfig
from astrai_train.callbacks.base import Callback
from astrai_train.context import StepRecord, TrainContext
from astrai_train.data.preprocess.config import PreprocessConfig
from astrai_train.data.preprocess.run import preprocess
from astrai_train.run import build, train

Recipe = Callable[..., dict[str, Any]]
LORA = {"rank": 4, "alpha": 8.0}
MOE = {
    "model_type": "qwen2_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "router_aux_loss_coef": 0.1,
}


class StopAfter(Callback):
    """Sends this process SIGTERM during a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, context: TrainContext, record: StepRecord) -> None:
        if record.step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(scope="module")
def base(byte_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small pretrained model."""
    config = ModelConfig.from_dict(
        {
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
            "initializer_range": 0.1,
            "attention_dropout": 0.1,
        }
    )
    model = AutoModel.from_config(config, "float32", "cpu", torch.Generator().manual_seed(0))
    path = tmp_path_factory.mktemp("base") / "model"
    save_pretrained(model, path, tokenizer=byte_tokenizer)
    return path


@pytest.fixture(scope="module")
def stores(tokenizer_dir: Path, byte_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Stores of 24 conversations and of 12 preference pairs, made by preprocessing."""
    root, draw = tmp_path_factory.mktemp("stores"), random.Random(0)
    words = ["sun", "sea", "salt", "sand", "wind", "wave"]

    def text() -> str:
        return " ".join(draw.choices(words, k=draw.randint(1, 4)))

    def turn(role: str) -> dict[str, str]:
        return {"role": role, "content": text()}

    chats = [{"messages": [turn("user"), turn("assistant")]} for _ in range(24)]
    pairs = [
        {"prompt": [turn("user")], "chosen": [turn("assistant")], "rejected": [turn("assistant")]} for _ in range(12)
    ]
    found = {}
    for name, format, records in (("chat", "messages", chats), ("pairs", "preference", pairs)):
        file = root / f"{name}.jsonl"
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
        config = PreprocessConfig.from_dict(
            {"inputs": [{"paths": [str(file)]}], "tokenizer": str(tokenizer_dir), "format": format, "workers": 0}
        )
        preprocess(config, root / name, byte_tokenizer)
        found[name] = root / name
    return found


@pytest.fixture
def finetune(run_recipe: Recipe, base: Path, stores: dict[str, Path]) -> Recipe:
    """Function from a kind of store and changes to a small run on it; with ``lora``, on `base`."""

    def make(store: str, changes: dict[str, Any]) -> dict[str, Any]:
        given: dict[str, Any] = {
            "data": {"train": [{"path": str(stores[store])}], "seq_len": 96, "workers": 0},
            "model": {"pretrained": str(base)},
        }
        return run_recipe(given | changes)

    return make


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sft with noise": ("chat", {"strategy": {"name": "sft", "neftune_alpha": 5.0}, "data.packing": "bfd"}),
    "sft of an adapter": ("chat", {"strategy": {"name": "sft"}, "lora": LORA | {"dropout": 0.2}}),
    "sft of experts": (
        "chat",
        {"strategy": {"name": "sft", "label_smoothing": 0.1}, "model": {"architecture": ..., "tokenizer": ...}},
    ),
    "dpo by copy": ("pairs", {"strategy": {"name": "dpo", "loss": "ipo"}}),
    "dpo by adapter off": (
        "pairs",
        {"strategy": {"name": "dpo"}, "lora": LORA | {"dropout": 0.2, "target_modules": ["q_proj", "down_proj"]}},
    ),
    "dpo by cache": ("pairs", {"strategy": {"name": "dpo", "reference": "cached", "max_prompt_len": 20}}),
    "orpo": ("pairs", {"strategy": {"name": "dpo", "loss": "orpo"}}),
}


def metrics_of(recipe: dict[str, Any], *clock: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (Path(recipe["output_dir"]) / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in clock} for line in lines]


@pytest.mark.parametrize("case", CASES)
def test_ten_steps_are_three_and_seven(
    finetune: Recipe, run_recipe: Recipe, tokenizer_dir: Path, tmp_path: Path, case: str
) -> None:
    """Training rule 5, for every kind of fine-tuning: losses, norms, rewards and weights are equal bit for bit."""
    store, changes = CASES[case]
    if "model" in changes:
        architecture = run_recipe()["model"]["architecture"] | MOE | {"attention_dropout": 0.1}
        changes = changes | {"model": {"architecture": architecture, "tokenizer": str(tokenizer_dir)}}
    changes = {"max_steps": 10, "max_grad_norm": 0.5} | changes
    straight, broken = (finetune(store, {**changes, "output_dir": str(tmp_path / name)}) for name in ("one", "two"))
    assert train(TrainConfig.from_dict(straight)).step == 10
    stopped = train(TrainConfig.from_dict(broken), callbacks=[StopAfter(3)])
    assert (stopped.step, stopped.stopped_by) == (3, "SIGTERM")
    torch.rand(3)  # the streams of this process must not matter
    random.random()
    assert train(TrainConfig.from_dict(broken), resume=True).step == 10
    clock = ("tokens_per_s", "mfu", "memory")
    assert metrics_of(broken, *clock) == metrics_of(straight, *clock)
    weights = [Path(recipe["output_dir"]) / "checkpoints" / "step_10" for recipe in (straight, broken)]
    (name,) = (path.name for path in weights[0].glob("*.safetensors"))
    expected, found = (load_file(path / name) for path in weights)
    assert name == ("adapter_model.safetensors" if "lora" in changes else "model.safetensors")
    assert expected.keys() == found.keys()
    assert all(torch.equal(value, found[key]) for key, value in expected.items())


def test_training_learns(finetune: Recipe, tmp_path: Path) -> None:
    """The loss of conversations falls; the margin of pairs rises from 0, and the chosen answers win."""
    sft = finetune("chat", {"strategy": {"name": "sft"}, "max_steps": 25, "output_dir": str(tmp_path / "sft")})
    train(TrainConfig.from_dict(sft))
    losses = [line["loss"] for line in metrics_of(sft)]
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:3])
    for name, changes in (("full", {}), ("adapter", {"lora": LORA})):
        recipe = finetune(
            "pairs",
            {"strategy": {"name": "dpo"}, "max_steps": 40, "output_dir": str(tmp_path / name), **changes},
        )
        train(TrainConfig.from_dict(recipe))
        lines = metrics_of(recipe)
        assert lines[0]["loss"] == pytest.approx(np.log(2), abs=0.02), "dropout apart, it starts at ln 2"
        assert np.mean([line["reward_margin"] for line in lines[-5:]]) > 0.2
        assert np.mean([line["reward_accuracy"] for line in lines[-10:]]) >= 0.8


def test_a_checkpoint_of_an_adapter_run(finetune: Recipe, base: Path) -> None:
    """Training rule 7: PEFT's files and no weight of the base; with the base they are the model that was trained."""
    recipe = finetune("chat", {"strategy": {"name": "sft"}, "lora": LORA, "max_steps": 4})
    trainer = build(TrainConfig.from_dict(recipe))
    before = {name: value.clone() for name, value in trainer.context.model.named_parameters()}
    checkpoint = trainer.train().checkpoint
    model = trainer.context.model.eval()
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name]) != (".lora_" in name), name
    assert sum(value.numel() for group in trainer.context.optimizer.param_groups for value in group["params"]) == sum(
        factors.lora_A.numel() + factors.lora_B.numel() for _, factors in adapters(model)
    )
    files = {path.name for path in checkpoint.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "checkpoint.json"} <= files
    assert "model.safetensors" not in files and "config.json" not in files
    ids = torch.randint(0, 258, (2, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(ids).logits
        merged = AutoModel.from_pretrained(checkpoint, device="cpu")
        torch.testing.assert_close(merged(ids).logits, expected, atol=1e-5, rtol=0)
        peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        theirs = peft.PeftModel.from_pretrained(theirs, checkpoint).eval()
        torch.testing.assert_close(theirs(ids).logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora": LORA | {"alpha": 9.0}}, "cannot resume: lora is .*alpha=9.0.*, the checkpoint's .*alpha=8.0"),
        ({"lora": LORA | {"target_modules": ["q_proj"]}}, "cannot resume: lora is"),
        ({"model": {"pretrained": "copy"}}, "cannot resume: model.pretrained is"),
    ],
)
def test_other_adapters_are_not_resumed(
    finetune: Recipe, base: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    given = {"strategy": {"name": "sft"}, "lora": LORA, "max_steps": 1}
    train(TrainConfig.from_dict(finetune("chat", given)))
    if "model" in changes:
        (tmp_path / "copy").symlink_to(base)
        changes = {"model": {"pretrained": str(tmp_path / "copy")}}
    with pytest.raises(ConfigError, match=message):
        build(TrainConfig.from_dict(finetune("chat", given | changes)), resume=True)


@pytest.mark.parametrize(
    ("store", "changes", "message"),
    [
        ("chat", {"strategy": {"name": "dpo"}}, "holds no preference pairs; preprocess 'preference'"),
        ("pairs", {"strategy": {"name": "sft"}}, "a store of kind 'pairs' has no documents to pack"),
        ("pairs", {"strategy": {"name": "dpo"}, "data.packing": "bfd"}, "remove data.packing 'bfd'"),
        ("pairs", {"strategy": {"name": "dpo"}, "data.overlong": "drop"}, "remove data.overlong 'drop'"),
        ("chat", {"strategy": {"name": "sft"}, "lora": {"target_modules": ["w1"]}}, "lora: .*'w1' names no linear"),
        ("chat", {"strategy": {"name": "sft"}, "lora": {"target_modules": ["lm_head"]}}, "'lora': target_modules"),
        (
            "chat",
            {"strategy": {"name": "sft"}, "lora": LORA, "optimizer": {"name": "muon_adamw", "lr": 1e-2}},
            "found no trainable hidden matrix \\(adapters are not among them\\)",
        ),
        (
            "chat",
            {
                "strategy": {"name": "sft"},
                "lora": LORA,
                "model": {"architecture": {"model_type": "llama"}, "tokenizer": "any"},
            },
            "'lora': an adapter needs weights to adapt; give model.pretrained",
        ),
    ],
)
def test_what_does_not_fit(finetune: Recipe, store: str, changes: dict[str, Any], message: str) -> None:
    """One line that names the field or file, before anything is trained."""
    with pytest.raises(AstraiError, match=message) as caught:
        build(TrainConfig.from_dict(finetune(store, changes)))
    assert "\n" not in str(caught.value)
