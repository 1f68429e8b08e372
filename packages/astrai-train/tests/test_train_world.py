"""The ranks and their shards, as far as one process can tell: who meets whom, and what a checkpoint's tensors are."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed

from astrai_core.errors import AstraiError, BackendError, CheckpointError, ConfigError, DataError
from astrai_train import TrainConfig, compilation
from astrai_train.checkpoint import CheckpointStore, TrainingState
from astrai_train.parallel import world
from astrai_train.parallel.mode import ParallelMode
from astrai_train.parallel.shards import HostCopies, read_tensors, write_tensors
from astrai_train.parallel.world import World
from astrai_train.run import build, train
from astrai_train.strategy.base import StepLoss, merge_losses
from astrai_train.trainer import CLIP_EPS

CPU = torch.device("cpu")
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
RANK_1_OF_2 = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}


@pytest.mark.parametrize(
    ("mode", "device", "environment", "error", "message"),
    [
        ("none", None, RANK_1_OF_2, ConfigError, "'parallel.mode': 'none' is one process, but 2 were started"),
        ("ddp", "cpu", RANK_1_OF_2, ConfigError, "MASTER_ADDR is not; start the ranks by torchrun or --nprocs"),
        ("fsdp", "cuda:7", RANK_1_OF_2, BackendError, "device 'cuda:7' is not here"),
    ],
)
def test_ranks_that_cannot_meet(
    mode: str, device: str | None, environment: Mapping[str, str], error: type[AstraiError], message: str
) -> None:
    with pytest.raises(error, match=message):
        World.join(mode, device, environment)
    assert not distributed.is_initialized()


def test_a_rank_needs_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(BackendError, match=r"rank 1 of this machine has no GPU \(1 are visible\); start fewer ranks"):
        World.join("ddp", None, RANK_1_OF_2)
    with pytest.raises(ConfigError, match="device 'cuda:0' is one GPU for 2 ranks; give 'cuda'"):
        World.join("ddp", "cuda:0", RANK_1_OF_2)


@devices
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_one_rank_is_one_process(
    run_recipe: Callable[..., dict[str, Any]], tmp_path: Path, mode: str, device: str
) -> None:
    """Rule 13: the same code for one; without torchrun's variables, and nothing stays open afterwards."""
    losses = []
    for name in ("none", mode):
        recipe = run_recipe({"parallel": {"mode": name}, "output_dir": str(tmp_path / name), "max_steps": 2})
        trainer = build(TrainConfig.from_dict(recipe), device=device)
        assert distributed.is_initialized() == (name != "none")
        losses.append([trainer._step(batches).loss for batches in [iter(trainer.context.source)] for _ in range(2)])
        trainer.context.checkpoints.close()
        trainer.context.parallel.world.leave()
        assert not distributed.is_initialized()
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@devices
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_shard_is_saved_and_taken_up(
    run_recipe: Callable[..., dict[str, Any]], tmp_path: Path, device: str, asynchronous: bool
) -> None:
    """Rule 6: by the way of several ranks, which on a GPU goes through NCCL, pinned memory and a mesh of the hosts."""
    weights = []
    for name, stops in (("straight", [4]), ("broken", [2, 4])):
        changes = {"parallel": {"mode": "fsdp"}, "checkpoint.asynchronous": asynchronous, "ema_decay": 0.5}
        changes |= {"optimizer": {"name": "muon_adamw", "lr": 1e-3}, "lr_schedule": {"name": "constant"}}
        for stop in stops:
            recipe = run_recipe({**changes, "output_dir": str(tmp_path / name), "max_steps": stop})
            result = train(TrainConfig.from_dict(recipe), resume=stop > stops[0], device=device)
        weights.append(load_file(result.checkpoint / "model.safetensors"))
    assert max(float((weights[1][name] - value).abs().max()) for name, value in weights[0].items()) < 1e-5


def test_checkpoints_are_written_on_the_rank_s_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A new thread is on the first GPU, where torch would wait for copies that another makes."""
    used: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda d: used.append((threading.current_thread().name, d)))
    second = torch.device("cuda", 1)
    store = CheckpointStore(tmp_path, keep=None, asynchronous=False, world=World(second, rank=1, size=2))
    with monkeypatch.context() as patch:
        patch.setattr(World, "first", lambda self, work: work())
        patch.setattr(World, "gather", lambda self, value: [value])
        store.save(1, None, TrainingState({}, {"a": torch.ones(2)}))
    store.close()
    assert used == [("astrai-checkpoint_0", second)]


@pytest.mark.parametrize(("device", "minutes"), [("cuda", 10), ("cpu", None)])
def test_a_gpu_does_not_wait_forever(monkeypatch: pytest.MonkeyPatch, device: str, minutes: int | None) -> None:
    """With gloo beside NCCL torch would wait half an hour for a rank that has gone."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(distributed, "init_process_group", lambda **options: given.update(options))
    monkeypatch.setattr(distributed, "new_group", lambda **options: None)
    monkeypatch.setattr(world, "_own_device", lambda *_: torch.device(device))
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    World.join("ddp", device, {})
    assert given.get("timeout") == (None if minutes is None else timedelta(minutes=minutes))


