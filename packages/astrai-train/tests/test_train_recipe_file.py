"""Recipes as plain data and as YAML files: round trips, strict reading, errors that name file, line and field."""

from __future__ import annotations

import dataclasses
import os
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from astrai_core.errors import ConfigError
from astrai_train.config import TrainConfig

Recipe = Callable[..., dict[str, Any]]

# ---- round trips ----

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
COUNT = st.integers(1, 10**6)
POSITIVE = st.floats(1e-12, 1e6)
SHARE = st.floats(0, 1, exclude_max=True)
BETAS = st.tuples(SHARE, SHARE)
MODULES = st.lists(st.sampled_from(["q_proj", "DecoderBlock", "layers.3.mlp"]), min_size=1, max_size=3)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def group(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Any subset of these fields; one named with a trailing underscore is always there."""
    always = {name[:-1]: strategy for name, strategy in fields.items() if name.endswith("_")}
    return st.fixed_dictionaries(
        always, optional={name: strategy for name, strategy in fields.items() if not name.endswith("_")}
    )


SOURCES = st.lists(group(path_=TEXT, weight=POSITIVE), min_size=1, max_size=3)
MODEL = group(pretrained_=TEXT, tokenizer=TEXT) | group(
    architecture_=TEXT | st.dictionaries(st.text(max_size=5), JSON, max_size=3), tokenizer_=TEXT
)
DATA = group(
    train_=SOURCES,
    valid_=SOURCES,
    seq_len_=st.integers(1000, 10**6),
    packing=st.sampled_from(["none", "simple", "bfd", "bfd_split"]),
    position_ids=st.sampled_from(["none", "doc_reset", "continuous"]),
    shuffle_seed=st.none() | st.integers(0, 2**40),
    workers=st.integers(0, 64),
)
STRATEGY = st.one_of(
    group(name_=st.just("seq"), label_smoothing=SHARE),
    group(name_=st.just("sft"), label_smoothing=SHARE, neftune_alpha=st.none() | POSITIVE),
    group(
        name_=st.just("dpo"),
        loss=st.sampled_from(["ipo", "hinge", "kto"]),
        beta=POSITIVE,
        max_prompt_len=st.integers(1, 999),
    ),
    group(name_=st.just("dpo"), loss_=st.just("robust"), label_smoothing_=st.floats(0.01, 0.49)),
    group(name_=st.just("dpo"), loss_=st.just("simpo"), simpo_gamma=POSITIVE),
)
ADAMW = {"adamw_lr": st.none() | POSITIVE, "adamw_betas": BETAS, "adamw_eps": POSITIVE, "adamw_weight_decay": POSITIVE}
OPTIMIZER = st.one_of(
    group(name_=st.just("adamw"), lr_=POSITIVE, betas=BETAS, eps=POSITIVE, weight_decay=POSITIVE),
    group(
        name_=st.just("muon_adamw"),
        lr_=POSITIVE,
        muon_momentum=SHARE,
        muon_nesterov=st.booleans(),
        muon_ns_steps=st.integers(1, 20),
        muon_scale=st.sampled_from(["original", "match_rms_adamw"]),
        **ADAMW,
    ),
    group(name_=st.just("mano_adamw"), lr=POSITIVE, mano_momentum=SHARE, mano_nesterov=st.booleans(), **ADAMW),
    group(name_=st.just("nora_nadamw"), lr=POSITIVE, nora_beta=SHARE, nadamw_betas=BETAS, nadamw_lr=POSITIVE),
)
WARMUP = st.integers(0, 40) | st.floats(0, 0.4)
SCHEDULE = st.one_of(
    group(name_=st.just("cosine"), warmup=WARMUP, min_ratio=st.floats(0, 1)),
    group(
        name_=st.just("wsd"),
        warmup=WARMUP,
        decay=WARMUP,
        decay_shape=st.sampled_from(["linear", "1-sqrt", "square", "cosine"]),
    ),
    group(name_=st.just("sgdr"), warmup=WARMUP, cycle=COUNT, cycle_mult=st.integers(1, 4)),
    group(name_=st.just("constant"), warmup=WARMUP),
)


@st.composite
def recipes(draw: st.DrawFn) -> TrainConfig:
    micro = draw(st.integers(1, 64))
    data = draw(
        group(
            model_=MODEL,
            data_=DATA,
            strategy_=STRATEGY,
            optimizer_=OPTIMIZER,
            output_dir_=TEXT,
            batch_size_=st.integers(1, 64).map(lambda times: times * micro),
            micro_batch_size_=st.just(micro),
            lr_schedule=SCHEDULE,
            max_grad_norm=st.none() | POSITIVE,
            seed=st.integers(0, 2**63),
            eval_interval=COUNT,
            parallel=st.sampled_from([{"mode": "ddp"}, {"mode": "fsdp", "reshard_after_forward": True}]),
            precision=group(
                dtype=st.sampled_from(["bf16_mixed", "bf16", "fp32"]),
                compile=st.sampled_from(["none", "default", "max-autotune"]),
                activation_checkpointing_=st.just("selective"),
                gradient_checkpointing_modules_=MODULES,
            ),
            lora=st.none() | group(rank=COUNT, alpha=POSITIVE, dropout=SHARE, target_modules=MODULES),
            checkpoint=group(interval=COUNT, keep=st.none() | COUNT, asynchronous=st.booleans()),
            log=group(
                interval=COUNT,
                metrics=st.lists(st.sampled_from(["loss", "lr", "grad_snr", "mfu"]), unique=True),
                trackers=st.just(["wandb"]),
            ),
        )
    )
    if data["strategy"]["name"] == "dpo":  # pairs are not packed
        data["data"].pop("packing", None)
    if "eval_interval" not in data:  # nobody would look at it
        data["data"].pop("valid", None)
    if "pretrained" not in data["model"]:  # there is nothing to adapt
        data.pop("lora", None)
    return TrainConfig.from_dict(data | draw(st.sampled_from([{"max_steps": 100}, {"epochs": 0.5}])))


@given(recipes())
@settings(max_examples=100, deadline=None)
def test_every_recipe_survives_a_dict_and_a_yaml_file(
    tmp_path_factory: pytest.TempPathFactory, config: TrainConfig
) -> None:
    """Row CF1."""
    assert TrainConfig.from_dict(config.to_dict()) == config
    path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    config.to_yaml(path)
    assert TrainConfig.from_yaml(path) == config
    assert [file.name for file in path.parent.iterdir()] == ["recipe.yaml"]


def test_a_dict_spells_out_every_field(recipe: Recipe) -> None:
    """Row CF1: nothing is lost to the JSON filter."""

    def names(config: Any) -> Any:
        if not dataclasses.is_dataclass(config):
            return None
        return {field.name: names(getattr(config, field.name)) for field in dataclasses.fields(config)}

    def keys(value: Any, like: Any) -> Any:
        return {key: keys(inner, like[key]) for key, inner in value.items()} if like else None

    config = TrainConfig.from_dict(recipe({"lora": {}}))
    assert keys(config.to_dict(), names(config)) == names(config)


@pytest.mark.parametrize(
    "text",
    [
        "1e-3",
        "null",
        "true",
        "2024-01-01",
        "0x10",
        "- a",
        "'",
        "é😀",
        " x ",
        "#x",
        "1_0",
        "a\x85b",
        "\u2028",
        "\ufeffa",
        "a\tb\r\n",
        "w " * 90 + "w",
    ],
)
def test_text_that_looks_like_something_else_survives_yaml(recipe: Recipe, tmp_path: Path, text: str) -> None:
    config = TrainConfig.from_dict(recipe({"output_dir": text}))
    config.to_yaml(tmp_path / "r.yaml")
    assert TrainConfig.from_yaml(tmp_path / "r.yaml").output_dir == text


# ---- YAML files ----


def from_text(tmp_path: Path, text: str | bytes) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(text if isinstance(text, bytes) else textwrap.dedent(text).encode())
    with pytest.raises(ConfigError) as caught:
        TrainConfig.from_yaml(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(path))
    return message.removeprefix(str(path))


def test_a_recipe_as_people_write_it(recipe: Recipe, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(
        b"\xef\xbb\xbf# a byte-order mark and CRLF, as an editor may leave them\r\ncommon: &lr 1e-3\r\n".replace(
            b"common: &lr 1e-3\r\n", b""
        )
        + yaml.safe_dump(recipe({"optimizer.lr": ...})).replace("name: adamw", "name: adamw\n  lr: 1e-3").encode()
    )
    assert TrainConfig.from_yaml(path) == TrainConfig.from_dict(recipe())


@pytest.mark.parametrize(("text", "value"), [("1e-3", 1e-3), ("1E+2", 100.0), ("3e-04", 3e-4), ("1.5e-3", 1.5e-3)])
def test_numbers_with_an_exponent_are_numbers(recipe: Recipe, tmp_path: Path, text: str, value: float) -> None:
    """YAML 1.1 reads 1e-3 as text, which a field that also takes text would keep."""
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe({"model": {"architecture": {"eps": 0}, "tokenizer": "t"}})))
    path.write_text(path.read_text().replace("eps: 0", f"eps: {text}"))
    assert TrainConfig.from_yaml(path).model.architecture == {"eps": value}


def test_an_error_names_file_line_and_dotted_field(tmp_path: Path) -> None:
    text = """\
        model: {pretrained: smollm2}
        data:
          train:
            - path: a
            - path: b
              weight: -1
          seq_len: 64
        strategy: {name: sft}
        optimizer:
          name: adamw
          lr: 1e-3
        output_dir: o
        batch_size: 8
        max_steps: 5
        """
    assert from_text(tmp_path, text).startswith(":6: field 'data.train.1.weight': ")
    text = text.replace("-1", "1")
    assert from_text(tmp_path, text.replace("lr: 1e-3", "lr: 0")).startswith(":11: field 'optimizer.lr': ")
    assert from_text(tmp_path, text.replace("name: adamw", "name: sgd")).startswith(":10: field 'optimizer.name': ")
    assert from_text(tmp_path, text.replace("lr: 1e-3", "")).startswith(":9: field 'optimizer.lr' is required")
    assert from_text(tmp_path, text.replace("batch_size: 8", "")).startswith(": field 'batch_size' is required")
    assert from_text(tmp_path, text.replace("max_steps", "max_step")).startswith(":14: unknown field 'max_step'")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model:\n  a: [1\nb: 2\n", ":3: not valid YAML"),
        ("seed: 1\nseed: 2\n", ":2: not valid YAML: the key 'seed' is given twice"),
        ("data:\n  seq_len: 1\n  'seq_len': 2\n", ":3: not valid YAML: the key 'seq_len' is given twice"),
        ("a: 1\n\tb: 2\n", ":2: not valid YAML"),
        ("seed: 1\n---\nseed: 2\n", ":2: not valid YAML"),
        ("a: !!python/object:os.system {}\n", ":1: not valid YAML"),
        ("- model\n", ": a recipe is a mapping of fields (name: value), got list"),
        ("just text", ": a recipe is a mapping of fields (name: value), got str"),
        ("1: 2\n", ": the key 1 must be text"),
        ("model: {pretrained: m, null: 2}\n", ": the key 'null' must be text"),
        ("seed: 2024-13-45\n", ": not valid YAML: month must be in 1..12"),
        (b"seed: \xff\xfe\n", ": not a text file"),
        (b"seed: \x00\n", ": not a text file"),
        ("[" * 1000, ": not a recipe: nested too deeply"),
        ("a: &a [*a]\n", ": not a recipe: nested too deeply"),
        ("", ": field 'model' is required"),
    ],
)
def test_a_file_that_is_no_recipe(tmp_path: Path, text: str | bytes, message: str) -> None:
    assert from_text(tmp_path, text).startswith(message)


def test_a_file_that_cannot_be_read_or_written(recipe: Recipe, tmp_path: Path) -> None:
    missing = tmp_path / "no" / "recipe.yaml"
    with pytest.raises(ConfigError, match="cannot read the recipe: No such file"):
        TrainConfig.from_yaml(missing)
    with pytest.raises(ConfigError, match="cannot read the recipe: Is a directory"):
        TrainConfig.from_yaml(tmp_path)
    with pytest.raises(ConfigError, match="cannot write the recipe: No such file"):
        TrainConfig.from_dict(recipe()).to_yaml(missing)


def test_a_failed_write_keeps_the_old_recipe(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "recipe.yaml"
    TrainConfig.from_dict(recipe()).to_yaml(path)
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="No space left"):
        TrainConfig.from_dict(recipe({"seed": 7})).to_yaml(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["recipe.yaml"]


def test_the_recipe_of_the_readme_is_valid(tmp_path: Path) -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    text = readme.split("```yaml\n")[1].split("```")[0]
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    config = TrainConfig.from_yaml(path)
    assert config.optimizer.lr == 2e-4
    assert config.accumulation_steps(world_size=2) == 4
    assert config.lr_schedule.create(2000).factor(1600) == 1.0
    path.write_text(text.replace("lr: 2e-4", "lr: 2e-4\n  wieght_decay: 0.1"))
    with pytest.raises(ConfigError) as caught:
        TrainConfig.from_yaml(path)
    shown = next(line.strip() for line in readme.splitlines() if "did you mean" in line)
    assert str(caught.value) == f"{tmp_path}/{shown}"
