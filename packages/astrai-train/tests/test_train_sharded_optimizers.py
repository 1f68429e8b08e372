"""Optimizers over weights that FSDP2 has sharded: equal to one process, saved and resumed (training rule 13; O1, TR3)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

WORKER = Path(__file__).with_name("sharded_optimizers_worker.py")
WORLD_SIZE = 2


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What rank 0 of two processes found, by gloo on the CPU or by NCCL on as many GPUs."""
    if request.param == "cuda" and torch.cuda.device_count() < WORLD_SIZE:
        pytest.skip(f"{WORLD_SIZE} ranks need as many GPUs")
    store = tmp_path_factory.mktemp("sharded") / "store"
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(store), str(rank), str(WORLD_SIZE), request.param],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD_SIZE)
    ]
    try:
        outputs = [rank.communicate(timeout=240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * WORLD_SIZE, "\n".join(errors for _, errors in outputs)
    return json.loads(outputs[0][0].splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "muon_adamw", "mano_adamw", "nora_nadamw"])
def test_equals_one_process(outcome: dict[str, Any], name: str) -> None:
    """Rule 13: within 1e-5 after four steps, fused weights cut within a part and uneven shards included."""
    run = outcome["runs"][name]
    assert run["sharded"]
    assert run["same_roles"]
    assert run["moved"] > 1e-2
    assert run["difference"] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "muon_adamw", "mano_adamw", "nora_nadamw"])
def test_resumes_through_torch_distributed_checkpoint(outcome: dict[str, Any], name: str) -> None:
    """Rule 5: after one step, three more are bit-exact; for Mano that means that the rows follow."""
    assert outcome["runs"][name]["resumed"] == 0


@pytest.mark.slow
def test_grad_snr_adds_up_over_the_shards(outcome: dict[str, Any]) -> None:
    """TR3: the ratio over all shards is that of the whole."""
    for run in outcome["runs"].values():
        alone, sharded = run["ratios"]
        assert sharded == pytest.approx(alone, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mano_adamw", "nora_nadamw"])
def test_column_shards_are_refused(outcome: dict[str, Any], name: str) -> None:
    """Rule 13: whatever sums over columns does not take a part of a row for a row."""
    message = outcome["refused"][name]
    assert message.startswith(f"{name}: parameter model.layers.0.mlp.down_proj.weight is sharded as (Shard(dim=1),)")
