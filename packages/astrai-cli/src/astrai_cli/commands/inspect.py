"""``astrai inspect``: what a model is, without loading its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import rich_click as click

from astrai_cli.loading import busy
from astrai_cli.options import ModelName, debug_option
from astrai_cli.output import Fact, human_bytes, human_count, print_json, print_report

if TYPE_CHECKING:
    from astrai_core import ModelConfig, Tokenizer
    from astrai_core.checkpoint.source import ModelSource

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
SAMPLE = (
    {"role": "user", "content": "Hello!"},
    {"role": "assistant", "content": "Hi!"},
    {"role": "user", "content": "How are you?"},
)
"""The conversation that shows what a chat template does."""

DIGITS = "2025"


@click.command()
@click.argument("model", type=ModelName())
@click.option("--json", "as_json", is_flag=True, show_default=False, help="Print one JSON object instead of text.")
@debug_option
def inspect(model: str, as_json: bool) -> None:
    """Show architecture, size, memory, tokenizer and template.

    MODEL is a directory, a .gguf file, a Hugging Face id, or smollm2. Weights are not loaded: sizes are computed from
    the configuration.
    """
    with busy(f"Reading {model}"):
        from astrai_core.checkpoint.source import open_source

        source = open_source(model)
        config = source.config()
        parameters = count_parameters(config)
        tokenizer, tokenizer_error = _open_tokenizer(source)
        report = {
            "model": model,
            "path": str(source.path),
            "config": config.to_dict(),
            "parameters": parameters,
            "memory": memory(config, parameters["total"]),
            "tokenizer": {"error": tokenizer_error} if tokenizer is None else describe_tokenizer(tokenizer),
            "chat_template": None if tokenizer is None else describe_template(tokenizer),
            "generation_config": source.generation_config(),
            "files": list_files(source),
        }
    if as_json:
        print_json(report)
    else:
        print_report(sections(report, config))


def _open_tokenizer(source: ModelSource) -> tuple[Tokenizer | None, str | None]:
    """Return the tokenizer, or why there is none: the rest can still be shown."""
    from astrai_core.errors import TokenizerError

    try:
        return source.tokenizer(), None
    except TokenizerError as error:
        return None, str(error)


def count_parameters(config: ModelConfig) -> dict[str, int]:
    """Count the parameters of a model on the meta device: shared ones once."""
    import torch

    from astrai_core.model.transformer import CausalLM, ModelFactory

    with torch.device("meta"):
        model = ModelFactory.create(config.model_type, config)
    assert isinstance(model, CausalLM), "every family registers CausalLM"
    count = lambda module: sum(parameter.numel() for parameter in module.parameters())
    embedding = count(model.model.embed_tokens)
    return {
        "total": count(model),
        "embedding": embedding,
        "output_projection": 0 if config.tie_word_embeddings else count(model.lm_head),
        "per_layer": count(model.model.layers[0]),
    }


def memory(config: ModelConfig, n_parameters: int) -> dict[str, Any]:
    """Compute the bytes of weights, and of keys and values, for each dtype.

    Keys and values take ``2 * layers * key/value heads * head_dim`` numbers a token.
    """
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    context = config.max_position_embeddings
    return {
        "weights_bytes": {dtype: n_parameters * size for dtype, size in ITEM_BYTES.items()},
        "kv_cache_bytes_per_token": {dtype: numbers * size for dtype, size in ITEM_BYTES.items()},
        "kv_cache_bytes_full_context": {dtype: numbers * size * context for dtype, size in ITEM_BYTES.items()},
    }


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the facts of a tokenizer; ``digits`` shows how it cuts a number."""
    ids = tokenizer.encode(DIGITS, add_special_tokens=False)
    return {
        "error": None,
        "vocab_size": tokenizer.vocab_size,
        "special_tokens": {
            name: [token, tokenizer.token_to_id(token)] for name, token in tokenizer.special_tokens.items()
        },
        "eos_token_ids": list(tokenizer.eos_token_ids),
        "digits": [tokenizer.decode(token_id) for token_id in ids],
    }


def describe_template(tokenizer: Tokenizer) -> dict[str, Any] | None:
    """Return the names of the chat templates and how the default one renders a sample; None without any."""
    from astrai_core.errors import ChatTemplateError, RequestError

    template = tokenizer.chat_template
    if template is None:
        return None
    described: dict[str, Any] = {"names": list(template.names), "sample": None, "error": None}
    try:
        described["sample"] = tokenizer.apply_chat_template(list(SAMPLE), tokenize=False)
    except (ChatTemplateError, RequestError) as error:
        described["error"] = str(error)
    return described


def list_files(source: ModelSource) -> dict[str, Any]:
    """Return the files with their sizes, how the tensors are stored, and what is wrong with the weight files."""
    from astrai_core.checkpoint.source import GGUFSource
    from astrai_core.checkpoint.weights import shard_paths
    from astrai_core.errors import CheckpointError

    found: dict[str, Any] = {"bytes": {}, "storage_types": None, "error": None}
    if isinstance(source, GGUFSource):
        found["bytes"][source.path.name] = source.path.stat().st_size
        found["storage_types"] = source.file.storage_types()
        return found
    found["bytes"] = {
        str(path.relative_to(source.path)): path.stat().st_size
        for path in sorted(source.path.rglob("*"))
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(source.path).parts)
    }
    try:
        shard_paths(source.path)
    except CheckpointError as error:
        found["error"] = str(error)
    return found


