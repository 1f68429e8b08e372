"""Where in a recipe a validation error lies, in the recipe's own terms."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from astrai_core.registry import closest

_UNKNOWN = "unexpected_keyword_argument"
_MISSING = ("missing", "missing_argument", "missing_keyword_only_argument")
_NOT_FIELDS = ("model_attributes_type", "dataclass_type")


@dataclasses.dataclass(frozen=True)
class FieldError:
    """One line about an error, and the path of the field that it is about."""

    path: tuple[str | int, ...]
    message: str


def explain(error: ValidationError, owner: type) -> FieldError:
    """Describe one error of validating `owner`: the first unknown field if there is one, else the first of all.

    An unknown field comes first because it is often the misspelling of one that is reported as missing. Where
    pydantic's path names the member of a union that it tried (``optimizer.adamw.lr``), that name is left out, and
    names are suggested from the class that refused the field.
    """
    errors = error.errors(include_url=False)
    chosen = next((item for item in errors if item["type"] == _UNKNOWN), errors[0])
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    path, holder, kind = _locate(chosen["loc"], owner)
    dotted = ".".join(map(str, path))
    if chosen["type"] == _UNKNOWN:
        known = [field.name for field in dataclasses.fields(holder)]
        hint = closest(str(path[-1]), known) or f"; the fields here are {', '.join(known)}"
        return FieldError(path, f"unknown field {dotted!r}{hint}{more}")
    if chosen["type"] in ("union_tag_not_found", "union_tag_invalid"):
        names, field = list(_members(kind)), f"{dotted}.name" if dotted else "name"
        choices = f"choose one of {', '.join(names)}{more}"
        if chosen["type"] == "union_tag_not_found":
            return FieldError(path, f"field {field!r} is required; {choices}")
        tag = str(chosen["ctx"]["tag"])
        return FieldError((*path, "name"), f"field {field!r}: unknown name {tag!r}{closest(tag, names)}; {choices}")
    if chosen["type"] in _MISSING:
        return FieldError(path, f"field {dotted!r} is required; add it{more}")
    where = f"field {dotted!r}: " if path else ""
    if chosen["type"] in _NOT_FIELDS:
        return FieldError(path, f"{where}must hold fields (name: value), got {chosen['input']!r}{more}")
    message = chosen["msg"].removeprefix("Value error, ")
    given = "" if chosen["type"] == "value_error" else f" (got {chosen['input']!r})"
    return FieldError(path, f"{where}{message[:1].lower()}{message[1:]}{given}{more}")


def _locate(loc: tuple[str | int, ...], owner: type) -> tuple[tuple[str | int, ...], type, Any]:
    """Follow pydantic's path; return the recipe's path, the class that holds its last field, and that field's type."""
    path: list[str | int] = []
    holder, kind = owner, typing.cast(Any, owner)
    for part in loc:
        if dataclasses.is_dataclass(kind):
            holder = typing.cast(type, kind)
            kind = _without_none(typing.get_type_hints(kind).get(str(part), Any))
        elif _is_union(kind):
            kind = _members(kind).get(str(part), Any)
            continue
        else:
            kind = _without_none(typing.get_args(kind)[0]) if typing.get_origin(kind) is tuple else Any
        path.append(part)
    return tuple(path), holder, kind


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def _without_none(kind: Any) -> Any:
    members = [member for member in typing.get_args(kind) if member is not types.NoneType]
    return members[0] if _is_union(kind) and len(members) == 1 else kind


def _members(union: Any) -> Mapping[str, type]:
    """The classes of a union that is told apart by ``name``, by that name."""
    return {
        str(field.default): member
        for member in typing.get_args(union)
        if isinstance(member, type) and dataclasses.is_dataclass(member)
        for field in dataclasses.fields(member)
        if field.name == "name"
    }
