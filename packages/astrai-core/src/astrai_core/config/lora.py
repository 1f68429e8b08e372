"""What a low-rank adapter is: :class:`LoRAConfig`, read from and written as PEFT's adapter_config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, PositiveFloat, PositiveInt

from astrai_core.config.base import CONFIG, BaseConfig, dataclass
from astrai_core.errors import ConfigError

TargetName = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.\w+)*$")]
"""A module by its dotted name in the Hugging Face files, or by the end of it."""

ATTENTION_AND_MLP = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Every projection of a decoder layer."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "use_dora": (False,),
    "lora_bias": (False,),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "target_parameters": (None, []),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    "alora_invocation_tokens": (None,),
    "exclude_modules": (None, [], ""),
    "use_bdlora": (None, False),
    "arrow_config": (None,),
    "use_qalora": (None, False),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    # The others (pissa, olora, corda, loftq, lora_ga) change the base weights that the factors are for.
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal", "mica"),
}
"""Keys of adapter_config.json that change what an adapter computes -> the values with which they do not."""


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class LoRAConfig(BaseConfig):
    """Low-rank adapters on a frozen model (arXiv 2106.09685); the files are PEFT's."""

    rank: PositiveInt = 16
    """Rank of an adapter."""

    alpha: PositiveFloat = 32.0
    """An adapter's output is scaled by alpha / rank, or by alpha / sqrt(rank) with `rslora`."""

    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout before an adapter's first matrix."""

    rslora: bool = False
    """Rank-stabilised scaling (arXiv 2312.03732)."""

    target_modules: Annotated[tuple[TargetName, ...], Field(min_length=1)] = ATTENTION_AND_MLP
    """Linear modules that get an adapter, by their names in the Hugging Face files."""

    @property
    def scale(self) -> float:
        """Factor of an adapter's output."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def to_peft(self, base_model: str) -> dict[str, Any]:
        """Return the content of adapter_config.json.

        Parameters
        ----------
        base_model
            The model that the adapter belongs to, as :func:`astrai_core.open_source` takes it.
        """
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_model,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": self.dropout,
            "use_rslora": self.rslora,
            "target_modules": list(self.target_modules),
            "bias": "none",
            "fan_in_fan_out": False,
            "init_lora_weights": True,
            "inference_mode": True,
            "modules_to_save": None,
        }

    @classmethod
    def from_peft(cls, data: Mapping[str, Any], modules: tuple[str, ...]) -> Self:
        """Read the content of adapter_config.json.

        Parameters
        ----------
        modules
            Dotted names of the modules that the adapter's file holds tensors for: the targets where the config gives
            an expression or names certain layers instead of a list.

        Raises
        ------
        ConfigError
            If it is no LoRA adapter, or one with a feature that is not supported; the key is named.
        """
        if data.get("peft_type") != "LORA":
            raise ConfigError(f"field 'peft_type': {data.get('peft_type')!r} is not supported; only LORA adapters load")
        for key, neutral in _NEUTRAL.items():
            if key in data and data[key] not in neutral:
                raise ConfigError(f"field {key!r}: {data[key]!r} is not supported; merge this adapter with peft first")
        listed, everywhere = data.get("target_modules"), data.get("layers_to_transform") is None
        targets = tuple(listed) if isinstance(listed, list) and everywhere else modules
        return cls.from_dict(
            {
                "rank": data.get("r"),
                "alpha": data.get("lora_alpha"),
                "dropout": data.get("lora_dropout", 0.0),
                "rslora": data.get("use_rslora", False),
                "target_modules": targets,
            }
        )
