"""Several ranks against one process: equal steps for every mode, strategy and optimizer; checkpoints that reshard.

Training rules 1, 5, 6, 7, 8 and 13; rows D1 to D3 and TR4. Two processes do all jobs of this module in one process group,
then three do theirs; what they leave on disk is compared with runs of this process. All by gloo on CPUs, and by NCCL on GPUs
where there are as many.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from astrai_core.errors import TrainingError
from astrai_train import TrainConfig
from astrai_train.checkpoint import CheckpointStore
from astrai_train.parallel.launch import launch
from astrai_train.run import build, train

pytestmark = pytest.mark.slow

MODES: dict[str, dict[str, Any]] = {
    "ddp": {"mode": "ddp"},
    "fsdp": {"mode": "fsdp"},
    "fsdp_reshard": {"mode": "fsdp", "reshard_after_forward": True},
}
# Where a gradient is nearly 0, rounding must not decide the direction of a step: hence the large eps.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw", "lr": 1e-2, "eps": 1e-4},
    "muon_adamw": {"name": "muon_adamw", "lr": 1e-2, "muon_ns_dtype": "fp32", "adamw_eps": 1e-4},
    "mano_adamw": {"name": "mano_adamw", "lr": 1e-3, "adamw_eps": 1e-4},
    "nora_nadamw": {"name": "nora_nadamw", "lr": 1e-3, "nadamw_eps": 1e-4},
}

# Neither 2 nor 3 ranks cut qkv_proj (36 + 12 + 12 rows) between its parts; 3 cut 50 and 100 rows unevenly.
ARCHITECTURE: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 258,
    "hidden_size": 36,
    "head_dim": 12,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "eos_token_id": 257,
    "tie_word_embeddings": True,
}
EXPERTS: dict[str, Any] = {
    **ARCHITECTURE,
    "model_type": "qwen3_moe",
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 14,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.1,
}
DROPOUT = {"model.architecture": ARCHITECTURE | {"attention_dropout": 0.2}}
STEPS = 4

Recipe = Callable[..., dict[str, Any]]


class Bench(NamedTuple):
    """What the jobs of this module stand on."""

    root: Path
    recipe: Recipe
    jobs: Any
    device: str

    def alone(self, recipe: dict[str, Any], **options: Any) -> Any:
        """Train in this process."""
        return train(TrainConfig.from_dict(recipe), device=self.device, **options)

    def gradient(self, name: str) -> dict[str, torch.Tensor]:
        """Return the first step's gradient in this process."""
        found = self.jobs.gradient_of(build(TrainConfig.from_dict(self.recipe(name, {})), device=self.device))
        return {name: value.cpu() for name, value in found.items()}

    def ranks(self, work: Callable[..., Any], n: int, *given: Any) -> Any:
        """Return what `work` returns on `n` ranks, which is given the device too."""
        if self.device == "cuda" and torch.cuda.device_count() < n:
            pytest.skip(f"{n} ranks need as many GPUs")
        return launch(partial(work, *given, self.device), n)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def bench(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    recipe: Recipe,
    tokenizer_dir: Path,
    byte_tokenizer: Any,
) -> Iterator[Bench]:
    """Stores, and a function from a name and changes to a recipe that trains on them."""
    root = tmp_path_factory.mktemp("parallel")

    def make(name: str, changes: dict[str, Any]) -> dict[str, Any]:
        data = {"train": [{"path": str(root / "text")}], "seq_len": 60, "packing": "none", "workers": 0}
        return recipe(
            {
                "model": {"architecture": copy.deepcopy(ARCHITECTURE), "tokenizer": str(tokenizer_dir)},
                "data": data,
                "strategy": {"name": "seq"},
                "optimizer": OPTIMIZERS["adamw"],
                "lr_schedule": {"name": "constant"},  # whatever max_steps is
                "output_dir": str(root / "runs" / name),
                "batch_size": 12,
                "micro_batch_size": 2,
                "max_steps": STEPS,
                "precision": {"dtype": "fp32"},
                "log": {"interval": 1},
                **changes,
            }
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        import parallel_jobs

        parallel_jobs.write_stores(root, byte_tokenizer)
        parallel_jobs.write_start(root, TrainConfig.from_dict(make("start", {})).model)
        yield Bench(root, make, parallel_jobs, request.param)


def source(root: Path, name: str, kind: str = "train") -> dict[str, Any]:
    return {f"data.{kind}": [{"path": str(root / name)}]}


def cases(root: Path) -> dict[str, dict[str, Any]]:
    """Name -> changes of the runs that ranks and one process must do alike."""
    pretrained = {"model.pretrained": str(root / "start"), "model.architecture": ..., "model.tokenizer": ...}
    lora = {**pretrained, "lora": {"rank": 4}}
    dpo = {**source(root, "pairs"), **pretrained, "strategy": {"name": "dpo"}}
    cached = {"strategy": {"name": "dpo", "reference": "cached"}}
    return {
        **{name: {"optimizer": optimizer} for name, optimizer in OPTIMIZERS.items()},
        "evaluation": {**source(root, "held_out", "valid"), "eval_interval": 2},
        "clipping": {"max_grad_norm": 0.1},
        "sparse": {**source(root, "sparse"), "data.shuffle_seed": None, "max_steps": 1},
        "sft": {**source(root, "chat"), "strategy": {"name": "sft"}},
        "sft_lora": {**source(root, "chat"), **lora, "strategy": {"name": "sft"}},
        "experts": {"model.architecture": EXPERTS, "optimizer": OPTIMIZERS["muon_adamw"]},
        "recompute": {"precision": {"dtype": "fp32", "activation_checkpointing": "full"}},
        "average": {"ema_decay": 0.9},
        "dpo": dpo,
        "dpo_cached": dpo | cached,
        "dpo_lora": dpo | lora,
    }


RESHARDED = ("recompute", "evaluation", "dpo_lora")
"""Cases that are also run with weights that are freed between forward and backward."""

COMPARED = [
    *((case, mode) for case in cases(Path()) for mode in ("ddp", "fsdp")),
    *((case, "fsdp_reshard") for case in RESHARDED),
]


class Outcome(NamedTuple):
    bench: Bench
    told: dict[str, Any]

    def lines(self, name: str) -> list[dict[str, Any]]:
        text = (self.bench.root / "runs" / name / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def weights(self, name: str, step: int) -> dict[str, torch.Tensor]:
        checkpoint = self.bench.root / "runs" / name / "checkpoints" / f"step_{step}"
        adapter = checkpoint / "adapter_model.safetensors"
        return load_file(adapter if adapter.exists() else checkpoint / "model.safetensors")


@pytest.fixture(scope="module")
def two(bench: Bench) -> Outcome:
    """What two ranks and this process did."""
    jobs: dict[str, Any] = {}
    for mode, parallel in MODES.items():
        changes = {"parallel": parallel}
        jobs[f"gradient-{mode}"] = {
            "recipe": bench.recipe(f"gradient-{mode}", changes),
            "gradient": str(bench.root / f"{mode}.pt"),
        }
        straight = changes | DROPOUT | {"max_steps": 6, "optimizer": OPTIMIZERS["muon_adamw"]}
        straight |= {"precision.deterministic": True, "checkpoint.asynchronous": mode != "fsdp"}
        jobs[f"straight-{mode}"] = {"recipe": bench.recipe(f"straight-{mode}", straight)}
        broken = bench.recipe(f"broken-{mode}", straight)
        jobs[f"stopped-{mode}"] = {"recipe": broken, "stop": (1, 3)}
        jobs[f"resumed-{mode}"] = {"recipe": broken, "resume": True}
    changes_of = cases(bench.root)
    for name, mode in COMPARED:
        changes = {**changes_of[name], "parallel": MODES[mode]}
        jobs[f"{name}-{mode}"] = {"recipe": bench.recipe(f"{name}-{mode}", changes)}
    # Base weights in bf16 beside adapters in fp32: one unit of shards with two dtypes.
    coarse = {**changes_of["sft_lora"], "precision": {"dtype": "bf16"}, "parallel": MODES["fsdp"]}
    jobs["coarse_lora"] = {"recipe": bench.recipe("coarse_lora", coarse)}
    full = {"parallel": MODES["fsdp"], "checkpoint.interval": 2}
    jobs["full"] = {"recipe": bench.recipe("full", full), "full": 1}
    mixed = {"parallel": MODES["fsdp"], "precision": {"dtype": "bf16_mixed"}}
    jobs["mixed"] = {"recipe": bench.recipe("mixed", mixed)}
    jobs["again"] = {"recipe": bench.recipe("adamw-fsdp", {"parallel": MODES["fsdp"]})}
    jobs["uneven"] = {"recipe": bench.recipe("uneven", {"parallel": MODES["ddp"], "micro_batch_size": 4})}
    jobs["none"] = {"recipe": bench.recipe("none", {})}
    told = bench.ranks(bench.jobs.run_jobs, 2, jobs)
    for name, changes in changes_of.items():
        told[name] = bench.jobs.run_or_tell({"recipe": bench.recipe(name, changes)}, bench.device)
    return Outcome(bench, told)


@pytest.mark.parametrize("mode", MODES)
def test_the_gradient_is_that_of_one_process(two: Outcome, mode: str) -> None:
    """Rule 1: rows of many lengths over ranks and micro-batches; within 1e-6 in fp32, the tied weight's included."""
    expected = two.bench.gradient(f"gradient-{mode}-alone")
    found = torch.load(two.bench.root / f"{mode}.pt", weights_only=True)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-6, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


def near(found: float | None, expected: float | None, tolerance: float) -> bool:
    """Whether a figure is that of the other run; what does not exist in one does not in the other."""
    if expected is None or found is None:
        return expected is found
    return found == pytest.approx(expected, rel=tolerance, abs=1e-5)


@pytest.mark.parametrize(("case", "mode"), COMPARED)
def test_ranks_equal_one_process(two: Outcome, case: str, mode: str) -> None:
    """Rule 13, D2: losses, norms, signal-to-noise and weights within 1e-5, for each optimizer and strategy."""
    name = f"{case}-{mode}"
    assert two.told[name] == two.told[case] and isinstance(two.told[name], tuple), (two.told[name], two.told[case])
    alone, ranks = two.lines(case), two.lines(name)
    for one, several in zip(alone, ranks, strict=True):
        assert one.keys() == several.keys()
        assert one["step"] == several["step"] and one.get("tokens") == several.get("tokens")
        for column in one.keys() - {"step", "tokens", "tokens_per_s", "mfu", "memory", "valid_losses"}:
            assert near(several[column], one[column], 1e-3 if column == "grad_snr" else 1e-5), column
    steps = len([line for line in alone if "loss" in line])
    expected, found = two.weights(case, steps), two.weights(name, steps)
    assert expected.keys() == found.keys(), "canonical names (rule 7)"
    assert max(float((found[key] - value).abs().max()) for key, value in expected.items()) < 1e-5


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_the_average_of_the_weights(two: Outcome, mode: str) -> None:
    """Averaged in shards, written whole."""
    runs = two.bench.root / "runs"
    expected = load_file(runs / "average" / "ema" / "model.safetensors")
    found = load_file(runs / f"average-{mode}" / "ema" / "model.safetensors")
    assert expected.keys() == found.keys()
    assert max(float((found[key] - value).abs().max()) for key, value in expected.items()) < 1e-5


def test_adapters_over_coarse_weights(two: Outcome) -> None:
    """Near the run in fp32."""
    pairs = zip(two.lines("coarse_lora"), two.lines("sft_lora"), strict=True)
    assert all(rough["loss"] == pytest.approx(exact["loss"], rel=2e-2) for rough, exact in pairs)


def test_what_was_compared_moved(two: Outcome) -> None:
    """Otherwise the test above would show nothing."""
    first = TrainConfig.from_dict(two.bench.recipe("unused", {}))
    from astrai_train.models import starting_model

    before = dict(starting_model(first, torch.device(two.bench.device)).cpu().named_parameters())
    for optimizer in OPTIMIZERS:
        moved = two.weights(optimizer, STEPS)["model.layers.0.mlp.down_proj.weight"]
        assert (moved - before["model.layers.0.mlp.down_proj.weight"]).abs().max() > 1e-3
    assert two.lines("clipping")[0]["grad_norm"] > 0.1, "it was clipped"
    assert two.lines("dpo")[0]["loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert two.lines("sparse")[0]["loss"] is not None


@pytest.mark.parametrize("mode", MODES)
def test_resume_is_exact_and_ranks_agree_when_to_stop(two: Outcome, mode: str) -> None:
    """Rules 5 and 6: rank 1 alone gets SIGTERM in step 3; then 3 + 3 steps are 6, bit for bit, with dropout."""
    assert two.told[f"stopped-{mode}"] == (3, "SIGTERM")
    assert two.told[f"resumed-{mode}"] == (6, None)
    exact = ("step", "loss", "lr", "grad_norm", "grad_snr", "tokens")
    lines = [[{k: line[k] for k in exact} for line in two.lines(f"{kind}-{mode}")] for kind in ("straight", "broken")]
    assert lines[0] == lines[1]
    expected, found = two.weights(f"straight-{mode}", 6), two.weights(f"broken-{mode}", 6)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_ranks_drop_apart(two: Outcome) -> None:
    """Dropout must differ between ranks, so ranks with dropout do not equal one process."""
    two.bench.alone(two.bench.recipe("dropout", DROPOUT | {"max_steps": 1}))
    assert two.lines("dropout")[0]["loss"] != pytest.approx(two.lines("straight-ddp")[0]["loss"], rel=1e-6)


def test_bf16_compute_over_shards(two: Outcome) -> None:
    """Near fp32 and not equal to it; masters and files stay fp32."""
    exact, rough = two.lines("adamw"), two.lines("mixed")
    assert rough[0]["loss"] == pytest.approx(exact[0]["loss"], rel=1e-2)
    assert rough[0]["loss"] != exact[0]["loss"]
    assert rough[-1]["loss"] < rough[0]["loss"] - 0.5
    assert {value.dtype for value in two.weights("mixed", STEPS).values()} == {torch.float32}


def test_mistakes_are_told_on_every_rank(two: Outcome) -> None:
    """None is left waiting for the others."""
    assert two.told["again"].startswith("ConfigError: ") and "holds a run already" in two.told["again"]
    assert "must be a multiple of micro_batch_size x ranks = 4 x 2 = 8" in two.told["uneven"]
    assert two.told["none"].startswith("ConfigError: field 'parallel.mode': 'none' is one process, but 2 were started")


def test_a_full_disk_on_one_rank_is_an_error_on_all(two: Outcome) -> None:
    """Rule 6: and nothing half-written is left."""
    assert two.told["full"] == (
        f"CheckpointError: {two.bench.root}/runs/full/checkpoints/step_2: cannot write: No space left on device; "
        "free some space or choose another disk"
    )
    assert list((two.bench.root / "runs" / "full" / "checkpoints").iterdir()) == []


def test_a_rank_killed_in_a_save_loses_nothing(bench: Bench) -> None:
    """Rule 6, row D1: the others end, the message names it, and the last whole checkpoint is taken up by one process."""
    changes = {"parallel": MODES["fsdp"], "checkpoint.interval": 1, "max_steps": 5}
    recipe = bench.recipe("killed", changes)
    with pytest.raises(TrainingError, match="^rank 1: was killed by SIGKILL"):
        bench.ranks(bench.jobs.die_in_a_save, 2, recipe, 1, 3)
    checkpoints = Path(recipe["output_dir"]) / "checkpoints"
    found = CheckpointStore(checkpoints, keep=None, asynchronous=False).newest()
    assert found == (2, checkpoints / "step_2")
    alone = bench.recipe("killed", changes | {"parallel": {"mode": "none"}})
    assert bench.alone(alone, resume=True).step == 5
    assert not list(checkpoints.glob(".*")), "what the killed save left is gone"


def test_the_state_is_written_in_shards(two: Outcome) -> None:
    """Rule 6: each rank its own file, which holds less than the whole."""
    files = {}
    for name in ("adamw", "adamw-fsdp"):
        state = two.bench.root / "runs" / name / "checkpoints" / f"step_{STEPS}" / "training_state"
        files[name] = {path.name: path.stat().st_size for path in state.glob("*.distcp")}
    assert sorted(files["adamw-fsdp"]) == ["__0_0.distcp", "__1_0.distcp"]
    (whole,) = files["adamw"].values()
    assert all(size < 0.7 * whole for size in files["adamw-fsdp"].values())


@pytest.fixture(scope="module")
def many(two: Outcome) -> Outcome:
    """Checkpoints of two ranks (and of one) taken up by one rank and by three; by two where there are no more GPUs."""
    runs = two.bench.root / "runs"
    jobs: dict[str, Any] = {}
    for optimizer in OPTIMIZERS:
        changes = {"optimizer": OPTIMIZERS[optimizer], "max_steps": STEPS + 2}
        straight = two.bench.recipe(f"{optimizer}-straight", changes)
        two.bench.alone(straight)
        for origin, target in ((f"{optimizer}-fsdp", "fsdp"), (f"{optimizer}-ddp", "fsdp"), (optimizer, "fsdp")):
            name = f"{origin}-on-many"
            recipe = two.bench.recipe(name, {**changes, "parallel": MODES[target]})
            shutil.copytree(runs / origin, runs / name)
            jobs[name] = {"recipe": recipe, "resume": True}
        for mode in ("none", "fsdp"):
            name = f"{optimizer}-fsdp-on-one-{mode}"
            shutil.copytree(runs / f"{optimizer}-fsdp", runs / name)
            recipe = two.bench.recipe(name, {**changes, "parallel": {"mode": mode}})
            two.bench.alone(recipe, resume=True)
    gradient = {"recipe": two.bench.recipe("gradient-many", {"parallel": MODES["fsdp"]})}
    jobs["gradient"] = gradient | {"gradient": str(two.bench.root / "fsdp_many.pt")}
    ranks = 2 if two.bench.device == "cuda" and torch.cuda.device_count() == 2 else 3
    return Outcome(two.bench, two.bench.ranks(two.bench.jobs.run_jobs, ranks, jobs))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("way", ["fsdp-on-many", "ddp-on-many", "on-many", "fsdp-on-one-none", "fsdp-on-one-fsdp"])
def test_a_checkpoint_loads_on_any_number_of_ranks(many: Outcome, optimizer: str, way: str) -> None:
    """Rule 6: what 2 (or 1) saved goes on with 1 or 3 (on two GPUs 2) as if it had never been saved."""
    name = f"{optimizer}-{way}"
    expected, found = many.lines(f"{optimizer}-straight"), many.lines(name)
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    for one, several in zip(expected, found, strict=True):
        assert near(several["loss"], one["loss"], 1e-5)
        assert near(several["grad_snr"], one["grad_snr"], 1e-3)
    weights = many.weights(name, STEPS + 2)
    for key, value in many.weights(f"{optimizer}-straight", STEPS + 2).items():
        assert (weights[key] - value).abs().max() < 1e-5, key


def test_the_gradient_of_three_uneven_shards(many: Outcome) -> None:
    """Rule 1."""
    expected = many.bench.gradient("gradient-many-alone")
    found = torch.load(many.bench.root / "fsdp_many.pt", weights_only=True)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-6, rtol=0)
