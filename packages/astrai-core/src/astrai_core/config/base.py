"""The base of every configuration class of astrai.

    @dataclass(frozen=True, kw_only=True, config=CONFIG)
    class SamplerConfig(BaseConfig):
        temperature: float = Field(1.0, ge=0)
        '''Softmax temperature; 0 is greedy.'''

A configuration is a frozen pydantic dataclass that refuses unknown keys.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass

from astrai_core.errors import ConfigError
from astrai_core.registry import closest

CONFIG = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False)
"""The pydantic settings to pass to the decorator of every configuration class."""


class BaseConfig:
    """Round trip between a configuration object and plain data; see the module docstring for how to declare one."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Build the configuration from plain data.

        Raises
        ------
        ConfigError
            One line that names the first offending field by its dotted path, the value and what is accepted.
        """
        try:
            return cls(**data)
        except ValidationError as error:
            raise ConfigError(f"{cls.__name__}: {describe_validation_error(error, cls)}") from None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data; fields that JSON cannot hold are left out."""
        plain = dataclasses.asdict(self)
        return {key: value for key, value in plain.items() if _is_json(value)}


def describe_validation_error(error: ValidationError, owner: type | None = None) -> str:
    """Turn pydantic's report into one line about its first error: dotted field, problem, value, suggestion."""
    first = error.errors(include_url=False)[0]
    path = ".".join(str(part) for part in first["loc"]) or "value"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        known = getattr(owner, "__dataclass_fields__", {}) if len(first["loc"]) == 1 else {}
        return f"unknown field {path!r}{closest(path, known)}; remove it or correct its name{more}"
    if first["type"] in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return f"field {path!r} is required; add it{more}"
    message = first["msg"].removeprefix("Value error, ")
    given = "" if first["type"] == "value_error" else f" (got {first['input']!r})"
    where = "" if path == "value" else f"field {path!r}: "
    return f"{where}{message[:1].lower()}{message[1:]}{given}{more}"


def _is_json(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


__all__ = ["CONFIG", "BaseConfig", "dataclass", "describe_validation_error"]
