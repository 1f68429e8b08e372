"""A byte-level BPE tokenizer of one's own (Sennrich et al., arXiv 1508.07909, on bytes as in GPT-2), from text files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from astrai_core.errors import ConfigError, DataError, TokenizerError
from astrai_core.tokenizer.chat_template import ChatTemplate
from astrai_core.tokenizer.tokenizer import Tokenizer
from astrai_train.data.preprocess import files

END_OF_TEXT = "<|endoftext|>"
START, END = "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""The chat format of the name ``chatml``; a turn ends with ``<|im_end|>``."""

N_BYTES = 256
_CHUNK = 4 << 20


@dataclass(frozen=True)
class SpecialTokens:
    """Tokens that no text is split into, and what they are for.

    A ``None`` for `eos` or `pad` stands for the default: with ChatML ``<|im_end|>`` ends, else ``<|endoftext|>``;
    ``<|endoftext|>`` pads.
    """

    bos: str | None = None
    eos: str | None = None
    pad: str | None = None
    further: tuple[str, ...] = ()


def train_tokenizer(
    paths: Sequence[str],
    vocab_size: int,
    *,
    field: str = "text",
    special: SpecialTokens | None = None,
    chat_template: str | None = None,
    min_frequency: int = 2,
) -> Tokenizer:
    """Learn a vocabulary from the text of files.

    Digits are split one by one before the merges, as SmolLM and Llama 2 do; any text comes back from its ids
    unchanged. The same files give the same tokenizer.

    Parameters
    ----------
    paths
        Files or patterns: .txt and .md as they are, .jsonl, .json and .parquet by their `field`.
    vocab_size
        Entries, special tokens and the 256 bytes included. Short texts end with fewer.
    field
        Name of the text in records.
    special
        Special tokens; they get the first ids.
    chat_template
        ``chatml``, the path of a Jinja file, or None for a tokenizer without chats.
    min_frequency
        Least number of times that a pair must occur to be merged.

    Raises
    ------
    ConfigError
        If `vocab_size` has no room for the bytes and the special tokens, or the template cannot be read.
    DataError
        If a file is missing, cannot be read, or holds no text.
    ChatTemplateError
        If the template does not work.
    """
    template = _template(chat_template)
    special, tokens = _special_tokens(special or SpecialTokens(), is_chatml=chat_template == "chatml")
    least = N_BYTES + len(tokens)
    if vocab_size < least:
        raise ConfigError(
            f"field 'vocab_size': {vocab_size} has no room for {N_BYTES} bytes and {len(tokens)} special tokens; "
            f"give at least {least}"
        )
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        show_progress=False,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in tokens],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    found = files.find_files(tuple(paths))
    backend.train_from_iterator(_texts(found, field), trainer)
    if backend.get_vocab_size() == least:
        raise DataError(f"{found[0]}: there is no pair of characters to merge in the text; give more of it")
    config: dict[str, Any] = {
        "bos_token": special.bos,
        "eos_token": special.eos,
        "pad_token": special.pad,
        "additional_special_tokens": [t for t in tokens if t not in (special.bos, special.eos, special.pad)],
        "clean_up_tokenization_spaces": False,
    }
    config = {key: value for key, value in config.items() if value not in (None, [])}
    tokenizer = Tokenizer(backend, config=config, chat_template=template)
    if template is not None:
        tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])
    return tokenizer


def _special_tokens(given: SpecialTokens, *, is_chatml: bool) -> tuple[SpecialTokens, list[str]]:
    """Fill in the defaults; return all special tokens in the order of their ids."""
    eos = given.eos or (END if is_chatml else END_OF_TEXT)
    complete = SpecialTokens(given.bos, eos, given.pad or END_OF_TEXT, given.further)
    chat = (START, END) if is_chatml else ()
    ordered = [END_OF_TEXT, *chat, complete.bos, complete.eos, complete.pad, *complete.further]
    tokens = list(dict.fromkeys(token for token in ordered if token is not None))
    if not all(token.strip() for token in tokens):
        raise ConfigError("field 'special_token': one is empty; give text such as <|tool|>")
    return complete, tokens


def _template(given: str | None) -> ChatTemplate | None:
    if given is None:
        return None
    if given == "chatml":
        return ChatTemplate(CHATML, origin="chatml")
    try:
        return ChatTemplate(Path(given).read_text(encoding="utf-8"), origin=given)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"field 'chat_template': {given!r} is neither chatml nor a file that can be read ({error})"
        ) from None


def _texts(found: Sequence[Path], field: str) -> Iterator[str]:
    """The texts of the files, a few megabytes in memory at a time."""
    n_characters = 0
    for file in found:
        for piece in files.cut(file, "auto", _CHUNK):
            for record in files.read(piece, "file"):
                if record.problem is not None:
                    raise DataError(f"{files.place(piece, record.at)}: {record.problem}")
                text = record.value.get(field) if isinstance(record.value, dict) else record.value
                if not isinstance(text, str):
                    raise DataError(
                        f"{files.place(piece, record.at)}: no text in {field!r}; name the field that holds it (--field)"
                    )
                n_characters += len(text)
                yield text
    if n_characters == 0:
        raise DataError(f"{found[0]}: the files hold no text; give some")


def bytes_per_token(tokenizer: Tokenizer, paths: Sequence[str], field: str = "text") -> float:
    """Return how many bytes of UTF-8 a token stands for, on the first 4 MB of the files.

    Raises
    ------
    TokenizerError
        If the tokenizer makes no token of them.
    """
    n_bytes = n_tokens = 0
    for text in _texts(files.find_files(tuple(paths)), field):
        n_bytes += len(text.encode())
        n_tokens += len(tokenizer.encode(text, add_special_tokens=False))
        if n_bytes >= _CHUNK:
            break
    if n_tokens == 0:
        raise TokenizerError(f"{paths[0]}: no token came of its text")
    return n_bytes / n_tokens
