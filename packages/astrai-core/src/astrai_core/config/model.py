"""The architecture of a model: :class:`ModelConfig`, read from and written as a Hugging Face config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from astrai_core.config.base import CONFIG, BaseConfig, dataclass
from astrai_core.config.families import COMMON_KEYS, FAMILIES, INERT_KEYS, MOE_FIELDS, Family
from astrai_core.errors import CheckpointError, ConfigError
from astrai_core.registry import closest

LayerType = Literal["full_attention", "sliding_attention"]
DType = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class RopeParameters(BaseConfig):
    """Rotary embedding: base frequency and context extension, under the keys of ``rope_parameters``."""

    rope_type: Literal["default", "linear", "yarn", "llama3"] = "default"
    """How frequencies are scaled: not, by position interpolation, by YaRN (arXiv 2309.00071), or as Llama 3.1 does."""
    rope_theta: float = Field(default=10000.0, gt=0)
    """Base of the geometric series of frequencies."""
    partial_rotary_factor: float = Field(default=1.0, gt=0, le=1)
    """Share of each head that is rotated."""
    factor: float | None = Field(default=None, ge=1)
    """Ratio of the extended context to the original one."""
    original_max_position_embeddings: int | None = Field(default=None, gt=0)
    """Context length of pre-training, in tokens."""
    attention_factor: float | None = Field(default=None, gt=0)
    """YaRN: scale of cos and sin; None derives it from the factor."""
    beta_fast: float | None = Field(default=None, gt=0)
    """YaRN: rotations above which a dimension is extrapolated (32 if None)."""
    beta_slow: float | None = Field(default=None, gt=0)
    """YaRN: rotations below which a dimension is interpolated (1 if None)."""
    mscale: float | None = None
    """YaRN: numerator weight of the derived attention factor."""
    mscale_all_dim: float | None = None
    """YaRN: denominator weight of the derived attention factor."""
    truncate: bool = True
    """YaRN: round the correction range to whole dimensions."""
    low_freq_factor: float | None = Field(default=None, gt=0)
    """Llama 3: wavelengths above original context / low_freq_factor are scaled."""
    high_freq_factor: float | None = Field(default=None, gt=0)
    """Llama 3: wavelengths below original context / high_freq_factor are kept."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        needs = {
            "linear": ("factor",),
            "yarn": ("factor", "original_max_position_embeddings"),
            "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
        }.get(self.rope_type, ())
        for name in needs:
            if getattr(self, name) is None:
                raise ValueError(f"rope_type {self.rope_type!r} needs the key {name!r}; add it")
        if self.rope_type == "llama3" and self.high_freq_factor == self.low_freq_factor:
            raise ValueError("high_freq_factor must differ from low_freq_factor")
        return self


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class ModelConfig(BaseConfig):
    """Architecture of a decoder-only model, complete and frozen.

    :meth:`from_dict` and :meth:`to_dict` speak config.json's keys; fields without a key of their own there (biases
    and norms that a family fixes, layers without rotary embedding) follow from ``model_type``.
    """

    model_type: str = "llama"
    """Family, one of :data:`~astrai_core.config.families.FAMILIES`."""
    vocab_size: int = Field(gt=0)
    """Rows of the embedding."""
    hidden_size: int = Field(gt=0)
    """Width of the residual stream."""
    intermediate_size: int = Field(gt=0)
    """Width of the gated feed-forward layer."""
    num_hidden_layers: int = Field(gt=0)
    """Decoder blocks."""
    num_attention_heads: int = Field(gt=0)
    """Query heads."""
    num_key_value_heads: int = Field(gt=0, default_factory=lambda data: data["num_attention_heads"])
    """Key and value heads; must divide the query heads."""
    head_dim: int = Field(gt=0, default_factory=lambda data: data["hidden_size"] // data["num_attention_heads"])
    """Width of one head; even."""
    hidden_act: Literal["silu", "swish"] = "silu"
    """Activation of the gate."""
    max_position_embeddings: int = Field(default=2048, gt=0)
    """Context length in tokens."""
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    """Added to the mean square before the root."""
    initializer_range: float = Field(default=0.02, ge=0)
    """Standard deviation of freshly initialised weights."""
    tie_word_embeddings: bool = False
    """The output projection is the embedding itself."""
    attention_bias: bool = False
    """q, k and v projections carry a bias."""
    attention_out_bias: bool = False
    """The attention output projection carries a bias."""
    mlp_bias: bool = False
    """The feed-forward projections carry a bias."""
    qk_norm: bool = False
    """RMSNorm over each head of q and k before the rotary embedding."""
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of attention weights in training."""
    rope_parameters: RopeParameters = RopeParameters()
    """Rotary embedding."""
    rope_interleave: bool = False
    """Rotate neighbouring pairs (2i, 2i+1) instead of halves (i, i + rotary_dim/2)."""
    rope_layers: tuple[bool, ...] = Field(default_factory=lambda data: (True,) * data["num_hidden_layers"])
    """Which layers use the rotary embedding."""
    sliding_window: int | None = Field(default=None, gt=0)
    """Tokens that a sliding layer sees, its own included."""
    layer_types: tuple[LayerType, ...] = Field(
        default_factory=lambda data: ("full_attention",) * data["num_hidden_layers"]
    )
    """Attention of each layer."""
    num_experts: int | None = Field(default=None, gt=0)
    """Experts of a sparse feed-forward layer; None: every layer is dense."""
    num_experts_per_tok: int | None = Field(default=None, gt=0)
    """Experts that a token goes through, beside the shared one."""
    moe_intermediate_size: int | None = Field(default=None, gt=0)
    """Width of one expert."""
    shared_expert_intermediate_size: int | None = Field(default=None, gt=0)
    """Width of the expert that every token goes through; None: there is none."""
    norm_topk_prob: bool = False
    """The weights of a token's experts add up to 1."""
    router_aux_loss_coef: float = Field(default=0.0, ge=0)
    """Weight in training of the experts' balance (:class:`~astrai_core.model.moe.RouterStats`; 1 is even, so that
    transformers' loss of the same name is `num_experts_per_tok` times as large)."""
    moe_layers: tuple[bool, ...] = Field(
        default_factory=lambda data: (data.get("num_experts") is not None,) * data["num_hidden_layers"]
    )
    """Which layers have experts."""
    bos_token_id: int | None = None
    """Beginning of text."""
    eos_token_id: int | tuple[int, ...] | None = None
    """End of text; several are allowed."""
    pad_token_id: int | None = None
    """Padding."""
    dtype: DType | None = None
    """Storage type of the checkpoint."""

    @field_validator("model_type")
    @classmethod
    def _known_family(cls, value: str) -> str:
        if value not in FAMILIES:
            raise ValueError(f"{value!r} is not supported{closest(value, FAMILIES)}; supported: {', '.join(FAMILIES)}")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of num_key_value_heads "
                f"({self.num_key_value_heads})"
            )
        if self.head_dim % 2 or self.rotary_dim % 2 or self.rotary_dim == 0:
            raise ValueError(f"head_dim ({self.head_dim}) and its rotated part ({self.rotary_dim}) must be even")
        for name in ("layer_types", "rope_layers", "moe_layers"):
            if len(getattr(self, name)) != self.num_hidden_layers:
                raise ValueError(
                    f"{name} has {len(getattr(self, name))} entries for num_hidden_layers = {self.num_hidden_layers}"
                )
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise ValueError("layer_types has sliding_attention layers, so sliding_window must be set")
        if self.num_experts is not None:
            if self.num_experts_per_tok is None or self.moe_intermediate_size is None:
                raise ValueError("num_experts needs num_experts_per_tok and moe_intermediate_size")
            if self.num_experts_per_tok > self.num_experts:
                raise ValueError(
                    f"num_experts_per_tok ({self.num_experts_per_tok}) is more than num_experts ({self.num_experts})"
                )
        elif any(self.moe_layers):
            raise ValueError("moe_layers has layers with experts, so num_experts must be set")
        return self

    @property
    def rotary_dim(self) -> int:
        """Leading dimensions of each head that are rotated."""
        return int(self.head_dim * self.rope_parameters.partial_rotary_factor)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End-of-text ids as a tuple."""
        if self.eos_token_id is None:
            return ()
        return self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)

    def window(self, layer: int) -> int | None:
        """Return how many tokens layer `layer` sees (its own included), or None for all."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, strict: bool = True) -> Self:
        """Read the content of a config.json.

        Parameters
        ----------
        data
            Keys and values of config.json.
        strict
            Refuse keys that the family does not read. Pass False only for keys known not to change the logits.

        Raises
        ------
        ConfigError
            One line naming the key, its value and the remedy.
        """
        fields = _from_hf(dict(data), strict)
        return super().from_dict(fields)

    @classmethod
    def from_pretrained(cls, directory: str | Path, *, strict: bool = True) -> Self:
        """Read ``config.json`` of a model directory (see :meth:`from_dict`)."""
        path = Path(directory) / "config.json"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{path}: no such file; a model directory needs a config.json") from None
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ConfigError(f"{path}: not valid JSON ({error}); download or write it again") from None
        if not isinstance(data, dict):
            raise ConfigError(f"{path}: must hold a JSON object, got {type(data).__name__}")
        try:
            return cls.from_dict(data, strict=strict)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """Return the content of an equivalent config.json, loadable by transformers and by :meth:`from_dict`."""
        return _to_hf(self)


