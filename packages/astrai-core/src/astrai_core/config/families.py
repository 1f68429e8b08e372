"""The model families: which keys of a Hugging Face config.json each one reads, and what their absence means.

A key that a family neither reads nor knows to be without effect is refused by name: a key that changes the
architecture and is skipped in silence gives wrong logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

COMMON_KEYS = frozenset(
    """model_type architectures dtype torch_dtype vocab_size hidden_size intermediate_size num_hidden_layers
    num_attention_heads num_key_value_heads head_dim hidden_act max_position_embeddings rms_norm_eps
    initializer_range tie_word_embeddings rope_parameters rope_scaling rope_theta partial_rotary_factor
    rope_interleave rope_interleaved original_max_position_embeddings bos_token_id eos_token_id pad_token_id
    attention_dropout""".split()
)
"""Keys that every family reads."""

INERT_KEYS = frozenset(
    """_name_or_path transformers_version transformers.js_config use_cache pretraining_tp id2label label2id
    output_attentions output_hidden_states return_dict return_dict_in_generate problem_type
    chunk_size_feed_forward is_encoder_decoder is_decoder is_llama_config add_cross_attention
    cross_attention_hidden_size decoder_start_token_id finetuning_task forced_bos_token_id forced_eos_token_id
    encoder_no_repeat_ngram_size exponential_decay_length_penalty bad_words_ids begin_suppress_tokens
    suppress_tokens sep_token_id prefix task_specific_params tf_legacy_loss tie_encoder_decoder tokenizer_class
    torchscript typical_p use_bfloat16 pruned_heads remove_invalid_values diversity_penalty do_sample
    early_stopping length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_scores repetition_penalty temperature top_k top_p unsloth_fixed
    unsloth_version""".split()
)
"""Keys without effect on the logits: book-keeping, output options, and old generation settings."""

_WINDOW_KEYS = frozenset({"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"})


@dataclass(frozen=True)
class Family:
    """What one ``model_type`` reads beyond :data:`COMMON_KEYS`, and the values that absent keys stand for."""

    architecture: str
    reads: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: bool | None = None
    """Bias of q, k, v: fixed by the family, or None if ``attention_bias`` decides."""
    out_bias: bool | None = None
    """Bias of the attention output projection: fixed, or None if ``attention_bias`` decides."""
    qk_norm: bool = False
    """RMSNorm over each head of q and k before the rotary embedding."""


MOE_FIELDS = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "norm_topk_prob",
    "router_aux_loss_coef",
)
"""Fields of ModelConfig about experts that are keys of config.json as well."""

_MOE_KEYS = frozenset(
    {*MOE_FIELDS, "num_local_experts", "decoder_sparse_step", "mlp_only_layers", "output_router_logits"}
) - {"shared_expert_intermediate_size"}
_MOE_DEFAULTS = {
    "norm_topk_prob": False,
    "router_aux_loss_coef": 0.001,
    "decoder_sparse_step": 1,
    "mlp_only_layers": (),
}

_LLAMA_DEFAULTS = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "tie_word_embeddings": False}
_QWEN_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        frozenset({"attention_bias", "mlp_bias"}),
        {**_LLAMA_DEFAULTS, "attention_bias": False},
    ),
    "mistral": Family(
        "MistralForCausalLM",
        frozenset({"sliding_window"}),
        {
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": False,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
        qkv_bias=False,
        out_bias=False,
    ),
    "qwen2": Family("Qwen2ForCausalLM", _WINDOW_KEYS, _QWEN_DEFAULTS, qkv_bias=True, out_bias=False),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        _WINDOW_KEYS | {"attention_bias"},
        {**_QWEN_DEFAULTS, "head_dim": 128, "attention_bias": False},
        qk_norm=True,
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        _WINDOW_KEYS | _MOE_KEYS | {"shared_expert_intermediate_size", "qkv_bias"},
        {
            **_QWEN_DEFAULTS,
            **_MOE_DEFAULTS,
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "qkv_bias": True,
        },
        out_bias=False,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        (_WINDOW_KEYS - {"layer_types"}) | _MOE_KEYS | {"attention_bias"},
        {
            **_QWEN_DEFAULTS,
            **_MOE_DEFAULTS,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "attention_bias": False,
        },
        qk_norm=True,
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        frozenset(
            {"attention_bias", "mlp_bias", "no_rope_layers", "no_rope_layer_interval", "use_sliding_window"}
            | {"sliding_window", "layer_types", "max_window_layers"}
        ),
        {
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
            "num_key_value_heads": 4,
            "rope_theta": 2e6,
            "no_rope_layer_interval": 4,
            "use_sliding_window": False,
            "sliding_window": None,
            "attention_bias": False,
        },
    ),
}
"""``model_type`` -> family; the defaults are those of transformers' configuration classes."""
