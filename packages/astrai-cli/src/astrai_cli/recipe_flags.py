"""Every field of a recipe as a flag, generated from its schema and grouped in the help (row CL1)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import rich_click as click

Kind = Literal["text", "yaml", "list", "sources"]
"""How a value is read: as it stands; as YAML; as a list with commas; as paths of data sources."""

PANELS = {
    "output_dir": "Run",
    "max_steps": "Run",
    "epochs": "Run",
    "seed": "Run",
    "batch_size": "Batch and gradient",
    "micro_batch_size": "Batch and gradient",
    "max_grad_norm": "Batch and gradient",
    "eval_interval": "Evaluation",
    "early_stop_patience": "Evaluation",
    "model": "Model",
    "data": "Data",
    "strategy": "Strategy",
    "optimizer": "Optimizer",
    "ema_decay": "Optimizer",
    "lr_schedule": "Learning rate",
    "precision": "Numbers and memory",
    "lora": "LoRA",
    "parallel": "Parallel",
    "checkpoint": "Checkpoints",
    "log": "Metrics",
}
"""The panel of each top-level field, in the order of the help; a field that is not listed gets a panel of its own."""

ALIASES = {"log.metrics": "--metrics"}
"""A second spelling of a field's flag (row TR3)."""

SHORT = 16
"""Longest list of choices that stands in a flag's place for its value; longer ones end its help."""


@dataclass(eq=False)
class Leaf:
    """One field that is no group, and what its flag says."""

    path: str
    """Dotted, as error messages name it."""
    kind: Kind
    help: str
    metavar: str
    only: list[str] = field(default_factory=list)
    """Names of the union members that have it; empty where all have."""

    @property
    def flag(self) -> str:
        """The flag's spelling."""
        return "--" + self.path.replace("_", "-")

    @property
    def parameter(self) -> str:
        """The name under which click passes the value."""
        return self.path.replace(".", "__")

    def option(self) -> click.RichOption:
        """Build the click option."""
        top = self.path.partition(".")[0]
        text = f"[{', '.join(self.only)}] {self.help}" if self.only else self.help
        return click.RichOption(
            [self.flag, *([ALIASES[self.path]] if self.path in ALIASES else []), self.parameter],
            metavar=self.metavar,
            default=None,
            show_default=False,
            multiple=self.kind == "sources",
            type=str,
            panel=PANELS.get(top, top),
            help=text,
        )

    def parse(self, given: Any) -> Any:
        """Return what a given value is in a recipe.

        Raises
        ------
        ConfigError
            If it is not YAML where it must be.
        """
        from astrai_train.config.recipe_file import parse_value

        if self.kind == "sources":
            return [parse_value(item) if item.startswith("{") else {"path": item} for item in given]
        if self.kind == "list" and not given.startswith("["):
            return [parse_value(item) for item in given.split(",")]
        if self.kind == "text" and given != "null" and not given.startswith("{"):
            return given
        return parse_value(given)


def leaves(schema: Mapping[str, Any]) -> list[Leaf]:
    """List the fields of a recipe's JSON schema, in the order of :data:`PANELS`."""
    order = list(PANELS)
    found = list(_walk(schema, schema["$defs"], ""))
    place = lambda leaf: order.index(top) if (top := leaf.path.partition(".")[0]) in order else len(order)
    return sorted(found, key=place)


def _walk(group: Mapping[str, Any], defs: Mapping[str, Any], prefix: str) -> Iterator[Leaf]:
    for name, given in group["properties"].items():
        kinds = _alternatives(given, defs)
        groups = [kind for kind in kinds if "properties" in kind]
        path = prefix + name
        if len(groups) > 1:
            yield from _union(groups, defs, f"{path}.")
        elif groups:
            yield from _walk(groups[0], defs, f"{path}.")
        else:
            yield _leaf(path, given, kinds)


def _union(groups: list[Mapping[str, Any]], defs: Mapping[str, Any], prefix: str) -> Iterator[Leaf]:
    """The fields of all members of a union, each once."""
    members: dict[str, list[str]] = {}
    merged: dict[str, Leaf] = {}
    names = [str(group["properties"]["name"]["const"]) for group in groups]
    for name, group in zip(names, groups, strict=True):
        for leaf in _walk(group, defs, prefix):
            merged.setdefault(leaf.path, leaf)
            members.setdefault(leaf.path, []).append(name)
    for path, leaf in merged.items():
        if path == f"{prefix}name":
            yield Leaf(path, "text", f"One of {', '.join(names)}.", "NAME")
        else:
            leaf.only = members[path] if len(members[path]) < len(groups) else []
            yield leaf


def _alternatives(given: Mapping[str, Any], defs: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What a field may be, references followed and unions flattened."""
    if "$ref" in given:
        return _alternatives(defs[given["$ref"].rpartition("/")[2]], defs)
    for key in ("anyOf", "oneOf"):
        if key in given:
            return [kind for member in given[key] for kind in _alternatives(member, defs)]
    return [given]


def _leaf(path: str, given: Mapping[str, Any], kinds: list[Mapping[str, Any]]) -> Leaf:
    types = {str(kind.get("type")) for kind in kinds} - {"null"}
    choices = [str(choice) for kind in kinds for choice in kind.get("enum", ())]
    kind: Kind
    if types == {"boolean"}:
        kind, metavar = "yaml", "true|false"
    elif "array" in types:
        of_groups = any("$ref" in member.get("items", {}) for member in kinds)
        kind, metavar = ("sources", "PATH") if of_groups else ("list", "A,B,...")
    elif "string" in types:
        kind, metavar = "text", "|".join(choices) if 0 < len("|".join(choices)) < SHORT else "TEXT"
    else:
        kind, metavar = "yaml", "N" if types == {"integer"} else "X"
    words = re.sub(r"`+| \(row \w+\)", "", " ".join(str(given.get("description", "")).split()))
    if choices and metavar == "TEXT":
        words += f" One of {', '.join(choices)}."
    default = given.get("default")
    if default not in (None, "", []) and not isinstance(default, dict):
        words += f"  [default: {_plain(default)}]"
    return Leaf(path, kind, words, metavar)


def _plain(default: Any) -> str:
    if isinstance(default, bool):
        return "true" if default else "false"
    return ",".join(map(str, default)) if isinstance(default, (list, tuple)) else str(default)
