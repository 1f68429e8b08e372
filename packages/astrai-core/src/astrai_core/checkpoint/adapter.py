"""Adapter files in PEFT's format: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from astrai_core.checkpoint.atomic import atomic_directory
from astrai_core.checkpoint.rotary_layout import halves_to_interleaved, interleaved_to_halves, is_rotated
from astrai_core.checkpoint.weights import write_file
from astrai_core.config.lora import ATTENTION_AND_MLP, LoRAConfig
from astrai_core.config.model import ModelConfig
from astrai_core.errors import CheckpointError, ConfigError
from astrai_core.linear_ops import LORA_RANK
from astrai_core.model.adapter_slots import AdapterSlots
from astrai_core.model.lora import adapters, apply_lora, projections, targeted
from astrai_core.model.transformer import CausalLM
from astrai_core.tokenizer.tokenizer import Tokenizer

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_FACTORS = ("lora_A", "lora_B")


@dataclass(frozen=True)
class AdapterFiles:
    """An adapter as it was read."""

    path: Path
    config: LoRAConfig
    base_model: str | None
    """The model that it belongs to, if the files say so."""
    factors: Mapping[str, tuple[Tensor, Tensor]]
    """Dotted name of a projection -> A ``[rank, in]`` and B ``[out, rank]``."""


def is_adapter(directory: Path) -> bool:
    """Whether a directory holds an adapter and no model of its own."""
    return (directory / ADAPTER_CONFIG).is_file() and not (directory / "config.json").is_file()


def adapter_tensors(model: CausalLM) -> Iterator[tuple[str, Tensor]]:
    """Yield (PEFT's name, tensor) of a model's adapters, in the half-split rotary layout of Hugging Face files."""
    for name, factors in adapters(model):
        for factor in _FACTORS:
            tensor = getattr(factors, factor).detach()
            if factor == "lora_B" and is_rotated(model.config, name):
                tensor = interleaved_to_halves(tensor, model.config.head_dim, model.config.rotary_dim)
            yield f"{_PREFIX}{name}.{factor}.weight", tensor


def write_adapter(
    directory: Path,
    config: LoRAConfig,
    tensors: Iterable[tuple[str, Tensor]],
    base_model: str,
    *,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Write the files of :func:`save_adapter` into an existing directory.

    Parameters
    ----------
    config, tensors
        The model's ``lora``, and what :func:`adapter_tensors` gives.
    """
    text = json.dumps(config.to_peft(base_model), indent=2, ensure_ascii=False)
    (directory / ADAPTER_CONFIG).write_text(text + "\n", encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
    write_file(directory / ADAPTER_WEIGHTS, dict(tensors))


def save_adapter(
    model: CausalLM,
    directory: str | Path,
    base_model: str,
    *,
    tokenizer: Tokenizer | None = None,
    overwrite: bool = False,
) -> None:
    """Write a model's adapters as a directory that PEFT loads; it appears whole or not at all.

    Parameters
    ----------
    base_model
        Where the model itself came from, as :func:`astrai_core.open_source` takes it.

    Raises
    ------
    ConfigError
        If the model has no adapters.
    CheckpointError
        If the directory holds files and `overwrite` is False, or the disk is full.
    """
    if model.lora is None:
        raise ConfigError("the model has no adapters to save; give it some with apply_lora")
    with atomic_directory(directory, overwrite=overwrite) as scratch:
        write_adapter(scratch, model.lora, adapter_tensors(model), base_model, tokenizer=tokenizer)


def read_adapter(directory: str | Path) -> AdapterFiles:
    """Read a directory of PEFT's.

    Raises
    ------
    CheckpointError
        If a file is missing or damaged, or a tensor is not a factor of an adapter.
    ConfigError
        If the adapter has a feature that is not supported.
    """
    directory = Path(directory)
    config_path, weights_path = directory / ADAPTER_CONFIG, directory / ADAPTER_WEIGHTS
    data = _read_json(config_path)
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in _read_tensors(weights_path):
        module, _, factor = name.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".")
        if factor not in _FACTORS or not name.startswith(_PREFIX) or tensor.dim() != 2:
            raise CheckpointError(
                f"{weights_path}: tensor {name!r} is no factor of a linear adapter; merge this adapter with peft first"
            )
        found.setdefault(module, {})[factor] = tensor
    try:
        config = LoRAConfig.from_peft(data, tuple(found))
    except ConfigError as error:
        raise ConfigError(f"{config_path}: {error}") from None
    factors = {}
    for module, pair in found.items():
        if len(pair) < len(_FACTORS) or {pair["lora_A"].shape[0], pair["lora_B"].shape[1]} != {config.rank}:
            raise CheckpointError(
                f"{weights_path}: {module!r} has no two factors of rank {config.rank}; save the adapter again"
            )
        factors[module] = pair["lora_A"], pair["lora_B"]
    base = data.get("base_model_name_or_path")
    return AdapterFiles(directory, config, base if isinstance(base, str) and base else None, factors)


@torch.no_grad()
def load_adapter(model: CausalLM, directory: str | Path) -> None:
    """Give a model the adapters of a directory of PEFT's and freeze everything else.

    Raises
    ------
    CheckpointError, ConfigError
        As :func:`read_adapter`; if the adapter does not fit the model.
    """
    files = read_adapter(directory)
    apply_lora(model, files.config)
    load_factors(model, files)


@torch.no_grad()
def load_factors(model: CausalLM, files: AdapterFiles) -> None:
    """Copy factors into the adapters that a model has already.

    Raises
    ------
    CheckpointError
        If the files hold other adapters or other shapes.
    """
    own = dict(adapters(model))
    if odd := sorted(own.keys() ^ files.factors.keys()):
        where = "is missing" if odd[0] in own else "is not a target"
        raise CheckpointError(f"{files.path / ADAPTER_WEIGHTS}: the adapter of {odd[0]!r} {where}; save it again")
    for name, pair in files.factors.items():
        for factor, tensor in zip(_FACTORS, pair, strict=True):
            target = getattr(own[name], factor)
            if target.shape != tensor.shape:
                raise CheckpointError(
                    f"{files.path / ADAPTER_WEIGHTS}: {factor} of {name!r} has shape {list(tensor.shape)}, the model "
                    f"asks for {list(target.shape)}; give the model that the adapter was trained on"
                )
            target.copy_(_to_layout(tensor, model.config, name) if factor == "lora_B" else tensor)


def fitting_factors(slots: AdapterSlots, files: AdapterFiles) -> dict[str, tuple[Tensor, Tensor]]:
    """Return what :meth:`AdapterSlots.write` takes of an adapter, after checking that it fits.

    Raises
    ------
    ConfigError
        If the adapter's rank is too large, or a target is no projection of the model.
    CheckpointError
        If the adapter is for another model, or for projections without room.
    """
    config_path, weights_path = files.path / ADAPTER_CONFIG, files.path / ADAPTER_WEIGHTS
    config, model = files.config, slots.model
    if config.rank > LORA_RANK:
        raise ConfigError(
            f"{config_path}: field 'r': {config.rank} is more than {LORA_RANK}, the largest that can be served beside its "
            "base; merge it into the model"
        )
    if config.rank > slots.rank:
        raise ConfigError(
            f"{config_path}: field 'r': {config.rank} is more than max_lora_rank {slots.rank}; raise that"
        )
    try:
        wanted = targeted(model, config)
    except ConfigError as error:
        raise ConfigError(f"{config_path}: {error}") from None
    known = dict(projections(model))
    for name in sorted(files.factors.keys() | wanted.keys()):
        if name not in known:
            raise CheckpointError(f"{weights_path}: the model has no {name!r}; give the model that it was trained on")
        if name not in slots.shapes:
            served = ", ".join(ATTENTION_AND_MLP)
            raise CheckpointError(
                f"{weights_path}: an adapter of {name!r} cannot be served beside its base, those of {served} can; merge "
                "it into the model"
            )
        if name not in files.factors:
            raise CheckpointError(f"{weights_path}: the adapter of {name!r} is missing; save it again")
        if name not in wanted:
            raise CheckpointError(f"{weights_path}: the adapter of {name!r} is not a target; save it again")
        a, b = files.factors[name]
        if (a.shape[1], b.shape[0]) != slots.shapes[name]:
            raise CheckpointError(
                f"{weights_path}: the adapter of {name!r} is for a weight of {[b.shape[0], a.shape[1]]}, the model's is "
                f"{list(slots.shapes[name][::-1])}; give the model that it was trained on"
            )
    return {name: (a, _to_layout(b, model.config, name)) for name, (a, b) in files.factors.items()}


@torch.no_grad()
def merged_tensors(
    tensors: Iterable[tuple[str, Tensor]], config: ModelConfig, files: AdapterFiles
) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's tensors with an adapter added in float32; those that it changes stay float32, to be rounded once.

    Parameters
    ----------
    tensors
        (Hugging Face name, tensor) of the base model.
    config
        Of the base model.

    Raises
    ------
    CheckpointError
        If the adapter does not fit the model.
    """
    left = dict(files.factors)
    for name, tensor in tensors:
        module = name.removesuffix(".weight")
        if module not in left:
            yield name, tensor
            continue
        a, b = left.pop(module)
        if tensor.shape != (b.shape[0], a.shape[1]):
            raise CheckpointError(
                f"{files.path / ADAPTER_WEIGHTS}: the adapter of {module!r} is for a weight of "
                f"{[b.shape[0], a.shape[1]]}, the model's is {list(tensor.shape)}; give the model it was trained on"
            )
        yield name, tensor.float() + files.config.scale * (_to_layout(b, config, module).float() @ a.float())
    if left:
        raise CheckpointError(
            f"{files.path / ADAPTER_WEIGHTS}: the base model has no {min(left)!r}; give the model it was trained on"
        )


def _to_layout(b: Tensor, config: ModelConfig, module: str) -> Tensor:
    return halves_to_interleaved(b, config.head_dim, config.rotary_dim) if is_rotated(config, module) else b


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{path}: no such file; give the directory of a PEFT adapter") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}); save the adapter again") from None
    except (OSError, ValueError) as error:  # no permission; a path that cannot be one
        raise CheckpointError(
            f"{str(path)!r}: cannot be read ({error}); give the directory of a PEFT adapter"
        ) from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, got {type(data).__name__}; save the adapter again")
    return data


def _read_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; save the adapter as safetensors")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118  (safe_open is no mapping)
                yield name, file.get_tensor(name)
    except SafetensorError as error:
        raise CheckpointError(f"{path}: truncated or damaged ({error}); save the adapter again") from None
