"""The training loop: one division, one clipping, one update; what is refused; what callbacks see."""

from __future__ import annotations

import copy
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from astrai_core.errors import ConfigError, DataError, TrainingError
from astrai_train import TrainConfig
from astrai_train.callbacks.base import Callback
from astrai_train.context import StepRecord, TrainContext, TrainResult
from astrai_train.data.collate import TrainBatch
from astrai_train.run import build

Recipe = Callable[..., dict[str, Any]]


class Recorder(Callback):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.calls: list[str] = []

    def on_train_begin(self, context: TrainContext) -> None:
        self.calls.append("begin")

    def on_step_end(self, context: TrainContext, record: StepRecord) -> None:
        self.records.append(record)
        self.calls.append(f"step {record.step}")

    def on_save(self, context: TrainContext, path: Path) -> None:
        self.calls.append(path.name)

    def on_train_end(self, context: TrainContext, result: TrainResult) -> None:
        self.calls.append("end")

    def on_error(self, context: TrainContext, error: BaseException) -> None:
        self.calls.append(type(error).__name__)


class Mapped:
    """A source whose batches are changed by a function of (batch, number of batches before it)."""

    def __init__(self, source: Any, change: Callable[[TrainBatch, int], TrainBatch]) -> None:
        self.source, self.change = source, change

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[TrainBatch]:
        for number, batch in enumerate(self.source):
            yield self.change(batch, number)

    def state_dict(self) -> dict[str, Any]:
        return self.source.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.source.load_state_dict(state)


def unsupervised(batch: TrainBatch) -> TrainBatch:
    """The batch with no label left."""
    labels = torch.full_like(batch.labels, -100)
    return TrainBatch(batch.input_ids, labels, batch.position_ids, batch.doc_ids, 0)


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.context.model.named_parameters()}


def run(recipe: dict[str, Any], **options: Any) -> tuple[Recorder, Any]:
    recorder = Recorder()
    trainer = build(TrainConfig.from_dict(recipe), callbacks=[recorder], device="cpu", **options)
    trainer.train()
    return recorder, trainer


# ---- one loss convention ----


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_any_split_into_micro_batches_gives_the_same_step(run_recipe: Recipe, micro_batch_size: int) -> None:
    """Training rule 1: rows of 1 to 31 targets, so a mean of means would differ."""
    changes = {"batch_size": 8, "max_steps": 3, "data.packing": "none", "max_grad_norm": None}
    whole, whole_trainer = run(run_recipe(changes | {"micro_batch_size": 8}))
    changes |= {"micro_batch_size": micro_batch_size, "output_dir": str(whole_trainer.context.run_dir) + "-split"}
    split, split_trainer = run(run_recipe(changes))
    for ours, theirs in zip(split.records, whole.records, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-6)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5)
    before = weights(
        build(TrainConfig.from_dict(run_recipe({"output_dir": str(whole_trainer.context.run_dir) + "-0"})))
    )
    for name, value in weights(split_trainer).items():
        # Adam divides by the root of the second moment: where a gradient is nearly 0, rounding decides its direction.
        expected = weights(whole_trainer)[name]
        assert (value - expected).abs().mean() < 1e-6
        assert not torch.equal(expected, before[name])


