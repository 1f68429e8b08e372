"""Recipes as objects: required fields, ranges, contradictions, defaults, the schema, and an import without torch."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

import astrai_train
from astrai_core.errors import ConfigError
from astrai_train import config as config_module
from astrai_train.config import (
    AdamWConfig,
    CosineConfig,
    DataConfig,
    DPOConfig,
    LogConfig,
    ManoAdamWConfig,
    MuonAdamWConfig,
    NoraNAdamWConfig,
    ParallelConfig,
    SGDRConfig,
    TrainConfig,
    WSDConfig,
)
from astrai_train.config.recipe_file import parse_value
from astrai_train.optim.lr_schedule import LRScheduleFactory

Recipe = Callable[..., dict[str, Any]]
ErrorOf = Callable[[dict[str, Any]], str]
CLASSES = [value for name in config_module.__all__ if isinstance(value := getattr(config_module, name), type)]

# ---- what is required, refused, suggested ----

REQUIRED = ["model", "data", "strategy", "optimizer", "output_dir", "batch_size"]


@pytest.mark.parametrize(
    "dotted", [*REQUIRED, "data.train", "data.seq_len", "strategy.name", "optimizer.name", "optimizer.lr"]
)
def test_a_missing_field_is_named(error_of: ErrorOf, dotted: str) -> None:
    """Row CF2: required fields are truly required."""
    assert f"field {dotted!r} is required" in error_of({dotted: ...})


def test_the_constructor_raises_pydantics_error(recipe: Recipe) -> None:
    """Row CF2: missing field -> ValidationError."""
    with pytest.raises(ValidationError, match="batch_size"):
        TrainConfig(**recipe({"batch_size": ...}))


def test_a_path_in_a_mixture_is_required(error_of: ErrorOf) -> None:
    assert "field 'data.train.1.path' is required" in error_of({"data.train": [{"path": "a"}, {"weight": 2}]})


@pytest.mark.parametrize(
    ("dotted", "value", "meant"),
    [
        ("batchsize", 8, "batch_size"),
        ("optimizer.wieght_decay", 0.1, "weight_decay"),
        ("data.seqlen", 3, "seq_len"),
        ("lora.rnk", 3, "rank"),
        ("strategy.neftune_alhpa", 5, "neftune_alpha"),
        ("lr_schedule", {"name": "wsd", "decay_shap": "linear"}, "decay_shape"),
        ("data.train", [{"path": "x", "wieght": 2}], "weight"),
    ],
)
def test_a_typo_gets_a_suggestion(error_of: ErrorOf, dotted: str, value: Any, meant: str) -> None:
    message = error_of({dotted: value})
    typo = {"lr_schedule": "lr_schedule.decay_shap", "data.train": "data.train.0.wieght"}.get(dotted, dotted)
    assert message.startswith(f"unknown field {typo!r} (did you mean {meant!r}?)")


def test_a_typo_is_told_before_the_field_that_it_leaves_missing(error_of: ErrorOf) -> None:
    message = error_of({"batch_size": ..., "batch_sise": 8})
    assert message == "unknown field 'batch_sise' (did you mean 'batch_size'?) (and 1 more)"


def test_a_field_of_another_member_is_refused_and_the_own_fields_listed(error_of: ErrorOf) -> None:
    message = error_of({"optimizer.nora_beta": 0.9})
    assert "unknown field 'optimizer.nora_beta'; the fields here are name, lr, betas, eps, weight_decay" in message


def test_an_unknown_name_gets_a_suggestion_and_the_choices(error_of: ErrorOf) -> None:
    message = error_of({"optimizer.name": "moun_adamw"})
    assert "field 'optimizer.name': unknown name 'moun_adamw' (did you mean 'muon_adamw'?)" in message
    assert "adamw, muon_adamw, mano_adamw, nora_nadamw" in message


@pytest.mark.parametrize(
    ("dotted", "values"),
    [
        ("batch_size", [0, -1, 1.5, "x", None]),
        ("micro_batch_size", [0]),
        ("max_steps", [0]),
        ("seed", [-1]),
        ("max_grad_norm", [0, -1, float("inf")]),
        ("output_dir", [""]),
        ("optimizer.lr", [0, -1e-3, float("nan"), "fast"]),
        ("optimizer.eps", [0]),
        ("optimizer.weight_decay", [-0.1]),
        ("data.seq_len", [1]),
        ("data.train", [[], "x"]),
        ("data.packing", ["best"]),
        ("data.workers", [-1]),
        ("strategy.label_smoothing", [-0.1, 1]),
        ("strategy.neftune_alpha", [0]),
        ("lora.rank", [0]),
        ("lora.dropout", [1]),
        ("lora.target_modules", [[]]),
        ("checkpoint.keep", [0]),
        ("checkpoint.interval", [0]),
        ("log.interval", [0]),
        ("log.grad_snr_beta", [1]),
        ("log.metrics", [["loss", "loss"]]),
        ("parallel.mode", ["tp"]),
        ("lora", [3]),
    ],
)
def test_a_value_out_of_range_is_named(error_of: ErrorOf, dotted: str, values: list[Any]) -> None:
    for value in values:
        assert error_of({dotted: value}).startswith(f"field {dotted!r}: "), value


def test_an_element_of_a_list_is_named(error_of: ErrorOf) -> None:
    assert error_of({"optimizer.betas": [0.9, 1]}).startswith("field 'optimizer.betas.1': ")
    assert error_of({"log.metrics": ["loss", "los"]}).startswith("field 'log.metrics.1': ")
    selective = {"precision.activation_checkpointing": "selective"}
    message = error_of({**selective, "precision.gradient_checkpointing_modules": ["a b"]})
    assert message.startswith("field 'precision.gradient_checkpointing_modules.0': ")


def test_an_architecture_is_a_path_or_plain_data(recipe: Recipe, error_of: ErrorOf) -> None:
    scratch = {"model.pretrained": ..., "model.tokenizer": "smollm2"}
    for architecture in ("config.json", {"model_type": "llama", "rope_parameters": {"rope_theta": 1e4}}):
        config = TrainConfig.from_dict(recipe({**scratch, "model.architecture": architecture}))
        assert config.model.architecture == architecture
    message = error_of({**scratch, "model.architecture": {"hidden_size": object()}})
    assert message.startswith("field 'model.architecture.hidden_size': ")
    assert error_of({**scratch, "model.architecture": 3}).startswith("field 'model.architecture': ")


# ---- fields that must fit each other ----


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_steps": ...}, "give exactly one of max_steps and epochs"),
        ({"epochs": 2}, "give exactly one of max_steps and epochs"),
        ({"micro_batch_size": 3}, "'micro_batch_size': batch_size 8 must be a multiple of micro_batch_size 3"),
        ({"lr_schedule": {"name": "cosine", "warmup": 101}}, "'lr_schedule': warmup of 101 steps is longer"),
        ({"lr_schedule": {"name": "wsd", "warmup": 60, "decay": 0.5}}, "'lr_schedule': warmup of 60 and decay of 50"),
        ({"lr_schedule": {"name": "wsd", "warmup": "3"}}, "'lr_schedule.warmup': must be a whole number of steps"),
        ({"model.architecture": {}}, "'model': give exactly one of pretrained"),
        ({"model": {}}, "'model': give exactly one of pretrained"),
        ({"model": {"architecture": {}}}, "'model': a model from scratch brings no tokenizer"),
        ({"data.packing": "bfd_split", "data.overlong": "drop"}, "'data.overlong': packing 'bfd_split'"),
        ({"data.packing": "simple", "data.overlong": "drop"}, "'data.overlong': packing 'simple'"),
        ({"parallel.reshard_after_forward": True}, "'parallel.reshard_after_forward': mode 'none'"),
        ({"precision.gradient_checkpointing_modules": ["MLP"]}, "activation_checkpointing 'none' does not use it"),
        ({"precision.checkpointing_every": 2}, "activation_checkpointing 'none' does not use it"),
        (
            {
                "precision.activation_checkpointing": "selective",
                "precision.checkpointing_every": 2,
                "precision.gradient_checkpointing_modules": ["SwiGLU"],
            },
            "'precision.gradient_checkpointing_modules': checkpointing_every counts decoder blocks",
        ),
        ({"strategy": {"name": "dpo", "loss": "cdpo"}}, "'strategy.label_smoothing': loss 'cdpo'"),
        ({"strategy": {"name": "dpo", "label_smoothing": 0.1}}, "'strategy.label_smoothing': loss 'sigmoid'"),
        ({"strategy": {"name": "dpo", "simpo_gamma": 0.5}}, "'strategy.simpo_gamma': loss 'sigmoid'"),
        ({"strategy": {"name": "dpo", "loss": "orpo", "reference": "copy"}}, "'strategy.reference': loss 'orpo'"),
        ({"strategy": {"name": "dpo", "reference": "adapter_off"}}, "'lora': strategy.reference 'adapter_off'"),
        ({"strategy": {"name": "dpo", "max_prompt_len": 64}}, "'strategy': max_prompt_len 64 leaves no room"),
        ({"eval_interval": 10}, "'eval_interval': there is nothing to evaluate on"),
        ({"early_stop_patience": 2}, "'early_stop_patience': stopping early needs evaluations"),
    ],
)
def test_fields_that_contradict_each_other(error_of: ErrorOf, changes: dict[str, Any], message: str) -> None:
    assert message in error_of(changes)


def test_fields_that_fit_each_other(recipe: Recipe) -> None:
    for changes in (
        {"strategy": {"name": "dpo", "reference": "adapter_off", "max_prompt_len": 63}, "lora": {}},
        {"lr_schedule": {"name": "wsd", "warmup": 50, "decay": 50}},
        {"data.valid": [{"path": "held_out"}], "eval_interval": 5, "early_stop_patience": 2},
        {"data.packing": "bfd", "data.overlong": "drop"},
    ):
        config = TrainConfig.from_dict(recipe(changes))
        assert TrainConfig.from_dict(config.to_dict()) == config, changes


def test_accumulation_shares_the_batch_evenly(recipe: Recipe) -> None:
    config = TrainConfig.from_dict(recipe({"batch_size": 24, "micro_batch_size": 2}))
    assert [config.accumulation_steps(ranks) for ranks in (1, 2, 3, 4, 12)] == [12, 6, 4, 3, 1]
    with pytest.raises(ConfigError, match="2 x 5 = 10"):
        config.accumulation_steps(5)


# ---- defaults that a row or a paper fixes ----


def test_defaults(recipe: Recipe) -> None:
    assert ParallelConfig().reshard_after_forward is False  # TR4
    assert "grad_snr" in LogConfig().metrics  # TR3
    assert LogConfig().grad_snr_beta == 0.999  # TR3
    mano = ManoAdamWConfig()
    assert (mano.lr, mano.mano_momentum, mano.mano_nesterov, mano.mano_eps) == (1e-3, 0.95, True, 1e-8)  # O2
    assert mano.weight_decay == 0.1
    assert mano.adamw_betas == (0.9, 0.95)  # O3
    muon = MuonAdamWConfig(lr=0.02)
    assert (muon.muon_momentum, muon.muon_ns_steps, muon.muon_eps) == (0.95, 5, 1e-7)
    assert muon.muon_ns_coefficients == (3.4445, -4.7750, 2.0315)
    nora = NoraNAdamWConfig()
    assert (nora.lr, nora.nora_beta, nora.nora_momentum, nora.weight_decay) == (5e-3, 0.95, 0.95, 0.0)
    assert nora.nadamw_betas == (0.9, 0.999)
    assert DPOConfig().beta == 0.1
    config = TrainConfig.from_dict(recipe())
    assert config.lr_schedule == CosineConfig()
    assert config.precision.dtype == "bf16_mixed"


def test_schedule_configs_and_factory_know_the_same_names() -> None:
    """Every option of a schedule's configuration reaches the schedule or is refused."""
    members = typing.get_args(typing.get_args(config_module.LRScheduleConfig)[0])
    assert sorted(member.name for member in members) == LRScheduleFactory.names()
    for member in members:
        schedule = member().create(50)
        assert type(schedule) is LRScheduleFactory.get(member.name)
        assert schedule.warmup_steps == 1
    assert WSDConfig(warmup=5, decay=10, decay_shape="linear", min_ratio=0.5).create(20).factor(15) == 0.75
    assert SGDRConfig(warmup=0, cycle=4, cycle_mult=2).create(20).factor(12) == 1.0


