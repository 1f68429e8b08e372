"""Activation checkpointing: what the backward pass computes again instead of keeping (arXiv 1604.06174)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from astrai_core.errors import ConfigError
from astrai_core.model.decoder_block import DecoderBlock
from astrai_core.model.transformer import CausalLM
from astrai_core.registry import closest

Recomputation = Literal["none", "full", "selective"]

KEPT = frozenset(
    {
        "aten.mm.default",
        "aten.addmm.default",
        "aten.bmm.default",
        "aten._scaled_mm.default",
        "aten._scaled_dot_product_cudnn_attention.default",
        "aten._scaled_dot_product_flash_attention.default",
        "aten._scaled_dot_product_efficient_attention.default",
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        "torch_attn._varlen_attn.default",
    }
)
"""What ``selective`` keeps by itself: the results of products and of attention, which are most of a block's arithmetic.
Norms, rotations, activations and casts are cheap to compute again and are most of what would be kept."""


class _Recomputed(nn.Module):
    """Mixed into a module's class: training calls are computed again in the backward pass.

    By the class and not by a wrapper or a patched method: names stay canonical (training rule 7), and a deep copy of the
    module computes with its own weights.
    """

    recompute_contexts: Callable[[], Any] | None = None

    def forward(self, *args: Any, **named: Any) -> Any:
        """Compute, and remember the inputs instead of what lies between if a gradient is recorded."""
        if not torch.is_grad_enabled():
            return super().forward(*args, **named)
        options: dict[str, Any] = {} if self.recompute_contexts is None else {"context_fn": self.recompute_contexts}
        return checkpoint(super().forward, *args, use_reentrant=False, **options, **named)


def recompute_activations(
    model: CausalLM, mode: Recomputation, *, modules: Sequence[str] = (), every: int = 1
) -> list[str]:
    """Set up activation checkpointing.

    Parameters
    ----------
    mode
        ``full``: of a block only its input is kept. ``selective``: without `modules`, results of products and attention
        are kept and the rest of a block is computed again; with `modules`, these are computed again as a whole.
    modules
        Modules by class name or by (the end of) their dotted name (row CF2); ``selective`` only.
    every
        Only every so many-th decoder block; not with `modules`.

    Returns
    -------
    Dotted names of the modules that are computed again.

    Raises
    ------
    ConfigError
        If a name of `modules` fits no module, or fits one inside another that is computed again.
    """
    if mode == "none":
        return []
    if modules:
        found: dict[str, Any] = _named(model, modules)
        contexts = None
    else:
        blocks = [(name, module) for name, module in model.named_modules() if isinstance(module, DecoderBlock)]
        found = dict(blocks[::every])
        contexts = _keep_products if mode == "selective" else None
    for module in found.values():
        cls: Any = type(module)
        module.__class__ = _recomputed(cls)
        if contexts is not None:
            module.recompute_contexts = contexts
    return list(found)


def recomputed_whole(module: nn.Module) -> bool:
    """Whether nothing but a module's inputs is kept."""
    return isinstance(module, _Recomputed) and module.recompute_contexts is None


@functools.cache
def _recomputed(cls: Any) -> Any:
    return type(cls.__name__, (_Recomputed, cls), {"__module__": cls.__module__})


def _policy(context: Any, op: Any, *args: Any, **named: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if str(op) in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def _keep_products() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _named(model: nn.Module, wanted: Sequence[str]) -> dict[str, Any]:
    every = {name: module for name, module in model.named_modules() if name}
    found: dict[str, Any] = {}
    for want in wanted:
        fits = {
            name: module
            for name, module in every.items()
            if type(module).__name__ == want or name == want or name.endswith(f".{want}")
        }
        if not fits:
            classes = sorted({type(module).__name__ for module in every.values()})
            hint = closest(want, classes) or f"; its classes are {', '.join(classes)}"
            raise ConfigError(
                f"field 'precision.gradient_checkpointing_modules': the model has no module {want!r}{hint}"
            )
        found |= fits
    for name in found:
        outer = next((other for other in found if name.startswith(f"{other}.")), None)
        if outer is not None:
            raise ConfigError(
                f"field 'precision.gradient_checkpointing_modules': {name} lies in {outer}, which is computed again as a "
                "whole; name one of them"
            )
    return found
