"""The tokenizer inside a GGUF file, rebuilt as the Hugging Face tokenizer it was converted from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from astrai_core.checkpoint.gguf_config import end_ids, special_ids
from astrai_core.checkpoint.gguf_reader import Header
from astrai_core.errors import TokenizerError
from astrai_core.tokenizer import ChatTemplate, Tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
_NAMED = ("bos", "eos", "unk", "pad", "sep", "cls", "mask")

# Split patterns as the tokenizer.json of the named model families have them.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _WORDS + r"\p{N}{1,3}" + _REST
_QWEN2 = _WORDS + r"\p{N}" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PORO = " ?[^(\\s|.,!?…。，、।۔،)]+"


@dataclass(frozen=True)
class _Pre:
    """How one ``tokenizer.ggml.pre`` splits text: each pattern in turn on what the ones before it left."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    """A whole word in the vocabulary is taken without merging."""
    adds_bos: bool = False
    """BOS is added where the file has no ``add_bos_token``."""
    nfc: bool = False
    """Text is first composed (Unicode NFC)."""


_GPT2_PRE = _Pre((_GPT2,))
_DIGITS_PRE = _Pre((r"\p{N}", _GPT2))
_LLAMA3_PRE = _Pre((_LLAMA3,), ignore_merges=True, adds_bos=True)
_QWEN_PRE = _Pre((_QWEN2,))
_PRE_TOKENIZERS = {
    "default": _Pre((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "gigachat", "exaone4", "a.x-4.0"), _GPT2_PRE),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS_PRE),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0"), _LLAMA3_PRE),
    **dict.fromkeys(("smaug-bpe", "dbrx"), _Pre((_LLAMA3,))),
    "qwen2": _Pre((_QWEN2,), nfc=True),
    **dict.fromkeys(("deepseek-r1-qwen", "megrez", "kormo", "stablelm2", "hunyuan"), _QWEN_PRE),
    "tekken": _Pre((_TEKKEN,), ignore_merges=True, adds_bos=True),
    "deepseek-coder": _Pre((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥\u0800-一가-\ud7ff]+", r"\p{N}")),
    "poro-chat": _Pre((_PORO,)),
    "viking": _Pre((_PORO, r"\p{N}")),
}
"""``tokenizer.ggml.pre`` -> pre-tokenizer; names and groups as in llama.cpp."""


def build_tokenizer(header: Header) -> Tokenizer:
    """Rebuild the tokenizer of a GGUF file.

    Raises
    ------
    TokenizerError
        The model or the pre-tokenizer is not supported, or the vocabulary is inconsistent; the key is named.
    CheckpointError
        A key is missing.
    """
    kind = header.string("tokenizer.ggml.model")
    builder = {"gpt2": _byte_level, "llama": _sentencepiece}.get(kind)
    if builder is None:
        raise TokenizerError(f"{header.path}: tokenizer.ggml.model {kind!r} is not supported; supported: gpt2, llama")
    tokens = header.strings("tokenizer.ggml.tokens")
    types = [int(t) for t in header.numbers("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))]
    if len(types) != len(tokens):
        _inconsistent(header, "token_type", f"has {len(types)} entries for {len(tokens)} tokens")
    vocab: dict[str, int] = {}
    for i, (token, token_type) in enumerate(zip(tokens, types, strict=True)):
        # Converters fill ids that only the embedding has with "[PAD<id>]"; the original tokenizer has no such tokens.
        if token_type == _UNUSED and token == f"[PAD{i}]":
            continue
        if vocab.setdefault(token, i) != i:
            _inconsistent(header, "tokens", f"has {token!r} twice, as {vocab[token]} and {i}")
    named = {}
    for name, i in special_ids(header).items():
        if i >= len(tokens):
            _inconsistent(header, f"{name}_token_id", f"is {i}, but there are {len(tokens)} tokens")
        named[name] = tokens[i]
    backend, adds_bos = builder(header, vocab, types, named.get("unk"))
    special = [token for token, i in vocab.items() if types[i] in (_CONTROL, _UNKNOWN)]
    defined = [token for token, i in vocab.items() if types[i] == _USER_DEFINED]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, normalized=False) for token in defined])
    around = {
        "bos": header.flag("tokenizer.ggml.add_bos_token", adds_bos),
        "eos": header.flag("tokenizer.ggml.add_eos_token", False),
    }
    for name, added in around.items():
        if added and name not in named:
            _inconsistent(header, f"{name}_token_id", f"is missing, though add_{name}_token asks for it")
    if any(around.values()):
        before = [named["bos"]] if around["bos"] else []
        after = [named["eos"]] if around["eos"] else []
        backend.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *(f"{t}:1" for t in before), "$B:1", *(f"{t}:1" for t in after)],
            special_tokens=[(token, vocab[token]) for token in dict.fromkeys(before + after)],
        )
    config: dict[str, Any] = {f"{name}_token": named[name] for name in _NAMED if name in named}
    config |= {f"add_{name}_token": added for name, added in around.items()}
    config["additional_special_tokens"] = [token for token in special if token not in config.values()]
    config["clean_up_tokenization_spaces"] = False
    length = header.metadata.get(f"{header.metadata.get('general.architecture')}.context_length")
    if length is not None:
        config["model_max_length"] = length
    return Tokenizer(backend, config=config, chat_template=_chat_template(header), extra_eos_token_ids=end_ids(header))


def _inconsistent(header: Header, key: str, problem: str) -> NoReturn:
    raise TokenizerError(f"{header.path}: tokenizer.ggml.{key} {problem}; convert the model again")


def _chat_template(header: Header) -> ChatTemplate | None:
    keys = {"default": "tokenizer.chat_template"}
    keys |= {name: f"tokenizer.chat_template.{name}" for name in header.strings("tokenizer.chat_templates", [])}
    found = {name: header.string(key) for name, key in keys.items() if key in header.metadata}
    return ChatTemplate(found, origin=f"{header.path}: tokenizer.chat_template") if found else None


def _given_merges(header: Header, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    merges = []
    for merge in header.strings("tokenizer.ggml.merges"):
        # A token may begin with a space, never hold one inside.
        at = merge.find(" ", 1)
        left, right = merge[:at], merge[at + 1 :]
        if at < 0 or left not in vocab or right not in vocab or left + right not in vocab:
            _inconsistent(header, "merges", f"has {merge!r}, whose parts are not in the vocabulary")
        merges.append((left, right))
    return merges


def _byte_level(
    header: Header, vocab: dict[str, int], types: list[int], unk: str | None
) -> tuple[tokenizers.Tokenizer, bool]:
    """GPT-2's byte-level BPE, split as ``tokenizer.ggml.pre`` says; and whether it adds BOS by default."""
    name = header.string("tokenizer.ggml.pre", "default")
    pre = _PRE_TOKENIZERS.get(name)
    if pre is None:
        raise TokenizerError(
            f"{header.path}: tokenizer.ggml.pre {name!r} is not supported; use the model's original tokenizer.json "
            f"(supported: {', '.join(_PRE_TOKENIZERS)})"
        )
    backend = tokenizers.Tokenizer(models.BPE(vocab, _given_merges(header, vocab), ignore_merges=pre.ignore_merges))
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    # The original tokenizers leave the GPT-2 pattern to ByteLevel, which matters where it adds a prefix space.
    by_gpt2 = pre.patterns[-1] == _GPT2
    splits = pre.patterns[:-1] if by_gpt2 else pre.patterns
    prefix = header.flag("tokenizer.ggml.add_space_prefix", False)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in splits),
            pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=by_gpt2),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend, pre.adds_bos


