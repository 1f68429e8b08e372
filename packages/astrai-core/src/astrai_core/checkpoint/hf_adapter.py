"""Between the model's fused parameters and the separate names of a Hugging Face checkpoint."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from astrai_core.checkpoint.atomic import atomic_directory
from astrai_core.checkpoint.rotary_layout import interleaved_to_halves, is_rotated
from astrai_core.checkpoint.weights import DEFAULT_SHARD_BYTES, write_shards
from astrai_core.config.model import DType, ModelConfig
from astrai_core.errors import CheckpointError
from astrai_core.model.layers import FusedLinear, Linear
from astrai_core.model.lora import LoRA, LowRankFactors
from astrai_core.model.moe import ExpertLinear
from astrai_core.model.transformer import CausalLM
from astrai_core.tokenizer.tokenizer import Tokenizer

GENERATION_CONFIG = "generation_config.json"
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
"""Buffers that old checkpoints carry and that follow from the config."""


@dataclass(frozen=True)
class Slot:
    """Where a tensor of the checkpoint lives in the model: a parameter or one expert's of a stack, or a range of rows."""

    parameter: str
    rows: tuple[int, int] | None = None
    expert: int | None = None

    def view(self, parameters: dict[str, torch.nn.Parameter]) -> Tensor:
        """Return the memory the tensor occupies."""
        tensor = parameters[self.parameter].data
        if self.expert is not None:
            tensor = tensor[self.expert]
        return tensor if self.rows is None else tensor[self.rows[0] : self.rows[1]]


def layout(model: CausalLM) -> dict[str, Slot]:
    """Return checkpoint name -> place in the model, tied output projection and adapters left out."""
    slots: dict[str, Slot] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, LowRankFactors):
            continue
        parent = prefix.rpartition(".")[0]
        for name, _ in module.named_parameters(recurse=False):
            full = f"{prefix}.{name}"
            if isinstance(module, FusedLinear):
                for part, rows in module.row_ranges().items():
                    slots[f"{parent}.{part}.{name}"] = Slot(full, rows)
            elif isinstance(module, ExpertLinear):
                for expert in range(module.weight.shape[0]):
                    for part, rows in module.row_ranges().items():
                        slots[f"{parent}.{expert}.{part}.{name}"] = Slot(full, rows, expert)
            else:
                slots[full] = Slot(full)
    if model.config.tie_word_embeddings:
        del slots["lm_head.weight"]
    return slots


@torch.no_grad()
def load_tensors(model: CausalLM, tensors: Iterable[tuple[str, Tensor]], source: str | Path) -> None:
    """Copy checkpoint tensors into the model's memory, one at a time, converting dtype on the way.

    Parameters
    ----------
    tensors
        (checkpoint name, tensor), in any order.
    source
        Where they come from, for messages.

    Raises
    ------
    CheckpointError
        If a tensor is missing, unknown, of another shape or not floating point.
    """
    slots = layout(model)
    parameters = dict(model.named_parameters())
    left = dict(slots)
    for name, tensor in tensors:
        slot = slots.get(name)
        if slot is None:
            if name.endswith(IGNORED_SUFFIXES) or (name == "lm_head.weight" and model.config.tie_word_embeddings):
                continue
            raise CheckpointError(
                f"{source}: unknown tensor {name!r} for model_type {model.config.model_type!r}; "
                "check model_type, biases and layer count in config.json"
            )
        target = slot.view(parameters)
        if tensor.shape != target.shape:
            raise CheckpointError(
                f"{source}: tensor {name!r} has shape {tuple(tensor.shape)}, config.json asks for {tuple(target.shape)}"
            )
        if not tensor.is_floating_point():
            raise CheckpointError(f"{source}: tensor {name!r} is {tensor.dtype}; only floating-point weights load")
        target.copy_(tensor)
        left.pop(name, None)
    if left:
        names = ", ".join(sorted(left)[:3]) + (", ..." if len(left) > 3 else "")
        raise CheckpointError(f"{source}: {len(left)} of {len(slots)} tensors are missing ({names}); download it again")


def checkpoint_tensors(model: CausalLM) -> Iterator[tuple[str, Tensor]]:
    """Yield (checkpoint name, tensor) in model order: what the model computes with, adapters added and rounded once.

    Fused weights are views of their rows.
    """
    parameters = dict(model.named_parameters())
    config = model.config
    adapted = {f"{name}.weight": module for name, module in model.named_modules() if _has_adapter(module)}
    for name, slot in layout(model).items():
        tensor = slot.view(parameters)
        if (linear := adapted.get(slot.parameter)) is not None:
            tensor = _merged_rows(linear, slot)
        if is_rotated(config, name.rpartition(".")[0]):
            tensor = interleaved_to_halves(tensor, config.head_dim, config.rotary_dim)
        yield name, tensor


def _has_adapter(module: torch.nn.Module) -> bool:
    return isinstance(module, Linear) and isinstance(module.adapter, LoRA) and module.adapter.base_weight is None


def _merged_rows(linear: torch.nn.Module, slot: Slot) -> Tensor:
    assert isinstance(linear, Linear) and isinstance(linear.adapter, LoRA), "chosen for it"
    whole = linear.adapter.merged(linear.weight).to(linear.weight.dtype)
    return whole if slot.rows is None else whole[slot.rows[0] : slot.rows[1]]


def save_pretrained(
    model: CausalLM,
    directory: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    generation_config: dict[str, Any] | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
) -> None:
    """Write a Hugging Face directory that transformers loads with equal logits; it appears whole or not at all.

    Interleaved rotary weights are reordered to the half-split layout that transformers assumes for these families.

    Raises
    ------
    CheckpointError
        If the directory holds files and `overwrite` is False, or the disk is full.
    ConfigError
        If the architecture has no expression as its ``model_type``.
    """
    with atomic_directory(directory, overwrite=overwrite) as scratch:
        write_pretrained(
            scratch,
            exported_config(model),
            checkpoint_tensors(model),
            tokenizer=tokenizer,
            generation_config=generation_config,
            max_shard_bytes=max_shard_bytes,
        )


def exported_config(model: CausalLM) -> ModelConfig:
    """Return the config that describes the model's files: its dtype, and the half-split rotary layout."""
    dtype: DType = str(model.dtype).removeprefix("torch.")  # type: ignore[assignment]
    config: ModelConfig = dataclasses.replace(model.config, dtype=dtype, rope_interleave=False)
    return config


def write_pretrained(
    directory: Path,
    config: ModelConfig,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    tokenizer: Tokenizer | None = None,
    generation_config: dict[str, Any] | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Write the files of :func:`save_pretrained` into an existing directory, one after another.

    Parameters
    ----------
    config, tensors
        As :func:`exported_config` and :func:`checkpoint_tensors` give them.
    """
    _write_json(directory / "config.json", config.to_dict())
    if generation_config:
        _write_json(directory / GENERATION_CONFIG, generation_config)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
    write_shards(directory, tensors, max_shard_bytes)


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_generation_config(directory: Path) -> dict[str, Any]:
    """Return the content of generation_config.json, or an empty dict if there is none."""
    path = directory / GENERATION_CONFIG
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}); download it again or remove it") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, got {type(data).__name__}")
    return data
