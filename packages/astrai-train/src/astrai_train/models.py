"""The model of a recipe: as it is before the first step, and as a checkpoint left it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from astrai_core.auto import AutoModel, load_model
from astrai_core.checkpoint.adapter import load_factors, read_adapter
from astrai_core.checkpoint.hf_adapter import checkpoint_tensors, load_tensors
from astrai_core.checkpoint.source import open_source
from astrai_core.config.model import ModelConfig
from astrai_core.errors import ConfigError
from astrai_core.model.lora import apply_lora
from astrai_core.model.transformer import CausalLM
from astrai_train.config import TrainConfig


def starting_model(config: TrainConfig, device: torch.device) -> CausalLM:
    """Build the model that a run starts from, without adapters: pretrained weights, or fresh ones of the recipe's seed.

    Raises
    ------
    ConfigError, CheckpointError
        If there is no such model, or its files do not load.
    """
    if config.model.pretrained is None:
        generator = torch.Generator(device).manual_seed(config.seed)
        return AutoModel.from_config(_architecture(config), _dtype(config), device, generator)
    return _load(config.model.pretrained, config, device)


def trained_model(config: TrainConfig, device: torch.device, checkpoint: Path | None) -> CausalLM:
    """Build the model that is trained, with its adapters if the recipe has any, as `checkpoint` left it.

    Raises
    ------
    ConfigError, CheckpointError
        As `starting_model`; if the checkpoint is of another architecture, base model or other adapters.
    """
    if config.lora is None:
        return starting_model(config, device) if checkpoint is None else _resumed(config, device, checkpoint)
    model = starting_model(config, device)
    _adapt(model, config, torch.Generator(device).manual_seed(config.seed))
    if checkpoint is not None:
        files = read_adapter(checkpoint)
        for name, saved, own in (
            ("model.pretrained", files.base_model, config.model.pretrained),
            ("lora", files.config, config.lora),
        ):
            if saved != own:
                raise ConfigError(f"cannot resume: {name} is {own}, the checkpoint's {saved}; resume with that")
        load_factors(model, files)
    return model


def blank_model(config: TrainConfig) -> CausalLM:
    """Build the model that is trained, with its adapters, on the meta device: shapes without memory.

    Raises
    ------
    ConfigError, CheckpointError
        As `trained_model`.
    """
    source = config.model.pretrained
    with torch.device("meta"):
        model = CausalLM(_architecture(config) if source is None else open_source(source).config())
    model.to(_dtype(config))
    _adapt(model, config, None)
    return model


def _adapt(model: CausalLM, config: TrainConfig, generator: torch.Generator | None) -> None:
    if config.lora is None:
        return
    try:
        apply_lora(model, config.lora, generator)
    except ConfigError as error:
        raise ConfigError(f"lora: {error}") from None


def fingerprint(config: TrainConfig) -> str:
    """Return a digest of the weights and numbers that a run starts from; pretrained files are read once."""
    digest = hashlib.sha256(f"{config.precision.dtype}\n".encode())
    if config.model.pretrained is None:
        plain = {"architecture": _architecture(config).to_dict(), "seed": config.seed}
        digest.update(json.dumps(plain, sort_keys=True).encode())
        return digest.hexdigest()
    source = open_source(config.model.pretrained)
    digest.update(json.dumps(source.config().to_dict(), sort_keys=True).encode())
    for name, tensor in source.tensors():
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _dtype(config: TrainConfig) -> torch.dtype:
    return torch.bfloat16 if config.precision.dtype == "bf16" else torch.float32


def _load(origin: str | Path, config: TrainConfig, device: torch.device) -> CausalLM:
    model = load_model(open_source(origin), _dtype(config), device)
    return _half_split(model, origin) if model.config.rope_interleave else model


def _resumed(config: TrainConfig, device: torch.device, checkpoint: Path) -> CausalLM:
    model = _load(checkpoint, config, device)
    if config.model.pretrained is None:
        asked, saved = (dataclasses.replace(of, dtype=None) for of in (_architecture(config), model.config))
        for field in dataclasses.fields(ModelConfig):
            wanted, found = getattr(asked, field.name), getattr(saved, field.name)
            if wanted != found:
                raise ConfigError(
                    f"cannot resume: field 'model.architecture': {field.name} is {wanted}, the checkpoint's {found}; "
                    "resume with that"
                )
    return model


def _architecture(config: TrainConfig) -> ModelConfig:
    """Read the recipe's architecture, with the rotary layout of the files: fresh rows are in no order yet."""
    given: Any = config.model.architecture
    try:
        data = given if isinstance(given, dict) else json.loads(Path(given).read_text(encoding="utf-8"))
        return dataclasses.replace(ModelConfig.from_dict(data), rope_interleave=False)
    except ConfigError as error:
        raise ConfigError(str(error) if isinstance(given, dict) else f"{given}: {error}") from None
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
