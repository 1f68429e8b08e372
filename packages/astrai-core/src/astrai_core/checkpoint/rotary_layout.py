"""The order of a head's rows: rotated halves, as Hugging Face files have them, or neighbouring pairs, as GGUF has."""

from __future__ import annotations

import torch
from torch import Tensor

from astrai_core.config.model import ModelConfig

_ROTATED = ("q_proj", "k_proj", "q_norm", "k_norm")


def is_rotated(config: ModelConfig, module: str) -> bool:
    """Whether the rows of a module, by its dotted name, are in another order in the model than in the files."""
    return config.rope_interleave and module.rpartition(".")[2] in _ROTATED


def interleaved_to_halves(tensor: Tensor, head_dim: int, rotary_dim: int) -> Tensor:
    """Reorder rows ``[heads * head_dim, ...]`` of q or k so that half-split rotary gives the interleaved result."""
    heads = tensor.view(-1, head_dim, *tensor.shape[1:])
    pairs = heads[:, :rotary_dim].unflatten(1, (rotary_dim // 2, 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat((pairs, heads[:, rotary_dim:]), 1).reshape(tensor.shape)


def halves_to_interleaved(tensor: Tensor, head_dim: int, rotary_dim: int) -> Tensor:
    """Undo :func:`interleaved_to_halves`."""
    heads = tensor.view(-1, head_dim, *tensor.shape[1:])
    halves = heads[:, :rotary_dim].unflatten(1, (2, rotary_dim // 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat((halves, heads[:, rotary_dim:]), 1).reshape(tensor.shape)
