"""Low-rank adapters (LoRA, arXiv 2106.09685) on the linear projections of a model.

An adapter sits beside the weight that it adds to, so the names of the base parameters stay what they are. A fused
projection has a pair of factors for each of its parts, under the part's own name in the Hugging Face files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from astrai_core.config.lora import LoRAConfig
from astrai_core.errors import ConfigError
from astrai_core.model.layers import FusedLinear, Linear

if TYPE_CHECKING:
    from astrai_core.model.transformer import CausalLM

Place: TypeAlias = tuple[Linear, str, tuple[int, int]]
"""Where a projection of the Hugging Face files is: module, name of the part, half-open range of rows."""


class LowRankFactors(nn.Module):
    """The two factors of one adapter, always float32: they are the master copy and are rounded where they are used.

    Parameters
    ----------
    in_features, out_features
        Of the projection that they add to.
    rank
        Their common dimension.
    """

    def __init__(self, in_features: int, out_features: int, rank: int, device: torch.device) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(torch.empty(rank, in_features, device=device, dtype=torch.float32))
        self.lora_B = nn.Parameter(torch.zeros(out_features, rank, device=device, dtype=torch.float32))

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Draw A uniformly within 1 / sqrt(in_features), as PEFT does; B is 0, so the adapter starts as nothing."""
        bound = 1.0 / math.sqrt(self.lora_A.shape[1])
        self.lora_A.uniform_(-bound, bound, generator=generator)
        self.lora_B.zero_()

    def delta(self) -> Tensor:
        """Return ``B @ A``, ``[out_features, in_features]`` float32, not yet scaled."""
        return self.lora_B.float() @ self.lora_A.float()


class LoRA(nn.Module):
    """The adapters of one projection, fused or not.

    Parameters
    ----------
    linear
        The projection.
    rows
        Name of each part that has an adapter -> its half-open range of rows.
    config
        Rank, scale and dropout.
    """

    def __init__(self, linear: Linear, rows: dict[str, tuple[int, int]], config: LoRAConfig) -> None:
        super().__init__()
        self.rows = rows
        self.out_features = linear.out_features
        self.scale = config.scale
        self.dropout = config.dropout
        self.enabled = True
        self.base_weight: Tensor | None = None
        device = linear.weight.device
        for name, (start, stop) in rows.items():
            self.add_module(name, LowRankFactors(linear.in_features, stop - start, config.rank, device))

    def parts(self) -> Iterator[tuple[str, LowRankFactors, slice]]:
        """Yield name, factors and rows of each part, in storage order."""
        for name, (start, stop) in self.rows.items():
            factors = self.get_submodule(name)
            assert isinstance(factors, LowRankFactors), "only factors are added"
            yield name, factors, slice(start, stop)

    def forward(self, x: Tensor, base: Tensor) -> Tensor:
        """Return `base` plus what the adapters make of `x`.

        Parameters
        ----------
        x
            ``[..., in_features]``.
        base
            ``[..., out_features]``: what the projection itself makes of it.
        """
        if not self.enabled or self.base_weight is not None:
            return base
        pieces, end = [], 0
        for _, factors, rows in self.parts():
            if rows.start > end:
                pieces.append(base.new_zeros(*base.shape[:-1], rows.start - end))
            hidden = F.linear(F.dropout(x, self.dropout, self.training), factors.lora_A.to(x.dtype))
            pieces.append(F.linear(hidden * self.scale, factors.lora_B.to(x.dtype)))
            end = rows.stop
        if end < self.out_features:
            pieces.append(base.new_zeros(*base.shape[:-1], self.out_features - end))
        return base + (pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1))

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """Return a weight ``[out_features, in_features]`` with the adapters added in float32, and not rounded."""
        total = weight.detach().float().clone()
        for _, factors, rows in self.parts():
            total[rows] += self.scale * factors.delta()
        return total