def _from_hf(raw: dict[str, Any], strict: bool) -> dict[str, Any]:
    """Translate config.json's keys to the fields of ModelConfig."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(
            f"field 'model_type': {model_type!r} is not supported{closest(str(model_type), FAMILIES)}; "
            f"supported: {', '.join(FAMILIES)}"
        )
    family = FAMILIES[model_type]
    if raw.get("quantization_config"):
        raise ConfigError("field 'quantization_config': quantised checkpoints are not supported; use the original")
    known = COMMON_KEYS | family.reads
    for key in raw:
        if strict and key not in known and key not in INERT_KEYS:
            raise ConfigError(
                f"unknown field {key!r} for model_type {model_type!r}{closest(key, known)}; correct its name, or pass "
                "strict=False if it does not change the logits"
            )
    given = {key: value for key, value in raw.items() if key in known}
    if "num_local_experts" in given:
        given.setdefault("num_experts", given["num_local_experts"])
    for key, value in family.defaults.items():
        given.setdefault(key, value)
    fields = {
        key: given[key]
        for key in ModelConfig.__dataclass_fields__
        if key in given and key not in ("rope_parameters", "layer_types", "sliding_window", "attention_bias")
    }
    for optional in ("num_key_value_heads", "head_dim"):
        if fields.get(optional, 0) is None:
            del fields[optional]
    fields["rope_parameters"] = _rope_parameters(given)
    fields["rope_interleave"] = given.get("rope_interleave", given.get("rope_interleaved", False))
    bias = given.get("attention_bias", given.get("qkv_bias", False))
    fields["attention_bias"] = bias if family.qkv_bias is None else family.qkv_bias
    fields["attention_out_bias"] = bias if family.out_bias is None else family.out_bias
    fields["qk_norm"] = family.qk_norm
    dtype = given.get("dtype") or given.get("torch_dtype")
    fields["dtype"] = dtype.removeprefix("torch.") if isinstance(dtype, str) else dtype
    _layers(model_type, given, fields)
    return fields


def _rope_parameters(given: dict[str, Any]) -> RopeParameters:
    """Merge the key of transformers 5 (`rope_parameters`) with the older `rope_theta` and `rope_scaling`."""
    section = "rope_parameters" if given.get("rope_parameters") else "rope_scaling"
    raw = given.get(section) or {}
    if not isinstance(raw, Mapping):
        raise ConfigError(f"field {section!r}: must be an object, got {raw!r}")
    rope = dict(raw)
    rope["rope_type"] = rope.pop("rope_type", rope.get("type", "default"))
    rope.pop("type", None)
    if given.get("rope_theta") is not None:
        rope.setdefault("rope_theta", given["rope_theta"])
    if given.get("partial_rotary_factor") is not None:
        rope.setdefault("partial_rotary_factor", given["partial_rotary_factor"])
    if rope["rope_type"] in ("yarn", "llama3"):
        context = given.get("max_position_embeddings")
        rope.setdefault("original_max_position_embeddings", given.get("original_max_position_embeddings") or context)
        if rope.get("factor") is None and isinstance(context, int) and rope["original_max_position_embeddings"]:
            rope["factor"] = context / rope["original_max_position_embeddings"]
    try:
        return RopeParameters.from_dict(rope)
    except ConfigError as error:
        raise ConfigError(f"{section}: {str(error).removeprefix('RopeParameters: ')}") from None


def _layers(model_type: str, given: dict[str, Any], fields: dict[str, Any]) -> None:
    """Derive layer_types, sliding_window and rope_layers from the family's keys."""
    n_layers = given.get("num_hidden_layers")
    if not isinstance(n_layers, int):
        return  # reported by the field's own validation
    window = given.get("sliding_window")
    if model_type == "smollm3":
        interval = given["no_rope_layer_interval"]
        listed = given.get("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(n_layers)]
        fields["rope_layers"] = tuple(bool(flag) for flag in listed[:n_layers])
    if model_type != "mistral" and not given.get("use_sliding_window", False):
        window = None
    types = given.get("layer_types")
    if types is None:
        sliding = {
            "mistral": lambda i: True,
            "qwen3_moe": lambda i: True,
            "qwen2_moe": lambda i: i % 2 == 0 and i < given["max_window_layers"],
            "smollm3": lambda i: not fields["rope_layers"][i],
        }.get(model_type, lambda i: i >= given.get("max_window_layers", 0))
        types = [
            "sliding_attention" if window is not None and sliding(i) else "full_attention" for i in range(n_layers)
        ]
    if "sliding_attention" in types and window is None:
        raise ConfigError("field 'layer_types': sliding_attention needs sliding_window (and use_sliding_window: true)")
    if "decoder_sparse_step" in given:
        step, dense = given["decoder_sparse_step"], given["mlp_only_layers"] or ()
        fields["moe_layers"] = tuple(i not in dense and (i + 1) % step == 0 for i in range(n_layers))
    fields["layer_types"] = tuple(types)
    fields["sliding_window"] = window if "sliding_attention" in types else None


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    """Translate back to config.json's keys; refuse what the family cannot express."""
    family: Family = FAMILIES[config.model_type]
    rope = {key: value for key, value in config.rope_parameters.to_dict().items() if value is not None}
    if config.rope_parameters.truncate:
        rope.pop("truncate")
    if config.rope_parameters.partial_rotary_factor == 1.0:
        rope.pop("partial_rotary_factor")
    same = """vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads
    head_dim hidden_act max_position_embeddings rms_norm_eps initializer_range tie_word_embeddings
    attention_dropout bos_token_id pad_token_id""".split()
    data: dict[str, Any] = {"architectures": [family.architecture], "model_type": config.model_type}
    data |= {key: getattr(config, key) for key in same}
    eos = config.eos_token_id
    data["eos_token_id"] = list(eos) if isinstance(eos, tuple) else eos
    data["rope_parameters"] = rope
    if config.dtype is not None:
        data["dtype"] = config.dtype
    if "attention_bias" in family.reads:
        data["attention_bias"] = config.attention_bias
    if "mlp_bias" in family.reads:
        data["mlp_bias"] = config.mlp_bias
    if "sliding_window" in family.reads:
        data["sliding_window"] = config.sliding_window
    if "use_sliding_window" in family.reads:
        data["use_sliding_window"] = config.sliding_window is not None
    if "layer_types" in family.reads:
        data["layer_types"] = list(config.layer_types)
    if "qkv_bias" in family.reads:
        data["qkv_bias"] = config.attention_bias
    if config.num_experts is not None:
        data |= {key: getattr(config, key) for key in MOE_FIELDS if key in family.reads}
        data["mlp_only_layers"] = [i for i, has_experts in enumerate(config.moe_layers) if not has_experts]
    if "no_rope_layers" in family.reads:
        data["no_rope_layers"] = [int(flag) for flag in config.rope_layers]
    if config.rope_interleave:
        data["rope_interleave"] = True
    if ModelConfig.from_dict(data) != config:
        raise ConfigError(
            f"this architecture is not expressible as model_type {config.model_type!r} "
            "(biases, qk_norm, layer_types and rope_layers follow from the family); choose another model_type"
        )
    return data
