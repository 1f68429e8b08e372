"""Recipes as YAML files: strict reading with line numbers, whole-file writing.

Stricter than YAML 1.1 as PyYAML reads it: a key given twice is an error (PyYAML keeps the last), and ``1e-3`` is a
number (PyYAML's is a string, as YAML 1.1 wants ``1.0e-3``).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from astrai_core.errors import ConfigError

_FLOAT_WITHOUT_POINT = re.compile(r"^[-+]?[0-9]+[eE][-+]?[0-9]+$")
_FLOAT_TAG = "tag:yaml.org,2002:float"


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} is given twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """Quotes what `_Loader` would otherwise read as a number, and writes no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # In any other style PyYAML writes U+0085, U+2028 and U+2029 as they are and reads them back as newlines.
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=None if data.isprintable() else '"')


_Dumper.add_representer(str, _Dumper.represent_str)

for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(_FLOAT_TAG, _FLOAT_WITHOUT_POINT, list("-+0123456789"))


class RecipeFile:
    """A YAML file with one mapping, and the lines on which its fields stand.

    Parameters
    ----------
    path
        The file, UTF-8 (or UTF-16 with a byte-order mark).

    Raises
    ------
    ConfigError
        If the file cannot be read, is not YAML, or does not hold one mapping with text keys. The message names the
        file, and the line where there is one.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            loader = _Loader(self.path.read_bytes())
            try:
                self._root = loader.get_single_node()
                data = {} if self._root is None else loader.construct_document(self._root)
                bad_key = _first_key_not_text(data)
            finally:
                loader.dispose()
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot read the recipe: {error.strerror}") from None
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            where = f"{self.path}:{mark.line + 1}" if mark else str(self.path)
            raise ConfigError(f"{where}: not valid YAML: {error.problem or error.context}") from None
        except yaml.reader.ReaderError as error:
            raise ConfigError(f"{self.path}: not a text file: {error.reason} at position {error.position}") from None
        except RecursionError:
            raise ConfigError(f"{self.path}: not a recipe: nested too deeply") from None
        except ValueError as error:  # PyYAML lets these through for a date or a number that cannot be
            raise ConfigError(f"{self.path}: not valid YAML: {error}") from None
        if not isinstance(data, dict):
            raise ConfigError(f"{self.path}: a recipe is a mapping of fields (name: value), got {type(data).__name__}")
        if bad_key is not None:
            raise ConfigError(f"{self.path}: the key {bad_key!r} must be text; put it in quotes")
        self.data: dict[str, Any] = data

    def line_of(self, path: Iterable[str | int]) -> int | None:
        """Return the line (from 1) of the deepest part of `path` that the file holds, or None for none."""
        node, line = self._root, None
        for part in path:
            if isinstance(node, yaml.MappingNode):
                found = next(((key, value) for key, value in node.value if key.value == part), None)
                if found is None:
                    break
                line, node = found[0].start_mark.line + 1, found[1]
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
                node = node.value[part]
                line = node.start_mark.line + 1
            else:
                break
        return line


def parse_value(text: str) -> Any:
    """Read a value as it would stand behind the colon of a recipe's field.

    Raises
    ------
    ConfigError
        If it is not YAML.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError) as error:
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise ConfigError(f"{text!r} is not valid YAML: {problem}") from None


def _first_key_not_text(value: object) -> object:
    inner: Iterable[object] = ()
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                return "null" if key is None else key
        inner = value.values()
    elif isinstance(value, list):
        inner = value
    return next((bad for item in inner if (bad := _first_key_not_text(item)) is not None), None)


def write_recipe(path: str | os.PathLike[str], data: Mapping[str, Any]) -> None:
    """Write `data` as YAML; `path` holds either the whole text or what it held before.

    Raises
    ------
    ConfigError
        If the file cannot be written; the message names it.
    """
    path = Path(path)
    text = yaml.dump(dict(data), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=sys.maxsize)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{path}: cannot write the recipe: {error.strerror}") from None