def test_replicas_compile_whole_blocks(
    run_recipe: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one process does: torch alone cuts a block of a megabyte where a bucket of gradients is full."""
    graphs: list[int] = []
    monkeypatch.setattr(compilation, "BACKEND", lambda graph, _: graphs.append(len(graph.graph.nodes)) or graph.forward)
    monkeypatch.setattr(torch._dynamo.config, "optimize_ddp", True)
    sizes = {"hidden_size": 128, "intermediate_size": 2048, "num_hidden_layers": 1}
    found = []
    for mode in ("none", "ddp"):
        recipe = run_recipe(
            {"parallel": {"mode": mode}, "output_dir": str(tmp_path / mode), "precision.compile": "default"}
        )
        recipe["model"]["architecture"] |= sizes
        trainer = build(TrainConfig.from_dict(recipe), device="cpu")
        trainer._step(iter(trainer.context.source))
        trainer.context.checkpoints.close()
        trainer.context.parallel.world.leave()
        found.append(graphs.copy())
        graphs.clear()
        torch._dynamo.reset()
    assert found[0] and found[0] == found[1]


def test_ranks_wait_for_what_rank_0_does_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scoring the reference of a large data set takes longer than torch's half an hour."""
    given: list[dict[str, Any]] = []
    make = distributed.new_group
    monkeypatch.setattr(distributed, "new_group", lambda **options: given.append(options) or make(**options))
    World.join("ddp", "cpu", {}).leave()
    assert [options["timeout"] >= timedelta(hours=24) for options in given] == [True, True]


def test_an_error_of_rank_0_is_everybody_s() -> None:
    def work() -> None:
        raise DataError("nothing there")

    with pytest.raises(DataError, match="nothing there"):
        World(CPU).first(work)
    assert World(CPU).first(lambda: 5) == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_gradients_is_not_rounded(dtype: torch.dtype) -> None:
    """Rule 8: of bf16 weights too."""
    grads = [torch.randn(n, 7, generator=torch.Generator().manual_seed(n)).to(dtype) for n in (900, 30, 1)]
    expected = torch.cat([grad.flatten().double() for grad in grads]).norm()
    found = ParallelMode(World(CPU)).total_norm(grads)
    assert found.dtype == torch.float32 and found.item() == pytest.approx(expected.item(), rel=1e-6)


def test_the_clipping_of_the_maths() -> None:
    """maths.md section 11: [3] and [4] have norm 5, and clipped to 1 they are multiplied by 0.19999996."""
    norm = ParallelMode(World(CPU)).total_norm([torch.tensor([3.0]), torch.tensor([4.0])])
    assert norm.item() == 5
    assert 1 / (norm.item() + CLIP_EPS) == pytest.approx(0.19999996, abs=1e-12)


def test_losses_of_ranks_are_weighed_by_what_they_supervise() -> None:
    """Rule 1; maths.md section 11: 4 over one token and 1 over three are 1.75, not 2.5."""
    parts = [StepLoss(4.0, 1, {"hits": 1.0}), StepLoss(None, 0, {}), StepLoss(1.0, 3, {"hits": 0.0, "misses": 1.0})]
    assert merge_losses(parts) == StepLoss(1.75, 4, {"hits": 0.25, "misses": 0.75})
    assert merge_losses([StepLoss(None, 0, {})] * 2) == StepLoss(None, 0, {})
    assert merge_losses(parts[:1]) is parts[0]


# ---- tensors on disk ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_tensors_come_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    """In the dtype they were saved in, whatever the parameter's is; one without a parameter comes as it is."""
    weight = torch.nn.Parameter(torch.randn(3, 5, dtype=torch.bfloat16))
    tensors = {
        "m/a.weight": torch.randint(-100, 100, (3, 5)).to(dtype),
        "step/a.weight": torch.tensor(7.0),
        "m/b/c": torch.arange(4),
        "empty/a.weight": torch.zeros(0),
    }
    write_tensors(tmp_path / "state", tensors, None)
    found = read_tensors(tmp_path / "state", {"a.weight": weight})
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
        assert not found[name].requires_grad


def test_an_index_runs_no_code(tmp_path: Path) -> None:
    """Rule 6: weights_only also for the index of a sharded checkpoint, which torch unpickles freely."""

    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "owned",))

    write_tensors(tmp_path / "state", {"m/a": torch.ones(2)}, None)
    (tmp_path / "state" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match="which is no part of an index; do not trust it"):
        read_tensors(tmp_path / "state", {})
    assert not (tmp_path / "owned").exists()
    (tmp_path / "state" / ".metadata").write_bytes(pickle.dumps({"not": "an index"}))
    with pytest.raises(CheckpointError, match="is not the index of a checkpoint"):
        read_tensors(tmp_path / "state", {})


def test_copies_do_not_change_with_the_originals() -> None:
    originals = {"a": torch.ones(3), "b": torch.zeros(())}
    copies = HostCopies().take(originals)
    for value in originals.values():
        value.add_(5)
    assert torch.equal(copies["a"], torch.ones(3)) and float(copies["b"]) == 0


def test_a_state_without_tensors_resumes(run_recipe: Callable[..., dict[str, Any]]) -> None:
    """Before the first step an optimizer has none."""
    recipe = run_recipe({"max_steps": 1, "log.metrics": ["loss"]})
    trainer = build(TrainConfig.from_dict(recipe), device="cpu")
    trainer.save()
    trainer.context.checkpoints.wait()
    trainer.context.checkpoints.close()
    assert train(TrainConfig.from_dict(recipe), resume=True, device="cpu").step == 1