def _sentencepiece(
    header: Header, vocab: dict[str, int], types: list[int], unk: str | None
) -> tuple[tokenizers.Tokenizer, bool]:
    """SentencePiece BPE with byte fallback; and that it adds BOS by default."""
    if "tokenizer.ggml.merges" in header.metadata:
        merges = _given_merges(header, vocab)
    else:
        scores = header.numbers("tokenizer.ggml.scores")
        if len(scores) != len(types):
            _inconsistent(header, "scores", f"has {len(scores)} entries for {len(types)} tokens")
        merges = _merges_from_scores(vocab, types, scores)
    prefix = header.flag("tokenizer.ggml.add_space_prefix", True)
    model = models.BPE(vocab, merges, unk_token=unk, fuse_unk=True, byte_fallback="<0x00>" in vocab)
    backend = tokenizers.Tokenizer(model)
    to_bar = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), to_bar]) if prefix else to_bar
    stages = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*stages, decoders.Strip(" ", 1, 0)] if prefix else stages)
    return backend, True


def _merges_from_scores(
    vocab: Mapping[str, int], types: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """The merge list of a SentencePiece BPE model.

    SentencePiece merges the neighbours whose join has the best score of all joins in the vocabulary (Kudo and
    Richardson 2018, section 3.2): every split of a piece into two pieces is a merge, ranked by the piece's score.
    """
    pieces = {token: i for token, i in vocab.items() if types[i] in (_NORMAL, _USER_DEFINED)}
    ranked = [
        (-scores[i], -cut, token)
        for token, i in pieces.items()
        for cut in range(1, len(token))
        if token[:cut] in pieces and token[cut:] in pieces
    ]
    ranked.sort()
    return [(token[:-cut], token[-cut:]) for _, cut, token in ranked]