def sections(report: dict[str, Any], config: ModelConfig) -> list[tuple[str, list[Fact]]]:
    """Arrange the report for reading."""
    parameters, use = report["parameters"], report["memory"]
    n_layers = config.num_hidden_layers
    heads = f"{config.num_attention_heads} query, {config.num_key_value_heads} key/value, {config.head_dim} wide"
    tied = "shared with the output projection" if config.tie_word_embeddings else "output projection of its own"
    architecture = [
        Fact("family", f"{config.model_type}, {report['config']['architectures'][0]}"),
        Fact("layers", f"{n_layers}, {config.hidden_size} wide, feed-forward {config.intermediate_size}"),
        Fact("attention heads", heads),
        Fact("attention", _attention(config)),
        Fact("position", _rope(config)),
        Fact("context", f"{config.max_position_embeddings} tokens"),
        Fact("vocabulary", f"{config.vocab_size} tokens, {tied}"),
    ]
    size = [
        Fact("parameters", f"{human_count(parameters['total'])} ({parameters['total']:,})"),
        Fact("embedding", human_count(parameters["embedding"])),
        Fact("each layer", f"{human_count(parameters['per_layer'])} x {n_layers}"),
        Fact("stored as", config.dtype or ("see tensors below" if report["files"]["storage_types"] else "unknown")),
    ]
    kv_full = {dtype: human_bytes(n) for dtype, n in use["kv_cache_bytes_full_context"].items()}
    room = [
        Fact(f"weights, {dtype}", human_bytes(n)) for dtype, n in use["weights_bytes"].items() if dtype != "float16"
    ] + [
        Fact(f"cache, {dtype}", f"{human_bytes(n)} a token, {kv_full[dtype]} for the full context")
        for dtype, n in use["kv_cache_bytes_per_token"].items()
        if dtype != "float16"
    ]
    return [
        ("Architecture", architecture),
        ("Size", size),
        ("Memory", room),
        ("Tokenizer", _tokenizer_facts(report["tokenizer"])),
        ("Chat template", _template_facts(report["chat_template"])),
        ("Files", _file_facts(report["files"], report["path"])),
    ]


def _attention(config: ModelConfig) -> str:
    n_sliding = config.layer_types.count("sliding_attention")
    parts = ["causal" if n_sliding == 0 else f"{config.sliding_window}-token window in {n_sliding} layers"]
    parts += [name for name, on in (("q and k normed", config.qk_norm), ("with biases", config.attention_bias)) if on]
    return ", ".join(parts)


def _rope(config: ModelConfig) -> str:
    rope = config.rope_parameters
    factor = "" if rope.factor is None else f" x {rope.factor:g}"
    without = config.rope_layers.count(False)
    skipped = f", none in {without} layers" if without else ""
    return f"rotary, base {rope.rope_theta:g}, scaling {rope.rope_type}{factor}{skipped}"


def _tokenizer_facts(tokenizer: dict[str, Any]) -> list[Fact]:
    if tokenizer["error"] is not None:
        return [Fact("tokenizer", tokenizer["error"], False)]
    named = [f"{name.removesuffix('_token')} {token} ({i})" for name, (token, i) in tokenizer["special_tokens"].items()]
    ends = ", ".join(map(str, tokenizer["eos_token_ids"]))
    return [
        Fact("tokens", str(tokenizer["vocab_size"])),
        Fact("special", ", ".join(named) or "none"),
        Fact(
            "end of text",
            ends or "none: answers end at --max-tokens, --stop or a full context",
            None if ends else False,
        ),
        Fact("digits", f"{DIGITS} -> {' | '.join(tokenizer['digits'])}"),
    ]


def _template_facts(template: dict[str, Any] | None) -> list[Fact]:
    if template is None:
        return [Fact("template", "none: use `astrai generate --raw`", False)]
    if template["error"] is not None:
        return [Fact("template", template["error"], False)]
    names = [Fact("names", ", ".join(template["names"]))] if template["names"] != ["default"] else []
    lines = template["sample"].rstrip("\n").split("\n")
    return [*names, *(Fact("" if i else "renders as", line) for i, line in enumerate(lines))]


def _file_facts(files: dict[str, Any], path: str) -> list[Fact]:
    sizes = files["bytes"]
    if files["storage_types"] is not None:
        stored = ", ".join(f"{count} {kind}" for kind, count in files["storage_types"].items())
        return [Fact("file", f"{path}, {human_bytes(sum(sizes.values()))}"), Fact("tensors", stored)]
    listed = [Fact(name, human_bytes(n)) for name, n in sizes.items()]
    return [Fact("directory", path), *listed, *([Fact("weights", files["error"], False)] if files["error"] else [])]
