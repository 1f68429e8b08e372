"""From a recipe to a finished run: ``train(TrainConfig.from_yaml("recipe.yaml"))``."""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.optim import Optimizer

from astrai_core.auto import AutoTokenizer
from astrai_core.config.model import ModelConfig
from astrai_core.errors import ConfigError
from astrai_core.tokenizer.tokenizer import Tokenizer
from astrai_train.callbacks.base import Callback, CallbackFactory
from astrai_train.checkpoint import CheckpointStore
from astrai_train.config import DPOConfig, TrainConfig
from astrai_train.context import TrainContext, TrainResult
from astrai_train.data.dataset import open_train_source, open_valid_sources
from astrai_train.data.store import TokenStore
from astrai_train.ema import WeightAverage
from astrai_train.metrics.grad_snr import GradSNRTracker
from astrai_train.metrics.memory_estimate import estimate_memory
from astrai_train.metrics.noise_scale import NoiseScaleTracker
from astrai_train.models import blank_model, trained_model
from astrai_train.optim.groups import OptimizerFactory
from astrai_train.parallel.mode import create_mode
from astrai_train.parallel.world import World
from astrai_train.precision import set_up_kernels
from astrai_train.report.page import RECIPE, STARTS
from astrai_train.rng import seed_everything
from astrai_train.strategy.build import create_strategy, open_reference
from astrai_train.trainer import Trainer

CHECKPOINTS = "checkpoints"

logger = logging.getLogger(__name__)


def train(
    config: TrainConfig,
    *,
    resume: bool = False,
    device: str | None = None,
    callbacks: Sequence[Callback] = (),
) -> TrainResult:
    """Carry out a recipe in this process, as one of the ranks that torchrun or `launch` started if there are several.

    The run directory gets recipe.yaml (every field spelt out), metrics.jsonl, report.html and checkpoints.

    Parameters
    ----------
    resume
        Go on from the newest whole checkpoint of the run directory; from the start if there is none.
    device
        By default CUDA if there is any (each rank its own GPU), else the CPU.
    callbacks
        Further watchers, called after the run's own, on rank 0.

    Raises
    ------
    ConfigError
        If the recipe asks for what cannot run, or the run directory holds a run already and `resume` is False.
    DataError, CheckpointError, TrainingError
        If the data, a checkpoint or a step fails.
    """
    return build(config, resume=resume, device=device, callbacks=callbacks).train()


def build(
    config: TrainConfig,
    *,
    resume: bool = False,
    device: str | None = None,
    callbacks: Sequence[Callback] = (),
    tell: Callable[[str], None] = logger.info,
) -> Trainer:
    """Do all that comes before the first step of :func:`train`; the data is opened before the model is loaded.

    Parameters
    ----------
    tell
        Given a line about the rows of each store and one about the memory that the run will need, before the model is
        loaded; on rank 0.
    """
    run_dir = Path(config.output_dir)
    trackers = [CallbackFactory.create(name) for name in config.log.trackers]
    world = World.join(config.parallel.mode, device)
    accumulation_steps = config.accumulation_steps(world.size)
    found = world.first(lambda: _prepare(run_dir, config, resume))
    place = world.device
    seed_everything(config.seed)
    if config.precision.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS refuses deterministic products
    torch.use_deterministic_algorithms(config.precision.deterministic)
    tokenizer = _tokenizer(config)
    for member in (*config.data.train, *config.data.valid):
        TokenStore(member.path).check_tokenizer(tokenizer)
    pad_id = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    pairs = isinstance(config.strategy, DPOConfig)
    max_prompt_len = config.strategy.max_prompt_len if isinstance(config.strategy, DPOConfig) else None
    source = open_train_source(
        config.data,
        pairs=pairs,
        pad_id=pad_id,
        batch_size=config.batch_size,
        micro_batch_size=config.micro_batch_size,
        rank=world.rank,
        world_size=world.size,
        max_prompt_len=max_prompt_len,
    )
    valid = open_valid_sources(
        config.data,
        pairs=pairs,
        pad_id=pad_id,
        micro_batch_size=config.micro_batch_size,
        rank=world.rank,
        world_size=world.size,
        max_prompt_len=max_prompt_len,
    )
    total_steps = config.max_steps or max(1, math.ceil((config.epochs or 0) * source.n_rows / config.batch_size))
    memory = estimate_memory(config, blank_model(config), ranks=world.size)
    if world.is_first:
        for line in (*source.lines(), memory.line(place)):
            tell(line)
        if not memory.fits(place):
            logger.warning(
                "the run may not fit the GPU; lower micro_batch_size, or set precision.activation_checkpointing"
            )
    reference = open_reference(config, place, run_dir, pad_id, first=world.first)
    model = trained_model(config, place, None if found is None else found[1])
    _check_sizes(config, model.config, tokenizer)
    strategy = create_strategy(config, model, reference)
    set_up_kernels(config, model, strategy)
    parallel = create_mode(config, world)
    parallel.prepare(model)
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
            keep_every=config.checkpoint.keep_every,
            asynchronous=config.checkpoint.asynchronous,
            world=world,
            tokenizer=tokenizer,
            base_model=None if config.lora is None else config.model.pretrained,
        ),
        total_steps=total_steps,
        accumulation_steps=accumulation_steps,
        parallel=parallel,
        valid=valid,
        grad_snr=_grad_snr(config, optimizer),
        noise_scale=_noise_scale(config, optimizer),
        ema=None if config.ema_decay is None else WeightAverage.of(optimizer, config.ema_decay),
    )
    watchers = [CallbackFactory.create("metrics_file"), CallbackFactory.create("report"), *trackers, *callbacks]
    if config.log.progress and sys.stderr.isatty():
        watchers.insert(1, CallbackFactory.create("progress"))
    trainer = Trainer(context, watchers)
    if world.rank:  # until here the ranks drew alike; from here on dropout must differ
        seed_everything(config.seed + world.rank)
    if found is not None:
        trainer.restore(found[1])
    return trainer


def _prepare(run_dir: Path, config: TrainConfig, resume: bool) -> tuple[int, Path] | None:
    """Make the run directory; return the checkpoint to resume from."""
    store = CheckpointStore(run_dir / CHECKPOINTS, keep=None, asynchronous=False)
    if not resume and any((run_dir / name).exists() for name in (STARTS, CHECKPOINTS)):
        raise ConfigError(f"{run_dir}: holds a run already; resume it (--resume) or choose another output_dir")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        store.clean()
    except OSError as error:
        raise ConfigError(
            f"field 'output_dir': {error.filename or run_dir}: {error.strerror}; choose a directory you may write to"
        ) from None
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


def _noise_scale(config: TrainConfig, optimizer: Optimizer) -> NoiseScaleTracker | None:
    if "noise_scale" not in config.log.metrics:
        return None
    return NoiseScaleTracker([p for g in optimizer.param_groups for p in g["params"]], config.log.noise_scale_beta)


def _tokenizer(config: TrainConfig) -> Tokenizer:
    name = config.model.tokenizer or config.model.pretrained
    assert name is not None, "checked by ModelSource"
    return AutoTokenizer.from_pretrained(name)
