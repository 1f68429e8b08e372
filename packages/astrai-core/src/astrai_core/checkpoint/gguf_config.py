"""A GGUF file's metadata as the config.json and generation_config.json of the model it was converted from."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import numpy as np

from astrai_core.checkpoint.gguf_reader import Header
from astrai_core.errors import CheckpointError

ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}
"""GGUF architecture -> (model_type, class); Mistral and SmolLM are "llama" in GGUF."""

ROPE_FREQS = "rope_freqs.weight"
_END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|end_of_turn|>", "<|eom_id|>")
_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
_YARN_EXTRAS = {
    "yarn_attn_factor": "attention_factor",
    "attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}


def model_config(header: Header, rope_freqs: np.ndarray | None) -> dict[str, Any]:
    """Content of an equivalent config.json.

    Parameters
    ----------
    header
        Of the file.
    rope_freqs
        ``rope_freqs.weight``, float32 [head_dim / 2]: what each rotary frequency is divided by; None without it.

    Raises
    ------
    CheckpointError
        A key is missing, or the model has something this architecture does not.
    """
    arch = header.string("general.architecture")
    if arch not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        _unsupported(header, f"architecture {arch!r}", f"supported: {supported}")
    if header.integer(f"{arch}.expert_count", 0):
        _unsupported(header, "a mixture of experts", "use a dense model")
    model_type, model_class = ARCHITECTURES[arch]
    hidden_size = header.integer(f"{arch}.embedding_length")
    n_heads = header.integer(f"{arch}.attention.head_count")
    head_dim = header.integer(f"{arch}.attention.key_length", hidden_size // max(n_heads, 1))
    rotary_dim = header.integer(f"{arch}.rope.dimension_count", head_dim)
    if rotary_dim != head_dim or header.integer(f"{arch}.attention.value_length", head_dim) != head_dim:
        _unsupported(header, "rope.dimension_count or value_length other than the head size", "use another model")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(
            f"{header.path}: tensor 'token_embd.weight' is missing; download or convert the file again"
        )
    config: dict[str, Any] = {
        "architectures": [model_class],
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": header.integer(f"{arch}.feed_forward_length"),
        "num_hidden_layers": header.integer(f"{arch}.block_count"),
        "num_attention_heads": n_heads,
        "num_key_value_heads": header.integer(f"{arch}.attention.head_count_kv", n_heads),
        "hidden_act": "silu",
        "max_position_embeddings": header.integer(f"{arch}.context_length"),
        "rms_norm_eps": header.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        "rope_theta": header.number(f"{arch}.rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    if arch != "qwen2" or head_dim * n_heads != hidden_size:
        config["head_dim"] = head_dim
    if arch != "qwen2":
        config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    if arch == "llama":
        config["mlp_bias"] = "blk.0.ffn_up.bias" in header.tensors
        window = header.integer("llama.attention.sliding_window", 0)
        if window:
            for key in ("attention_bias", "mlp_bias"):
                del config[key]
            config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
    scaling = _rope_scaling(header, arch, rope_freqs, config["rope_theta"], head_dim)
    if scaling is not None:
        config["rope_scaling"] = scaling
    for name, token_id in special_ids(header).items():
        if name in ("bos", "eos", "pad"):
            config[f"{name}_token_id"] = token_id
    return config


def _unsupported(header: Header, what: str, remedy: str) -> NoReturn:
    raise CheckpointError(f"{header.path}: {what} is not supported in GGUF files; {remedy}")


def special_ids(header: Header) -> dict[str, int]:
    """Ids of the special tokens that the file names: bos, eos, unk, pad, sep, cls, mask, eot, eom."""
    keys = {"unk": "unknown", "pad": "padding", "sep": "seperator"}  # "seperator" is how the format spells it
    names = ("bos", "eos", "unk", "pad", "sep", "cls", "mask", "eot", "eom")
    # Files of the first converters leave out what every SentencePiece Llama has.
    found = {"unk": 0, "bos": 1, "eos": 2} if header.metadata.get("tokenizer.ggml.model") == "llama" else {}
    for name in names:
        key = f"tokenizer.ggml.{keys.get(name, name)}_token_id"
        if key in header.metadata:
            found[name] = header.integer(key)
    return {name: found[name] for name in names if name in found}


def end_ids(header: Header) -> list[int]:
    """Ids that end a generation: EOS, end of turn, end of message, each once.

    Llama 3 files of early converters name only ``<|end_of_text|>`` although the template ends turns with
    ``<|eot_id|>``; so an end-of-turn token that the chat template writes counts too.
    """
    special = special_ids(header)
    ids = [special[name] for name in ("eos", "eot", "eom") if name in special]
    template = header.string("tokenizer.chat_template", "")
    written = [token for token in _END_OF_TURN if token in template]
    if written:
        tokens = header.strings("tokenizer.ggml.tokens")
        ids += [tokens.index(token) for token in written if token in tokens]
    return list(dict.fromkeys(ids))


def generation_config(header: Header) -> dict[str, Any]:
    """Content of an equivalent generation_config.json: ids of special tokens, and sampling defaults if it has some."""
    special = special_ids(header)
    config: dict[str, Any] = {f"{name}_token_id": special[name] for name in ("bos", "pad") if name in special}
    ends = end_ids(header)
    if ends:
        config["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    config |= {name: header.metadata[key] for key, name in _SAMPLING.items() if key in header.metadata}
    return config


def _rope_scaling(
    header: Header, arch: str, rope_freqs: np.ndarray | None, theta: float, head_dim: int
) -> dict[str, Any] | None:
    prefix = f"{arch}.rope.scaling"
    kind = header.string(f"{prefix}.type", "none")
    legacy = header.number(f"{arch}.rope.scale_linear", 1.0)
    if rope_freqs is not None:
        if kind not in ("none", "llama3"):
            _unsupported(header, f"{ROPE_FREQS} together with rope.scaling.type {kind!r}", "use another model")
        if rope_freqs.shape != (head_dim // 2,):
            raise CheckpointError(
                f"{header.path}: tensor {ROPE_FREQS!r} has shape {list(rope_freqs.shape)}, not [{head_dim // 2}]; "
                "convert the model again"
            )
        if (rope_freqs == 1).all():
            return None
        sane = theta > 0 and np.isfinite(rope_freqs).all() and (rope_freqs > 0).all()
        scaling = llama3_scaling(rope_freqs.astype(np.float64), theta, head_dim) if sane else None
        if scaling is None:
            _unsupported(header, f"{ROPE_FREQS} that is no Llama 3 scaling", "use another model")
        return scaling
    if kind == "none":
        return {"rope_type": "linear", "factor": legacy} if legacy != 1.0 else None
    if kind not in ("linear", "yarn"):
        _unsupported(header, f"rope.scaling.type {kind!r}", "use a model with linear, yarn or llama3 scaling")
    scaling = {"rope_type": kind, "factor": header.number(f"{prefix}.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = header.integer(f"{prefix}.original_context_length")
        for key, name in _YARN_EXTRAS.items():
            if f"{prefix}.{key}" in header.metadata:
                scaling[name] = header.number(f"{prefix}.{key}")
    return scaling


def _llama3_divisors(x: np.ndarray, factor: float, high: float, original: float) -> np.ndarray:
    """What Llama 3.1 divides frequencies by; ``x`` are inverse wavelengths, the low-frequency factor is 1."""
    smooth = np.clip((original * x - 1) / (high - 1), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def llama3_scaling(divisors: np.ndarray, theta: float, head_dim: int) -> dict[str, Any] | None:
    """Recover the parameters of Llama 3.1's rotary scaling from the per-frequency divisors that GGUF stores.

    Between the two plateaus 1/divisor is linear in the inverse wavelength. Only the ratios of the original context to
    ``low_freq_factor`` and ``high_freq_factor`` matter, so the former is 1, as in every published model. Small heads
    have less than two frequencies in between; any parameters with the same divisors serve then.

    Parameters
    ----------
    divisors
        Float64 [head_dim / 2], not all 1.

    Returns
    -------
    dict or None
        A ``rope_scaling`` that gives these divisors; None if there is none.
    """
    x = theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    factor = float(f"{divisors.max():.6g}")
    kept, scaled = divisors < 1 + 1e-5, divisors > factor * (1 - 1e-5)
    between = ~(kept | scaled)
    smooth = (1 / divisors[between] - 1 / factor) / (1 - 1 / factor)
    usual_highs = (4.0, 8.0, 2.0, 1.5, 1.1)
    if between.sum() >= 2:
        slope, intercept = np.polyfit(x[between], smooth, 1)
        high = 1 - 1 / intercept
        candidates = [(round(high, 2), -slope / intercept), (high, -slope / intercept)]
    elif between.sum() == 1:
        candidates = [(high, ((high - 1) * smooth[0] + 1) / x[between][0]) for high in usual_highs]
    else:
        longest_kept, shortest_scaled = (1 / x[kept]).max(initial=1.0), (1 / x[scaled]).min()
        candidates = [
            (4.0, 8192.0),
            *((high, math.sqrt(high * longest_kept * shortest_scaled)) for high in usual_highs),
        ]
    for high, original in candidates:
        if high > 1 and np.allclose(_llama3_divisors(x, factor, high, round(original)), divisors, rtol=1e-3):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": float(high),
                "original_max_position_embeddings": round(original),
            }
    return None