# ---- every class ----


@pytest.mark.parametrize("cls", CLASSES)
def test_classes_are_frozen_keyword_only_and_closed(cls: type) -> None:
    """Row CF1; see config/fields.py for why keyword-only needs a test."""
    with pytest.raises(ValidationError, match="unexpected_positional_argument"):
        cls("value")
    with pytest.raises(ValidationError, match="unexpected_keyword_argument"):
        cls(no_such_field=1)
    assert cls.__dataclass_params__.frozen  # type: ignore[attr-defined]


def test_a_configuration_cannot_be_changed() -> None:
    config = AdamWConfig(lr=1e-3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.lr = 1.0  # type: ignore[misc]


def test_the_schema_describes_every_field() -> None:
    """Row CF2 (use_attribute_docstrings): the command line writes its help from this."""
    schema = TypeAdapter(TrainConfig).json_schema()
    groups = {"TrainConfig": schema, **schema["$defs"]}
    described = {cls.__name__ for cls in CLASSES}
    assert described <= set(groups)
    for name in described:
        assert groups[name]["description"], name
        assert groups[name]["additionalProperties"] is False, name
        for field, entry in groups[name]["properties"].items():
            assert len(entry.get("description", "")) > 10, f"{name}.{field}"
    assert sorted(schema["required"]) == sorted(REQUIRED)


# ---- imports ----


def loaded_after(statements: str) -> set[str]:
    code = f"import sys\n{statements}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    return set(result.stdout.split())


def test_importing_the_package_loads_neither_torch_nor_pydantic() -> None:
    assert {"torch", "pydantic", "yaml", "numpy"}.isdisjoint(loaded_after("import astrai_train"))


def test_configs_and_schedules_need_no_torch() -> None:
    loaded = loaded_after("from astrai_train import TrainConfig, WSDConfig\nWSDConfig().create(10).factor(3)")
    assert {"astrai_core", "pydantic", "yaml"} <= loaded
    assert {"torch", "numpy"}.isdisjoint(loaded)


def test_every_exported_name_is_there() -> None:
    for name in astrai_train.__all__:
        assert getattr(astrai_train, name) is not None
    assert set(dir(astrai_train)) == set(astrai_train.__all__)
    exported_here = {cls.__name__ for cls in CLASSES}
    assert exported_here <= set(astrai_train.__all__)
    with pytest.raises(AttributeError, match="Trainr"):
        _ = astrai_train.Trainr


def test_data_config_alone_reports_its_own_typos() -> None:
    with pytest.raises(ConfigError, match=r"unknown field 'seqlen' \(did you mean 'seq_len'\?\)"):
        DataConfig.from_dict({"train": [{"path": "a"}], "seq_len": 4, "seqlen": 3})


def test_overrides_take_the_place_of_fields(recipe: Recipe, tmp_path: Path) -> None:
    """Row CL1: dotted names; groups that the file lacks appear; an error in an override names no line of the file."""
    path = tmp_path / "recipe.yaml"
    TrainConfig.from_dict(recipe()).to_yaml(path)
    config = TrainConfig.from_yaml(path, {"optimizer.lr": 0.5, "lora.rank": 4, "max_steps": None, "epochs": 2.0})
    assert (config.optimizer.lr, config.max_steps, config.epochs) == (0.5, None, 2.0)
    assert config.lora is not None and config.lora.rank == 4
    with pytest.raises(ConfigError, match=r"^field 'optimizer.lr': input should be greater than 0"):
        TrainConfig.from_yaml(path, {"optimizer.lr": -1})
    path.write_text(path.read_text() + "batchsize: 1\n")
    with pytest.raises(ConfigError, match=rf"^{path}:\d+: unknown field 'batchsize'"):
        TrainConfig.from_yaml(path, {"optimizer.lr": 1})


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 0.001), ("null", None), ("true", True), ("[a, 1]", ["a", 1]), ("{path: x}", {"path": "x"}), ("2", 2)],
)
def test_a_value_is_read_as_in_a_recipe(text: str, value: Any) -> None:
    assert parse_value(text) == value


@pytest.mark.parametrize("text", ["{a: [", "[1", "2001-13-45"])
def test_a_value_that_is_not_yaml_is_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match="is not valid YAML") as caught:
        parse_value(text)
    assert "\n" not in str(caught.value)