def gradient_of(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Do one step that changes no weight; return the gradient that the optimizer was given."""
    found: dict[str, torch.Tensor] = {}

    def look() -> None:
        for name, parameter in trainer.context.model.named_parameters():
            found[name] = parameter.grad.clone()

    monkeypatch.setattr(trainer.context.optimizer, "step", look)
    trainer._step(iter(trainer.context.source))
    return found


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_the_gradient_is_the_same_for_any_split(
    run_recipe: Recipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, micro_batch_size: int
) -> None:
    """Training rule 1: within 1e-6 in fp32."""
    changes = {"batch_size": 8, "data.packing": "none", "max_grad_norm": None}
    gradients = [
        gradient_of(
            build(
                TrainConfig.from_dict(
                    run_recipe(changes | {"micro_batch_size": rows, "output_dir": str(tmp_path / str(rows) / name)})
                )
            ),
            monkeypatch,
        )
        for rows, name in ((8, "whole"), (micro_batch_size, "split"))
    ]
    assert gradients[0].keys() == gradients[1].keys()
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, atol=1e-6, rtol=0)


def test_a_micro_batch_without_a_label_counts_nothing(
    run_recipe: Recipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Training rule 1: the other micro-batch alone decides loss and gradient."""
    trainer = build(TrainConfig.from_dict(run_recipe()))
    trainer.context.source = Mapped(trainer.context.source, lambda b, n: unsupervised(b) if n else b)
    alone = build(TrainConfig.from_dict(run_recipe({"batch_size": 2, "output_dir": str(tmp_path / "alone")})))
    expected = gradient_of(alone, monkeypatch)
    for name, value in gradient_of(trainer, monkeypatch).items():
        torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=0)


def test_a_step_without_a_label_is_skipped_with_a_warning(run_recipe: Recipe, caplog: pytest.LogCaptureFixture) -> None:
    """Training rule 1."""
    trainer = build(TrainConfig.from_dict(run_recipe({"max_steps": 2})))
    trainer.context.source = Mapped(trainer.context.source, lambda b, n: unsupervised(b) if n < 2 else b)
    before = weights(trainer)
    batches = iter(trainer.context.source)
    with caplog.at_level(logging.WARNING):
        record = trainer._step(batches)
    assert "step 1 has no supervised token and is skipped" in caplog.text
    assert (record.step, record.loss, record.grad_norm) == (1, None, None)
    assert all(torch.equal(value, before[name]) for name, value in weights(trainer).items())
    record = trainer._step(batches)
    assert record.loss is not None
    assert not torch.equal(weights(trainer)["model.embed_tokens.weight"], before["model.embed_tokens.weight"])


# ---- clipping, numbers, rates ----


def test_the_norm_is_measured_before_clipping(run_recipe: Recipe, tmp_path: Path, monkeypatch: Any) -> None:
    """Training rule 8; maths.md section 11: the coefficient is max / (norm + 1e-6)."""
    free = build(TrainConfig.from_dict(run_recipe({"max_grad_norm": None})))
    clipped = build(TrainConfig.from_dict(run_recipe({"max_grad_norm": 0.5, "output_dir": str(tmp_path / "other")})))
    expected, given = gradient_of(free, monkeypatch), gradient_of(clipped, monkeypatch)
    norm = torch.cat([value.flatten() for value in expected.values()]).norm()
    assert norm > 1
    for name, value in given.items():
        torch.testing.assert_close(value, expected[name] * (0.5 / (norm + 1e-6)), atol=1e-7, rtol=1e-5)
    record = build(TrainConfig.from_dict(run_recipe({"output_dir": str(tmp_path / "again"), "max_grad_norm": 0.5})))
    assert record._step(iter(record.context.source)).grad_norm == pytest.approx(float(norm), rel=1e-5)


def test_a_gradient_that_is_not_finite_stops_the_run(run_recipe: Recipe) -> None:
    """Training rule 8: the error names the step, and nothing of that step reaches weights or disk."""
    recorder = Recorder()
    trainer = build(TrainConfig.from_dict(run_recipe({"checkpoint.interval": 1})), callbacks=[recorder])
    strategy, seen = trainer.context.strategy, []

    def poisoned(batch: TrainBatch) -> Any:
        seen.append(weights(trainer))
        output = strategy(batch)
        return type(output)(output.loss_sum * (float("nan") if len(seen) > 4 else 1), output.n_supervised)

    trainer.context.strategy = poisoned
    with pytest.raises(TrainingError, match="step 3: the gradient norm is nan"):
        trainer.train()
    assert all(torch.equal(value, seen[-1][name]) for name, value in weights(trainer).items())
    assert recorder.calls == ["begin", "step 1", "step_1", "step 2", "step_2", "TrainingError"]