@torch.no_grad()
def apply_lora(model: CausalLM, config: LoRAConfig, generator: torch.Generator | None = None) -> None:
    """Give a model fresh adapters and freeze everything else; its outputs are what they were.

    Raises
    ------
    ConfigError
        If a target names no linear projection, the output projection is tied to the embedding, or the model has
        adapters already.
    """
    if model.lora is not None:
        raise ConfigError("the model has adapters already; load it again")
    wanted = targeted(model, config)
    if "lm_head" in wanted and model.config.tie_word_embeddings:
        raise ConfigError(
            "field 'target_modules': lm_head is the embedding itself in this model and cannot be adapted apart; remove it"
        )
    model.requires_grad_(False)
    rows_of: dict[Linear, dict[str, tuple[int, int]]] = {}
    for linear, part, rows in wanted.values():
        rows_of.setdefault(linear, {})[part] = rows
    for linear, parts in rows_of.items():
        linear.adapter = LoRA(linear, parts, config)
        linear.adapter.train(linear.training)
        for _, factors, _ in linear.adapter.parts():
            factors.init_weights(generator)
    model.lora = config


def adapters(model: nn.Module) -> Iterator[tuple[str, LowRankFactors]]:
    """Yield (dotted name of the projection in the Hugging Face files, its factors) in model order."""
    for prefix, module in model.named_modules():
        if isinstance(module, Linear) and isinstance(module.adapter, LoRA):
            for part, factors, _ in module.adapter.parts():
                yield _dotted(prefix, part), factors


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Let the model compute without its adapters: the reference of a LoRA run."""
    found = [module for module in model.modules() if isinstance(module, LoRA)]
    before = [module.enabled for module in found]
    for module in found:
        module.enabled = False
    try:
        yield
    finally:
        for module, enabled in zip(found, before, strict=True):
            module.enabled = enabled


@torch.no_grad()
def merge_lora(model: nn.Module) -> None:
    """Add the adapters to the weights, in float32 and rounded once; a copy of the weights is kept for `unmerge_lora`."""
    for linear in _adapted(model):
        adapter = linear.adapter
        assert isinstance(adapter, LoRA), "chosen for it"
        if adapter.base_weight is None:
            adapter.base_weight = linear.weight.detach().clone()
            linear.weight.copy_(adapter.merged(linear.weight))


@torch.no_grad()
def unmerge_lora(model: nn.Module) -> None:
    """Put back the weights that `merge_lora` changed, bit for bit."""
    for linear in _adapted(model):
        adapter = linear.adapter
        assert isinstance(adapter, LoRA), "chosen for it"
        if adapter.base_weight is not None:
            linear.weight.copy_(adapter.base_weight)
            adapter.base_weight = None


def _adapted(model: nn.Module) -> list[Linear]:
    return [module for module in model.modules() if isinstance(module, Linear) and isinstance(module.adapter, LoRA)]


def targeted(model: nn.Module, config: LoRAConfig) -> dict[str, Place]:
    """Return the projections that an adapter is for, by their dotted Hugging Face names in model order.

    Raises
    ------
    ConfigError
        If a target names no linear projection.
    """
    candidates = dict(projections(model))
    for target in config.target_modules:
        if not any(_matches(name, target) for name in candidates):
            known = sorted({name.rpartition(".")[2] for name in candidates})
            raise ConfigError(
                f"field 'target_modules': {target!r} names no linear projection of this model; there are "
                f"{', '.join(known)}"
            )
    return {
        name: place
        for name, place in candidates.items()
        if any(_matches(name, target) for target in config.target_modules)
    }


def projections(model: nn.Module) -> Iterator[tuple[str, Place]]:
    """Yield the dotted Hugging Face name of every linear projection, with its place."""
    for prefix, module in model.named_modules():
        if isinstance(module, FusedLinear):
            for part, rows in module.row_ranges().items():
                yield _dotted(prefix, part), (module, part, rows)
        elif isinstance(module, Linear):
            yield prefix, (module, prefix.rpartition(".")[2], (0, module.out_features))


def _dotted(prefix: str, part: str) -> str:
    parent = prefix.rpartition(".")[0]
    return f"{parent}.{part}" if parent else part


def _matches(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")
