"""Where the model and the tokens of a run come from."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import (
    Discriminator,
    Field,
    JsonValue,
    NonNegativeInt,
    PositiveFloat,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from astrai_core.config.base import CONFIG, BaseConfig, dataclass
from astrai_train.config.fields import Name

Architecture = Annotated[
    Annotated[Name, Tag("path")] | Annotated[dict[str, JsonValue], Tag("contents")],
    Discriminator(lambda value: "path" if isinstance(value, str) else "contents"),
]
"""The path of a config.json, or its contents; told apart by type, so that an error speaks of what was given."""


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class ModelSource(BaseConfig):
    """The model to train: existing weights, or an architecture to initialise from scratch. Give exactly one."""

    pretrained: Name | None = None
    """Model whose weights are trained further: a Hugging Face directory or id, a .gguf file, or ``smollm2``."""

    architecture: Architecture | None = None
    """Path of a config.json, or its contents (Hugging Face field names); the weights are initialised at random."""

    tokenizer: Name | None = None
    """Directory or id whose tokenizer and chat template are used; by default those of `pretrained`."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.pretrained is None) == (self.architecture is None):
            raise ValueError("give exactly one of pretrained (train further) and architecture (from scratch)")
        if self.pretrained is None and self.tokenizer is None:
            raise ValueError("a model from scratch brings no tokenizer; name one in tokenizer")
        return self


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class DataSource(BaseConfig):
    """One member of a mixture."""

    path: Name
    """Pre-tokenised store, as ``astrai preprocess`` writes it."""

    weight: PositiveFloat = 1.0
    """Share of the mixture, relative to the other members' weights."""


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class DataConfig(BaseConfig):
    """The rows that the model sees."""

    train: Annotated[tuple[DataSource, ...], Field(min_length=1)]
    """Members of the training mixture."""

    valid: tuple[DataSource, ...] = ()
    """Members of the validation set; their weights weigh their losses."""

    seq_len: Annotated[int, Field(ge=2)]
    """Tokens of a row."""

    packing: Literal["none", "simple", "bfd", "bfd_split"] = "none"
    """How documents become rows: ``none`` one a row; ``simple`` end to end, cut every `seq_len` tokens; ``bfd`` whole
    documents by best-fit decreasing; ``bfd_split`` the same after cutting documents longer than a row."""

    overlong: Literal["truncate", "drop"] = "truncate"
    """What becomes of a document longer than a row under packing ``none`` and ``bfd``; the other packings cut it and
    lose nothing."""

    position_ids: Literal["none", "doc_reset", "continuous"] = "doc_reset"
    """``doc_reset`` restarts at 0 with each document, ``continuous`` counts through the row, ``none`` leaves them to
    the model."""

    shuffle_seed: NonNegativeInt | None = 0
    """Seed of the order of the rows; null keeps the order of the files."""

    workers: NonNegativeInt = 2
    """Processes that prepare batches on each rank; 0 prepares them in the training process."""

    @field_validator("overlong")
    @classmethod
    def _overlong_has_effect(cls, overlong: str, info: ValidationInfo) -> str:
        packing = info.data.get("packing")
        if overlong == "drop" and packing in ("simple", "bfd_split"):
            raise ValueError(f"packing {packing!r} cuts long documents and drops none; remove it or choose 'bfd'")
        return overlong
