"""Figures about a run: MFU, the metrics file, the progress bar."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from astrai_core import AutoModel, ModelConfig
from astrai_core.config.lora import LoRAConfig
from astrai_core.errors import DataError
from astrai_core.model.lora import apply_lora
from astrai_train import TrainConfig
from astrai_train.callbacks.metrics_file import keep_lines
from astrai_train.callbacks.progress import ProgressBar
from astrai_train.metrics import mfu
from astrai_train.run import train


def test_flops_by_hand() -> None:
    """6 FLOPs a token for each weight of a matrix product, 6 L H T for causal attention, by document."""
    config = {
        "model_type": "llama",
        "vocab_size": 11,
        "hidden_size": 8,
        "intermediate_size": 6,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "tie_word_embeddings": True,
    }
    counter = mfu.FlopsCounter(AutoModel.from_config(ModelConfig.from_dict(config), device="cpu"))
    matrices = 3 * (8 * (8 + 4 + 4) + 8 * 8 + 3 * 8 * 6) + 8 * 11
    assert counter.matrix_weights == matrices
    assert counter.of((5, 2)) == 6 * matrices * 7 + 6 * 3 * 2 * 4 * (25 + 4)


def test_flops_of_adapters_and_experts_by_hand() -> None:
    """A frozen weight costs no gradient of its own; of 4 experts a token goes through 2, and through the shared one."""
    config = {
        "model_type": "qwen2_moe",
        "vocab_size": 11,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 99,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 5,
        "shared_expert_intermediate_size": 7,
    }
    model = AutoModel.from_config(ModelConfig.from_dict(config), device="cpu")
    matrices = 8 * 16 + 8 * 8 + 4 * 8 + 2 * 3 * 8 * 5 + 3 * 8 * 7 + 8 + 8 * 11
    assert mfu.FlopsCounter(model).of((1,)) == 6 * matrices + 6 * 2 * 4
    apply_lora(model, LoRAConfig(rank=2, target_modules=("q_proj",)))
    assert mfu.FlopsCounter(model).of((1,)) == 4 * matrices + 6 * 2 * (8 + 8) + 6 * 2 * 4


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H200", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("Tesla X", None)],
)
def test_peaks(monkeypatch: pytest.MonkeyPatch, name: str, peak: float | None) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert mfu.peak_flops(torch.device("cuda")) == peak
    assert mfu.peak_flops(torch.device("cpu")) is None


def test_lines_of_steps_that_are_done_again_go(tmp_path: Path) -> None:
    """A resumed run's file is that of a straight one, a torn last line included."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3, 4)) + '{"step": 5, "lo')
    keep_lines(path, 3)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]
    keep_lines(tmp_path / "none.jsonl", 3)
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(DataError, match=r"metrics.jsonl:2: not valid JSON: .*; remove the line"):
        keep_lines(path, 3)
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_lines_come_at_the_interval_and_at_the_end(run_recipe: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    train(TrainConfig.from_dict(run_recipe({"max_steps": 5, "log.interval": 2})))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [2, 4, 5]


def test_the_progress_bar(run_recipe: Callable[..., dict[str, Any]]) -> None:
    """Training rule 14: steps, loss, speed, memory and time left; it ends with the run, and with an error."""
    shown = io.StringIO()
    bar = ProgressBar(Console(file=shown, force_terminal=True, width=120))
    train(TrainConfig.from_dict(run_recipe({"max_steps": 3})), callbacks=[bar])
    last = [line for line in shown.getvalue().splitlines() if "3/3" in line][-1]
    for part in ("training", "loss ", "tokens/s", "GiB", "0:00:00"):
        assert part in last, part
    assert bar._progress.finished and not bar._progress.live.is_started
