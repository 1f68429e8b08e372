"""The strategy of a recipe, with its reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from astrai_core.model.transformer import CausalLM
from astrai_train.config import DPOConfig, TrainConfig
from astrai_train.config.strategy import REFERENCE_FREE_LOSSES
from astrai_train.data.dataset import open_valid_sources
from astrai_train.models import fingerprint, starting_model
from astrai_train.precision import attention, autocast
from astrai_train.strategy import dpo, seq, sft  # noqa: F401  (registers the strategies)
from astrai_train.strategy.base import BaseStrategy, StrategyFactory
from astrai_train.strategy.preference_losses import create_preference_loss
from astrai_train.strategy.reference import AdapterOff, CachedLogprobs, FrozenCopy, Reference, complete_cache

CACHE = "reference_logprobs.safetensors"
"""File of the cached log-probabilities, in the run directory."""


def reference_kind(config: TrainConfig) -> Literal["none", "copy", "adapter_off", "cached"]:
    """Return where the reference's log-probabilities come from, ``auto`` resolved; ``none`` where none are needed."""
    strategy = config.strategy
    if not isinstance(strategy, DPOConfig) or strategy.loss in REFERENCE_FREE_LOSSES:
        return "none"
    if strategy.reference == "auto":
        return "copy" if config.lora is None else "adapter_off"
    return strategy.reference


def open_reference(
    config: TrainConfig,
    device: torch.device,
    run_dir: Path,
    pad_id: int,
    *,
    first: Callable[[Callable[[], None]], object] = lambda work: work(),
) -> Reference | None:
    """Build what a strategy compares with, from the model that the run started from; nothing of it is trained.

    A cache is read from the run directory and completed, before the model that is trained takes its memory. Its
    values hold for that model, precision and those tokens alone; others are computed anew.

    Parameters
    ----------
    pad_id
        Any id of the vocabulary.
    first
        Carries out on one rank what all ranks then read.

    Returns
    -------
    None where the strategy needs no reference, or it is the model itself with its adapter off.
    """
    kind, strategy = reference_kind(config), config.strategy
    if kind == "copy":
        return FrozenCopy(starting_model(config, device), strategy.loss_chunk_tokens)
    if kind != "cached":
        return None
    path, model = run_dir / CACHE, fingerprint(config)
    first(lambda: _complete(config, device, pad_id, path, model))
    return CachedLogprobs.load(path, model, device)


def create_strategy(config: TrainConfig, model: CausalLM, reference: Reference | None) -> BaseStrategy:
    """Build the strategy of a recipe.

    Parameters
    ----------
    model
        The model that is trained, with its adapters.
    reference
        As :func:`open_reference` gave it.
    """
    strategy = config.strategy
    if isinstance(strategy, DPOConfig):
        if reference_kind(config) == "adapter_off":
            reference = AdapterOff(model, strategy.loss_chunk_tokens)
        loss = create_preference_loss(strategy)
        return StrategyFactory.create(
            strategy.name, model, loss=loss, reference=reference, loss_chunk_tokens=strategy.loss_chunk_tokens
        )
    options = {name: value for name, value in vars(strategy).items() if name != "name"}
    return StrategyFactory.create(strategy.name, model, **options)


def _complete(config: TrainConfig, device: torch.device, pad_id: int, path: Path, model: str) -> None:
    """Score the rows of the training and validation data that the file does not know yet."""
    strategy = config.strategy
    assert isinstance(strategy, DPOConfig), "only pairs have a reference"
    everything = dataclasses.replace(config.data, valid=(*config.data.train, *config.data.valid))
    sources = [
        source
        for _, source in open_valid_sources(
            everything,
            pairs=True,
            pad_id=pad_id,
            micro_batch_size=config.micro_batch_size,
            max_prompt_len=strategy.max_prompt_len,
        )
    ]
    cache = CachedLogprobs.load(path, model, device)
    if all(cache.has(batch) for source in sources for batch in source):
        return
    reference = starting_model(config, device)
    with autocast(config, device), attention(config, device):
        for source in sources:
            cache = complete_cache(cache, source, reference, strategy.loss_chunk_tokens)
    cache.save(path, model)
