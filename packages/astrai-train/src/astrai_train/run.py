"""From a recipe to a finished run: ``train(TrainConfig.from_yaml("recipe.yaml"))``."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from astrai_core.auto import AutoModel, AutoTokenizer, load_model, resolve_device
from astrai_core.checkpoint.hf_adapter import checkpoint_tensors, load_tensors
from astrai_core.checkpoint.source import open_source
from astrai_core.config.model import ModelConfig
from astrai_core.errors import ConfigError
from astrai_core.model.transformer import CausalLM
from astrai_core.tokenizer.tokenizer import Tokenizer
from astrai_train.callbacks.base import Callback, CallbackFactory
from astrai_train.checkpoint import CheckpointStore
from astrai_train.config import TrainConfig
from astrai_train.context import TrainContext, TrainResult
from astrai_train.data.dataset import open_train_source, open_valid_sources
from astrai_train.data.store import TokenStore
from astrai_train.metrics.grad_snr import GradSNRTracker
from astrai_train.optim.groups import OptimizerFactory
from astrai_train.rng import seed_everything
from astrai_train.strategy import seq  # noqa: F401  (registers the strategy)
from astrai_train.strategy.base import StrategyFactory
from astrai_train.trainer import Trainer

RECIPE = "recipe.yaml"
CHECKPOINTS = "checkpoints"

logger = logging.getLogger(__name__)


def train(
    config: TrainConfig,
    *,
    resume: bool = False,
    device: str | None = None,
    callbacks: Sequence[Callback] = (),
) -> TrainResult:
    """Carry out a recipe in this process.

    The run directory gets recipe.yaml (every field spelt out), metrics.jsonl and checkpoints.

    Parameters
    ----------
    resume
        Go on from the newest whole checkpoint of the run directory; from the start if there is none.
    device
        By default CUDA if there is any, else the CPU.
    callbacks
        Further watchers, called after the run's own.

    Raises
    ------
    ConfigError
        If the recipe asks for what cannot run, or the run directory holds a run already and `resume` is False.
    DataError, CheckpointError, TrainingError
        If the data, a checkpoint or a step fails.
    """
    refuse_what_cannot_run(config)
    return build(config, resume=resume, device=device, callbacks=callbacks).train()


def build(
    config: TrainConfig,
    *,
    resume: bool = False,
    device: str | None = None,
    callbacks: Sequence[Callback] = (),
) -> Trainer:
    """Do all that comes before the first step of :func:`train`; the data is opened before the model is loaded."""
    run_dir = Path(config.output_dir)
    found = _prepare(run_dir, config, resume)
    place = resolve_device(device)
    seed_everything(config.seed)
    if config.precision.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS refuses deterministic products
    torch.use_deterministic_algorithms(config.precision.deterministic)
    tokenizer = _tokenizer(config)
    for member in (*config.data.train, *config.data.valid):
        TokenStore(member.path).check_tokenizer(tokenizer)
    pad_id = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    source = open_train_source(
        config.data,
        pairs=False,
        pad_id=pad_id,
        batch_size=config.batch_size,
        micro_batch_size=config.micro_batch_size,
    )
    valid = open_valid_sources(config.data, pairs=False, pad_id=pad_id, micro_batch_size=config.micro_batch_size)
    total_steps = config.max_steps or max(1, math.ceil((config.epochs or 0) * source.n_rows / config.batch_size))
    model = _model(config, place, None if found is None else found[1])
    _check_sizes(config, model.config, tokenizer)
    options = {name: value for name, value in vars(config.strategy).items() if name != "name"}
    strategy = StrategyFactory.create(config.strategy.name, model, **options)
    options = {name: value for name, value in vars(config.optimizer).items() if name != "name"}
    optimizer = OptimizerFactory.create(config.optimizer.name, model, **options)
    context = TrainContext(
        config=config,
        run_dir=run_dir,
        model=model,
        strategy=strategy,
        optimizer=optimizer,
        schedule=config.lr_schedule.create(total_steps),
        source=source,
        checkpoints=CheckpointStore(
            run_dir / CHECKPOINTS,
            keep=config.checkpoint.keep,
            asynchronous=config.checkpoint.asynchronous,
            tokenizer=tokenizer,
        ),
        total_steps=total_steps,
        accumulation_steps=config.accumulation_steps(world_size=1),
        valid=valid,
        grad_snr=_grad_snr(config, optimizer),
    )
    watchers = [CallbackFactory.create("metrics_file"), *callbacks]
    if config.log.progress and sys.stderr.isatty():
        watchers.insert(1, CallbackFactory.create("progress"))
    trainer = Trainer(context, watchers)
    if found is not None:
        trainer.restore(found[1])
    return trainer


def refuse_what_cannot_run(config: TrainConfig) -> None:
    """Refuse by name what a recipe may say and this version does not carry out.

    Raises
    ------
    ConfigError
        Names the first such field.
    """
    refused = (
        ("strategy.name", config.strategy.name, config.strategy.name in StrategyFactory.names()),
        ("parallel.mode", config.parallel.mode, config.parallel.mode == "none"),
        ("precision.compile", config.precision.compile, not config.precision.compile),
        (
            "precision.activation_checkpointing",
            config.precision.activation_checkpointing,
            config.precision.activation_checkpointing == "none",
        ),
        ("lora", "rank ...", config.lora is None),
        ("log.trackers", config.log.trackers, not config.log.trackers),
    )
    for field, value, runs in refused:
        if not runs:
            raise ConfigError(f"field {field!r}: this version does not train with {value!r} yet; change or remove it")


def _prepare(run_dir: Path, config: TrainConfig, resume: bool) -> tuple[int, Path] | None:
    """Make the run directory; return the checkpoint to resume from."""
    store = CheckpointStore(run_dir / CHECKPOINTS, keep=None, asynchronous=False)
    if not resume and (run_dir / RECIPE).exists():
        raise ConfigError(f"{run_dir}: holds a run already; resume it (--resume) or choose another output_dir")
    run_dir.mkdir(parents=True, exist_ok=True)
    store.clean()
    found = store.newest() if resume else None
    if resume and found is None:
        logger.warning("%s: no whole checkpoint to resume from; training starts at step 1", run_dir)
    config.to_yaml(run_dir / RECIPE)
    return found


def _check_sizes(config: TrainConfig, model: ModelConfig, tokenizer: Tokenizer) -> None:
    if config.data.seq_len > model.max_position_embeddings:
        raise ConfigError(
            f"field 'data.seq_len': {config.data.seq_len} is more than the model's context of "
            f"{model.max_position_embeddings} tokens; lower it"
        )
    if tokenizer.vocab_size > model.vocab_size:
        raise ConfigError(
            f"field 'model.tokenizer': it has {tokenizer.vocab_size} ids, the model's vocabulary {model.vocab_size}; "
            "choose the model's own tokenizer, or a larger vocab_size"
        )


def _grad_snr(config: TrainConfig, optimizer: Optimizer) -> GradSNRTracker | None:
    if "grad_snr" not in config.log.metrics:
        return None
    named = [pair for g in optimizer.param_groups for pair in zip(g["param_names"], g["params"], strict=True)]
    return GradSNRTracker(named, config.log.grad_snr_beta)


def _tokenizer(config: TrainConfig) -> Tokenizer:
    name = config.model.tokenizer or config.model.pretrained
    assert name is not None, "checked by ModelSource"
    return AutoTokenizer.from_pretrained(name)


def _model(config: TrainConfig, device: torch.device, checkpoint: Path | None) -> CausalLM:
    """Build the model with the weights of the checkpoint, of the pretrained model, or fresh ones."""
    dtype = torch.bfloat16 if config.precision.dtype == "bf16" else torch.float32
    origin = checkpoint or config.model.pretrained
    if origin is None:
        generator = torch.Generator(device).manual_seed(config.seed)
        return AutoModel.from_config(_architecture(config), dtype, device, generator)
    model = load_model(open_source(origin), dtype, device)
    return _half_split(model, origin) if model.config.rope_interleave else model


def _architecture(config: TrainConfig) -> ModelConfig:
    given: Any = config.model.architecture
    if isinstance(given, dict):
        return ModelConfig.from_dict(given)
    try:
        return ModelConfig.from_dict(json.loads(Path(given).read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"{given}: cannot read the architecture: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{given}: {error}") from None


def _half_split(model: CausalLM, origin: str | Path) -> CausalLM:
    """Return the same model with the rotary layout of the files, so that a checkpoint's rows are the optimizer's."""
    config = dataclasses.replace(model.config, rope_interleave=False)
    twin = AutoModel.from_config(config, model.dtype, model.device)
    load_tensors(twin, checkpoint_tensors(model), origin)
    return twin