@pytest.mark.parametrize(("optimizer", "order"), [("adamw", ["step", "read"]), ("muon_adamw", ["read", "step"])])
def test_the_device_is_read_once_a_step(
    run_recipe: Recipe, monkeypatch: pytest.MonkeyPatch, optimizer: str, order: list[str]
) -> None:
    """Behind the update where the device itself can refuse it, so that it has work while the host reads."""
    trainer = build(TrainConfig.from_dict(run_recipe({"optimizer": {"name": optimizer, "lr": 1e-2}})))
    read, step, seen = trainer._read, trainer.context.optimizer.step, []
    monkeypatch.setattr(trainer, "_read", lambda *given: (seen.append("read"), read(*given))[1])
    monkeypatch.setattr(trainer.context.optimizer, "step", lambda: (seen.append("step"), step())[1])
    record = trainer._step(iter(trainer.context.source))
    assert seen == order
    assert record.loss is not None and record.grad_norm is not None


@pytest.mark.parametrize("optimizer", ["adamw", "nora_nadamw"])
def test_what_is_not_finite_reaches_no_weight(run_recipe: Recipe, optimizer: str) -> None:
    """Training rule 8, whoever decides."""
    trainer = build(TrainConfig.from_dict(run_recipe({"optimizer": {"name": optimizer, "lr": 1e-2}})))
    batches, strategy = iter(trainer.context.source), trainer.context.strategy
    trainer._step(batches)
    before = weights(trainer)
    state = copy.deepcopy(trainer.context.optimizer.state_dict()["state"])

    def poisoned(batch: TrainBatch) -> Any:
        output = strategy(batch)
        return type(output)(output.loss_sum * float("inf"), output.n_supervised)

    trainer.context.strategy = poisoned
    with pytest.raises(TrainingError, match="step 2: the gradient norm is"):
        trainer._step(batches)
    assert all(torch.equal(value, before[name]) for name, value in weights(trainer).items())
    for index, values in trainer.context.optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, state[index][key]) for key, value in values.items())


def test_the_learning_rate_follows_the_schedule(run_recipe: Recipe) -> None:
    """maths.md section 9: warm-up from 1/w, and the last step still learns."""
    recorder, _ = run(
        run_recipe({"lr_schedule": {"name": "wsd", "warmup": 2, "decay": 2, "decay_shape": "linear", "min_ratio": 0.0}})
    )
    assert [record.lr for record in recorder.records] == pytest.approx([0.005, 0.01, 0.01, 0.01, 0.01, 0.005])


@pytest.mark.parametrize(("dtype", "kept"), [("bf16_mixed", torch.float32), ("bf16", torch.bfloat16)])
def test_bf16(run_recipe: Recipe, tmp_path: Path, dtype: str, kept: torch.dtype) -> None:
    """Training rule 12: fp32 masters under bf16 compute, or bf16 throughout; near fp32, and not equal to it."""
    exact, _ = run(run_recipe())
    rough, trainer = run(run_recipe({"precision.dtype": dtype, "output_dir": str(tmp_path / "bf16")}))
    assert {value.dtype for value in weights(trainer).values()} == {kept}
    assert rough.records[0].loss == pytest.approx(exact.records[0].loss, rel=1e-2)
    assert rough.records[0].loss != exact.records[0].loss
    assert rough.records[-1].loss < rough.records[0].loss - 0.5


def test_the_seed_decides_everything(run_recipe: Recipe, tmp_path: Path) -> None:
    first, _ = run(run_recipe())
    second, _ = run(run_recipe({"output_dir": str(tmp_path / "two")}))
    other, _ = run(run_recipe({"output_dir": str(tmp_path / "three"), "seed": 1}))
    losses = [[record.loss for record in recorder.records] for recorder in (first, second, other)]
    assert losses[0] == losses[1] != losses[2]


# ---- what surrounds the loop ----


