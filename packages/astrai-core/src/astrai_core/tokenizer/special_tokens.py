"""The special tokens that tokenizer_config.json declares, brought into a Rust tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken

from astrai_core.errors import TokenizerError

_FILE = "tokenizer_config.json"
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA_TOKENS = ("extra_special_tokens", "additional_special_tokens")


def _as_added_token(value: Any, where: str, *, special: bool) -> AddedToken:
    """An AddedToken from the forms that the file has held over the years: text or an object."""
    if isinstance(value, str):
        return AddedToken(value, special=special, normalized=not special)
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        flags = {k: bool(value[k]) for k in ("single_word", "lstrip", "rstrip", "normalized") if k in value}
        return AddedToken(value["content"], special=bool(value.get("special", special)), **flags)
    raise TokenizerError(f"{_FILE}: {where} must be a string or an object with 'content'")


def declare_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> tuple[dict[str, str], list[int]]:
    """Add the tokens that the vocabulary lacks or flags differently, as transformers does.

    Parameters
    ----------
    backend
        Changed in place.
    config
        Content of ``tokenizer_config.json``.

    Returns
    -------
    named : dict of str to str
        Named special tokens (``bos_token``, ..., and a model's own ``*_token`` entries).
    ids : list of int
        Ids of the named and the additional special tokens, each once.

    Raises
    ------
    TokenizerError
        An entry has a form that is not known.
    """
    present = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    declared = config.get("added_tokens_decoder") or {}
    if not isinstance(declared, dict) or not all(str(key).isdecimal() for key in declared):
        raise TokenizerError(f"{_FILE}: added_tokens_decoder must be an object whose keys are token ids")
    for key in sorted(declared, key=int):
        token = _as_added_token(declared[key], f"added_tokens_decoder[{key}]", special=False)
        if repr(token) != repr(present.get(token.content)):
            backend.add_tokens([token])
            present[token.content] = token
    named = {
        name: _as_added_token(value, name, special=True)
        for name, value in config.items()
        if (name in _NAMED_TOKENS and value is not None) or (name.endswith("_token") and isinstance(value, str | dict))
    }
    extra: list[AddedToken] = []
    for key in _EXTRA_TOKENS:
        value = config.get(key) or []
        if isinstance(value, dict):
            named |= {name: _as_added_token(v, f"{key}.{name}", special=True) for name, v in value.items()}
        elif isinstance(value, list):
            extra += [_as_added_token(v, f"{key}[{i}]", special=True) for i, v in enumerate(value)]
        else:
            raise TokenizerError(f"{_FILE}: {key} must be a list or an object of tokens, not {type(value).__name__}")
    for token in (*named.values(), *extra):
        if token.content not in present:
            backend.add_tokens([AddedToken(token.content, special=True, normalized=False)])
            present[token.content] = token
    ordered = {name: named[name].content for name in (*_NAMED_TOKENS, *named) if name in named}
    contents = dict.fromkeys((*ordered.values(), *(token.content for token in extra)))
    return ordered, [i for i in map(backend.token_to_id, contents) if i is not None]
