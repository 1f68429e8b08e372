"""What each parameter of a model is to an optimizer: its role, and the matrices that a fused weight is made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from astrai_core.errors import ConfigError
from astrai_core.registry import BaseFactory
from astrai_train.optim.composite import CompositeOptimizer

Role = Literal["matrix", "embedding", "head", "projection", "norm", "bias", "other"]
"""``matrix`` hidden weights ``[out, in]`` or stacks of them ``[experts, out, in]``; ``embedding`` token tables (and a
head tied to one); ``head`` the output projection; ``projection`` low-rank adapters and routers; ``norm``, ``bias`` and
``other`` (scalars, other vectors, convolutions)."""

DECAYED_ROLES: frozenset[Role] = frozenset({"matrix", "embedding", "head", "projection"})
"""Roles under weight decay. Norms, biases and scalars set scales and offsets, which decay would bias towards 0."""

_HEADS = frozenset({"lm_head"})
# Matrices that the matrix optimizers must leave to their companion: low-rank factors, whose product is the matrix, and
# routers, whose rows are independent classifiers.
_PROJECTIONS = frozenset({"lora_A", "lora_B", "router", "gate", "shared_expert_gate"})
_WRAPPERS = frozenset({"_orig_mod", "module", "_checkpoint_wrapped_module"})


class OptimizerFactory(BaseFactory[CompositeOptimizer]):
    """Optimizers by the name that a recipe gives: ``create(name, model, **options)``.

    The options are the other fields of the recipe's optimizer; each reaches the optimizer's ``param_groups``. A group
    carries ``base_lr``, which the schedule scales, and ``param_names``.
    """


# Lazy: a run imports its own optimizer only.
for _name, _target in {
    "adamw": "adamw:AdamW",
    "muon_adamw": "muon_adamw:MuonAdamW",
    "mano_adamw": "mano_adamw:ManoAdamW",
    "nora_nadamw": "nora_nadamw:NoraNAdamW",
}.items():
    OptimizerFactory.register(_name, f"astrai_train.optim.{_target}")


@dataclass(frozen=True)
class OptimizedParameter:
    """A trainable parameter and what an optimizer needs to know of it."""

    name: str
    """Dotted name, free of the wrappers' (compile, DDP, activation checkpointing)."""

    parameter: nn.Parameter
    """The tensor itself."""

    role: Role
    """What it is."""

    row_groups: tuple[int, ...] = ()
    """Rows of each matrix that a fused weight is made of, in storage order; empty where there is just one."""


def canonical_name(name: str) -> str:
    """Return a dotted name without the parts that wrappers (compile, DDP, activation checkpointing) put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return (canonical name, parameter) of what is trained, in model order; a tied weight once."""
    return [(canonical_name(name), item) for name, item in model.named_parameters() if item.requires_grad]


def optimized_parameters(model: nn.Module) -> list[OptimizedParameter]:
    """List the trainable parameters of `model` in the order of its modules, each once.

    Tied weights are one parameter: an output head that is the embedding has the role ``embedding``.

    Raises
    ------
    ConfigError
        If nothing in the model is trainable.
    """
    found: dict[int, OptimizedParameter] = {}
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad:
                continue
            dotted = canonical_name(f"{module_name}.{name}" if module_name else name)
            item = OptimizedParameter(dotted, parameter, _role(module, dotted, parameter), _row_groups(module, name))
            known = found.get(id(parameter))
            if known is None:
                found[id(parameter)] = item
            elif item.role == "embedding":
                found[id(parameter)] = OptimizedParameter(known.name, parameter, "embedding")
    if not found:
        raise ConfigError("the model has no trainable parameter; unfreeze a part of it or add an adapter")
    return list(found.values())


def decay_groups(
    items: Iterable[OptimizedParameter], weight_decay: float, *, decay_embeddings: bool = True
) -> list[dict[str, Any]]:
    """Split parameters into a group with weight decay and one without; a group with no member is left out.

    Parameters
    ----------
    decay_embeddings
        Decay token tables too, and with them an output head that is tied to one.

    Returns
    -------
    Groups as torch's optimizers take them.
    """
    decayed: list[OptimizedParameter] = []
    plain: list[OptimizedParameter] = []
    for item in items:
        is_decayed = item.role in DECAYED_ROLES and (decay_embeddings or item.role != "embedding")
        (decayed if is_decayed else plain).append(item)
    groups = ((decayed, weight_decay), (plain, 0.0))
    return [_group(members, weight_decay=decay) for members, decay in groups if members]


def matrix_groups(items: Iterable[OptimizedParameter]) -> list[dict[str, Any]]:
    """Make one group of all matrices that are split into the same rows, with the rows as its ``row_groups``."""
    by_rows: dict[tuple[int, ...], list[OptimizedParameter]] = {}
    for item in items:
        by_rows.setdefault(item.row_groups, []).append(item)
    return [_group(members, row_groups=rows) for rows, members in by_rows.items()]


def split_matrices(model: nn.Module, optimizer: str) -> tuple[list[OptimizedParameter], list[OptimizedParameter]]:
    """Return (hidden matrices, everything else) of the trainable parameters.

    Raises
    ------
    ConfigError
        If there is no trainable matrix, so that the optimizer asked for by name would do nothing.
    """
    items = optimized_parameters(model)
    matrices = [item for item in items if item.role == "matrix"]
    if not matrices:
        raise ConfigError(
            f"optimizer {optimizer!r} found no trainable hidden matrix (adapters are not among them); choose 'adamw'"
        )
    return matrices, [item for item in items if item.role != "matrix"]


def _group(items: list[OptimizedParameter], **options: Any) -> dict[str, Any]:
    return {"params": [(item.name, item.parameter) for item in items], **options}


def _role(module: nn.Module, dotted: str, parameter: nn.Parameter) -> Role:
    *owners, name = dotted.split(".")
    if isinstance(module, nn.Embedding):
        return "embedding"
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) and name == "weight":
        return "other"
    if name == "bias" or name.endswith("_bias"):
        return "bias"
    if parameter.ndim == 1:
        return "norm" if name == "weight" else "other"
    if parameter.ndim not in (2, 3):
        return "other"
    if owners and owners[-1] in _HEADS:
        return "head"
    return "projection" if _PROJECTIONS.intersection([*owners, name]) else "matrix"


def _row_groups(module: nn.Module, name: str) -> tuple[int, ...]:
    """`FusedLinear` carries ``row_groups``, the rows of each part; they are those of its weight."""
    rows = getattr(module, "row_groups", None)
    return tuple(rows.values()) if rows and name == "weight" else ()