def test_callbacks_are_called_in_order(run_recipe: Recipe) -> None:
    recorder, trainer = run(run_recipe({"max_steps": 3, "checkpoint.interval": 2}))
    assert recorder.calls == ["begin", "step 1", "step 2", "step_2", "step 3", "step_3", "end"]
    assert trainer.context.counters.tokens == sum(record.n_tokens for record in recorder.records)


def test_the_run_directory_holds_recipe_metrics_and_checkpoints(run_recipe: Recipe) -> None:
    """Training rule 14: every column is there, and the recipe reads back as the run's own."""
    _, trainer = run(run_recipe({"max_steps": 3}))
    run_dir = trainer.context.run_dir
    assert TrainConfig.from_yaml(run_dir / "recipe.yaml") == trainer.context.config
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert set(lines[0]) == set("step loss lr grad_norm grad_snr tokens tokens_per_s mfu memory".split())
    assert lines[1]["tokens_per_s"] > 0 and lines[1]["memory"] > 10**6 and lines[1]["grad_snr"] > 0
    assert lines[0]["mfu"] is None, "the peak of a CPU is not known"
    assert (run_dir / "checkpoints" / "step_3" / "model.safetensors").is_file()


def test_only_the_columns_asked_for(run_recipe: Recipe) -> None:
    """Row TR3."""
    _, trainer = run(run_recipe({"max_steps": 1, "log": {"metrics": ["loss", "lr"]}}))
    line = json.loads((trainer.context.run_dir / "metrics.jsonl").read_text())
    assert set(line) == {"step", "loss", "lr"}
    assert trainer.context.grad_snr is None, "what is not asked for costs nothing"


def test_epochs_become_steps(run_recipe: Recipe) -> None:
    trainer = build(TrainConfig.from_dict(run_recipe({"max_steps": ..., "epochs": 1.5})))
    assert trainer.context.total_steps == -(-trainer.context.source.n_rows * 3 // 8)


def test_a_run_is_not_overwritten(run_recipe: Recipe) -> None:
    recipe = run_recipe({"max_steps": 1})
    run(recipe)
    with pytest.raises(ConfigError, match="holds a run already; resume it"):
        build(TrainConfig.from_dict(recipe))


def test_a_run_that_could_not_begin_is_none(run_recipe: Recipe, tmp_path: Path) -> None:
    """A mistake that is mended needs no --resume; a directory that cannot be made is the recipe's mistake."""
    with pytest.raises(ConfigError, match=r"data\.seq_len"):
        build(TrainConfig.from_dict(run_recipe({"data.seq_len": 129})))
    run(run_recipe({"max_steps": 1}))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"field 'output_dir': .*file/run: Not a directory; choose"):
        build(TrainConfig.from_dict(run_recipe({"output_dir": str(tmp_path / "file" / "run")})))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("data.seq_len", 129, "field 'data.seq_len': 129 is more than the model's context of 128"),
        ("model.architecture.vocab_size", 257, "field 'model.tokenizer': it has 258 ids, the model's vocabulary 257"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(run_recipe: Recipe, field: str, value: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(TrainConfig.from_dict(run_recipe({field: value})))


def test_another_tokenizer_than_the_data_s_is_refused(run_recipe: Recipe, tokenizer_dir: Path, tmp_path: Path) -> None:
    other = tmp_path / "tokenizer"
    shutil.copytree(tokenizer_dir, other)
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text().replace("<|im_start|>", "<|turn|>"))
    with pytest.raises(DataError, match="made with another tokenizer"):
        build(TrainConfig.from_dict(run_recipe({"model.tokenizer": str(other)})))


def test_deterministic_kernels(run_recipe: Recipe) -> None:
    """Training rule 12; the next run decides anew."""
    build(TrainConfig.from_dict(run_recipe({"precision.deterministic": True})))
    assert torch.are_deterministic_algorithms_enabled()
    build(TrainConfig.from_dict(run_recipe()), resume=True)
    assert not torch.are_deterministic_algorithms_enabled()
