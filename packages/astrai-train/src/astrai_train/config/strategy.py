"""What is optimised: one class for each training strategy, told apart by `name`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationInfo, field_validator

from astrai_core.config.base import CONFIG, BaseConfig, dataclass
from astrai_train.config.fields import Share

REFERENCE_FREE_LOSSES = frozenset({"simpo", "orpo"})
"""Preference losses that need no reference model."""


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class SeqConfig(BaseConfig):
    """Pre-training: next-token cross entropy over every token of plain text."""

    name: Literal["seq"] = "seq"
    """Selects this strategy."""

    label_smoothing: Share = 0.0
    """Share of the target's probability that is spread evenly over the vocabulary."""

    loss_chunk_tokens: PositiveInt = 2048
    """Tokens whose logits exist at once; fewer need less memory."""


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class SFTConfig(BaseConfig):
    """Supervised fine-tuning: cross entropy over the supervised tokens of conversations."""

    name: Literal["sft"] = "sft"
    """Selects this strategy."""

    label_smoothing: Share = 0.0
    """Share of the target's probability that is spread evenly over the vocabulary."""

    loss_chunk_tokens: PositiveInt = 2048
    """Tokens whose logits exist at once; fewer need less memory."""

    neftune_alpha: PositiveFloat | None = None
    """Strength of NEFTune's noise on the embeddings while training (arXiv 2310.05914; 5 to 15 there); null is off."""


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class DPOConfig(BaseConfig):
    """Preference optimisation on pairs (DPO, arXiv 2305.18290, and the losses that grew from it)."""

    name: Literal["dpo"] = "dpo"
    """Selects this strategy."""

    loss: Literal["sigmoid", "ipo", "hinge", "cdpo", "robust", "apo_zero", "nca", "sppo", "simpo", "orpo", "kto"] = (
        "sigmoid"
    )
    """Preference loss; ``sigmoid`` is DPO itself."""

    beta: PositiveFloat = 0.1
    """Strength of the pull towards the reference; for ``simpo`` the scale of the reward (its paper: 2 to 2.5), for
    ``orpo`` the weight of the odds ratio."""

    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Assumed share of pairs whose preference is flipped; needed by ``cdpo`` and ``robust``, refused by the others."""

    simpo_gamma: NonNegativeFloat | None = None
    """Target reward margin of ``simpo`` (null: 0.5); refused by the other losses."""

    reference: Literal["auto", "copy", "adapter_off", "cached"] = "auto"
    """Where the reference's log-probabilities come from: a frozen ``copy``, the model with its LoRA ``adapter_off``,
    or ``cached`` values; ``auto`` is ``adapter_off`` under LoRA and ``copy`` otherwise."""

    loss_chunk_tokens: PositiveInt = 2048
    """Tokens whose logits exist at once; fewer need less memory."""

    max_prompt_len: PositiveInt | None = None
    """Tokens of the prompt that are kept (its end), the same for both answers; null keeps whatever fits the row."""

    @field_validator("label_smoothing")
    @classmethod
    def _smoothing_fits_loss(cls, value: float, info: ValidationInfo) -> float:
        loss = info.data.get("loss")
        if loss in ("cdpo", "robust") and value == 0:
            raise ValueError(f"loss {loss!r} with no flipped pairs is 'sigmoid'; give a value above 0")
        if loss not in ("cdpo", "robust", None) and value > 0:
            raise ValueError(f"loss {loss!r} does not use it; remove it or choose 'cdpo' or 'robust'")
        return value

    @field_validator("simpo_gamma")
    @classmethod
    def _gamma_fits_loss(cls, value: float | None, info: ValidationInfo) -> float | None:
        loss = info.data.get("loss")
        if value is not None and loss not in ("simpo", None):
            raise ValueError(f"loss {loss!r} does not use it; remove it or choose 'simpo'")
        return value

    @field_validator("reference")
    @classmethod
    def _reference_fits_loss(cls, value: str, info: ValidationInfo) -> str:
        loss = info.data.get("loss")
        if value != "auto" and loss in REFERENCE_FREE_LOSSES:
            raise ValueError(f"loss {loss!r} needs no reference; remove it")
        return value


StrategyConfig = Annotated[SeqConfig | SFTConfig | DPOConfig, Field(discriminator="name")]
"""One of the strategies, chosen by its `name`."""
