"""What ``astrai preprocess`` is asked to do: a YAML or JSON file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, NonNegativeInt, PositiveInt, ValidationError, ValidationInfo, field_validator

from astrai_core.config.base import CONFIG, BaseConfig, dataclass
from astrai_core.errors import ConfigError
from astrai_train.config.fields import Name
from astrai_train.config.recipe_file import RecipeFile
from astrai_train.config.report import explain
from astrai_train.data.store import Kind

KIND_OF_FORMAT: Mapping[str, Kind] = {
    "messages": "chat",
    "sharegpt": "chat",
    "alpaca": "chat",
    "prompt_completion": "chat",
    "preference": "pairs",
    "prompts": "prompts",
    "text": "text",
}
"""The kind of store that each format becomes."""


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class InputConfig(BaseConfig):
    """Files that are read alike."""

    paths: Annotated[tuple[Name, ...], Field(min_length=1)]
    """Files, or patterns (``data/**/*.jsonl``); what a pattern finds is read in the order of its names."""

    type: Literal["auto", "jsonl", "json", "parquet", "text"] = "auto"
    """What the files are; ``auto`` goes by the name (.jsonl, .ndjson, .json, .parquet, .txt, .md), and looks into a
    .json file, which is often JSON lines."""

    domain: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*$")] | None = None
    """Name of the store, below the output directory, that these files become; for mixtures by weight."""


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class PreprocessConfig(BaseConfig):
    """One run of preprocessing."""

    inputs: Annotated[tuple[InputConfig, ...], Field(min_length=1)]
    """What to read."""

    tokenizer: Name
    """A directory, a .gguf file, a Hugging Face id, or ``smollm2``."""

    format: Literal["messages", "sharegpt", "alpaca", "prompt_completion", "preference", "prompts", "text"]
    """What a record holds: ``messages`` (OpenAI), ``sharegpt`` (conversations of from and value), ``alpaca``
    (instruction, input, output), ``prompt_completion``, ``preference`` (prompt, chosen, rejected), ``prompts`` (prompt
    or messages, and columns for rewards), ``text``."""

    fields: dict[Name, Name] = Field(default_factory=dict)
    """Other names of the records' fields, by the name that the format expects (``text: content``)."""

    chat_template: Name | None = None
    """File with the Jinja source, or the name of one of the tokenizer's templates; by default the tokenizer's own."""

    template_variables: dict[Name, JsonValue] = Field(default_factory=dict)
    """Further variables of the chat template (``enable_thinking: false``)."""

    roles: Annotated[tuple[Name, ...], Field(min_length=1)] = ("assistant",)
    """Whose turns are supervised; a message with ``weight: 0`` never is."""

    append_eos: bool = True
    """End texts and completions with the end-of-text token where the tokenizer has one. Chat templates do it alone."""

    text_unit: Literal["file", "line"] = "file"
    """What is a document in text files. A file larger than `chunk_bytes` becomes several, cut between lines."""

    on_bad_row: Literal["raise", "skip"] = "raise"
    """``raise`` stops at the first bad row and names it; ``skip`` counts them."""

    max_bad_rows: NonNegativeInt = 100
    """Bad rows that ``skip`` bears before it stops as well."""

    workers: NonNegativeInt | None = None
    """Processes; null takes one for each core, up to 16 (further cores become threads in each), 0 works in this one."""

    chunk_bytes: Annotated[int, Field(ge=16)] = 1 << 20
    """Bytes of a file that one worker takes at a time."""

    shard_bytes: PositiveInt = 1 << 30
    """Size from which a store starts another file."""

    @field_validator("max_bad_rows")
    @classmethod
    def _cap_has_effect(cls, value: int, info: ValidationInfo) -> int:
        if value == 0 and info.data.get("on_bad_row") == "skip":
            raise ValueError("skipping none is on_bad_row 'raise'; choose that or allow at least 1")
        return value

    @property
    def kind(self) -> Kind:
        """What kind of store this becomes."""
        return KIND_OF_FORMAT[self.format]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Build the configuration from plain data.

        Raises
        ------
        ConfigError
            One line that names the first offending field by its dotted path.
        """
        try:
            return cls(**data)
        except ValidationError as error:
            raise ConfigError(explain(error, cls).message) from None

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Self:
        """Read a YAML file, or a JSON file by the name ``*.json``.

        Raises
        ------
        ConfigError
            One line that names the file, the line where there is one, and the dotted field.
        """
        path = Path(path)
        if path.suffix == ".json":
            data = _read_json(path)
            try:
                return cls(**data)
            except ValidationError as error:
                raise ConfigError(f"{path}: {explain(error, cls).message}") from None
        recipe = RecipeFile(path)
        try:
            return cls(**recipe.data)
        except ValidationError as error:
            found = explain(error, cls)
            line = recipe.line_of(found.path)
            raise ConfigError(f"{path}{'' if line is None else f':{line}'}: {found.message}") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}: not valid JSON: {error.msg}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: must hold one JSON object, not {type(data).__name__}")
    return data
