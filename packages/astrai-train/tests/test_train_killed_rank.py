"""One rank is killed in the middle of training: the others end with a message, and soon (training rule 6; issue 8)."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from astrai_core.errors import TrainingError
from astrai_train import TrainConfig
from astrai_train.parallel.launch import launch

TESTS = Path(__file__).parent
STARTING, NOTICING = 60, 40
"""Seconds: of the ranks' start on a busy machine; and until torchrun, which waits longest, has ended the last of them."""

Recipe = Callable[..., dict[str, Any]]

pytestmark = pytest.mark.slow
two_gpus = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")]


@pytest.mark.parametrize(
    ("mode", "moment", "device"),
    [
        ("ddp", "update", "cpu"),
        pytest.param("ddp", "update", "cuda", marks=two_gpus),
        pytest.param("fsdp", "forward", "cuda", marks=two_gpus),
    ],
)
def test_the_starter_ends_the_others(
    monkeypatch: pytest.MonkeyPatch, run_recipe: Recipe, mode: str, moment: str, device: str
) -> None:
    """Though their GPUs wait for it; processes that read its data hold its end of the connections a while longer."""
    monkeypatch.syspath_prepend(str(TESTS))
    from parallel_jobs import die_in_a_step

    recipe = run_recipe({"parallel": {"mode": mode}, "max_steps": 100_000, "data.workers": 1})
    started = time.monotonic()
    with pytest.raises(TrainingError, match=r"^rank 1: was killed by SIGKILL .*; the run can be resumed"):
        launch(partial(die_in_a_step, recipe, 1, 3, moment, device), 2)
    assert time.monotonic() - started < STARTING + NOTICING
    assert steps_of(recipe) == 2


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=two_gpus)])
def test_torchrun_ends_the_others(run_recipe: Recipe, tmp_path: Path, device: str) -> None:
    """A rank that waits for its GPU does not obey torchrun's SIGTERM, which then kills it."""
    recipe = run_recipe({"parallel": {"mode": "fsdp"}, "max_steps": 100_000})
    TrainConfig.from_dict(recipe).to_yaml(tmp_path / "recipe.yaml")
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    job = [str(TESTS / "parallel_jobs.py"), str(tmp_path / "recipe.yaml"), device]
    ended = subprocess.run([*ranks, *job], capture_output=True, text=True, timeout=STARTING + NOTICING, check=False)
    assert ended.returncode == 1
    assert "Signal 9 (SIGKILL) received by PID" in ended.stderr
    assert steps_of(recipe) == 2


def steps_of(recipe: dict[str, Any]) -> int:
    """Return how many steps a run has logged."""
    return len((Path(recipe["output_dir"]) / "metrics.jsonl").read_text().splitlines())
