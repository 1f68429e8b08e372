"""Tokenizer of a Hugging Face model directory, on the Rust ``tokenizers`` library.

``tokenizer.json`` decides how text is split and which special tokens are put around it: as in transformers, the flags
``add_bos_token`` and ``add_eos_token`` of ``tokenizer_config.json`` change nothing where a ``tokenizer.json`` exists.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import tokenizers

from astrai_core.errors import ChatTemplateError, RequestError, TokenizerError
from astrai_core.tokenizer.chat_template import ChatTemplate
from astrai_core.tokenizer.special_tokens import declare_tokens
from astrai_core.tokenizer.stream_decoder import PieceTable, StreamDecoder

_UNLIMITED_LENGTH = 10**9


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty if there is no such file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read as JSON: {error}; fetch the file again") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


def _write(path: Path, text: str) -> None:
    """Write a whole file or none of it."""
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise TokenizerError(f"{path} cannot be written: {error.strerror}; choose a directory with room") from error


class Tokenizer:
    """Text to token ids and back, with the model's special tokens and chat template. Picklable.

    Parameters
    ----------
    backend
        The Rust tokenizer. Padding and truncation are switched off; special tokens it lacks are added.
    config
        Content of ``tokenizer_config.json``: named special tokens, ``added_tokens_decoder``, ``model_max_length``.
    chat_template
        The model's templates, if it has any.
    extra_eos_token_ids
        Further ids that end a generation (``eos_token_id`` of ``generation_config.json``).

    Attributes
    ----------
    backend : tokenizers.Tokenizer
        For libraries that need the vocabulary itself (grammars, evaluation).
    bos_token, eos_token, pad_token, unk_token : str or None
    bos_token_id, eos_token_id, pad_token_id, unk_token_id : int or None
    eos_token_ids : tuple of int
        The tokenizer's EOS, then the further ones, each once.
    special_tokens : dict of str to str
        Named special tokens, as templates see them (``bos_token``, ...).
    all_special_ids : list of int
        Ids of the named and the additional special tokens, as in transformers. Decoding skips these and any other
        token that ``tokenizer.json`` marks as special.
    vocab_size : int
        Largest id + 1; embeddings may have more rows.
    model_max_length : int or None
        Longest input that the tokenizer's author names.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        config: Mapping[str, Any] | None = None,
        chat_template: ChatTemplate | None = None,
        extra_eos_token_ids: Iterable[int] = (),
    ) -> None:
        self.backend = backend
        self.chat_template = chat_template
        self._config = {key: value for key, value in (config or {}).items() if key != "chat_template"}
        backend.no_padding()
        backend.no_truncation()
        self.special_tokens, self.all_special_ids = declare_tokens(backend, self._config)
        self._config |= self.special_tokens
        self.bos_token, self.eos_token, self.pad_token, self.unk_token = (
            self.special_tokens.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        )
        self.bos_token_id, self.eos_token_id, self.pad_token_id, self.unk_token_id = (
            None if token is None else backend.token_to_id(token)
            for token in (self.bos_token, self.eos_token, self.pad_token, self.unk_token)
        )
        own_eos = () if self.eos_token_id is None else (self.eos_token_id,)
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys((*own_eos, *extra_eos_token_ids)))
        self.vocab_size: int = max(backend.get_vocab().values(), default=-1) + 1
        limit = self._config.get("model_max_length")
        # transformers writes 1e30 for "no limit".
        self.model_max_length = int(limit) if isinstance(limit, int | float) and limit < _UNLIMITED_LENGTH else None
        self._tables: dict[bool, PieceTable] = {}

    @classmethod
    def from_pretrained(cls, path: str | Path) -> Tokenizer:
        """Load from a model directory.

        Parameters
        ----------
        path
            A directory with ``tokenizer.json`` and, if the model has them, ``tokenizer_config.json``,
            ``special_tokens_map.json``, ``chat_template.jinja`` and ``generation_config.json``.

        Raises
        ------
        TokenizerError
            A file is missing or unusable; the message names it.
        """
        path = Path(path)
        if not path.is_dir():
            raise TokenizerError(f"{path} is not a directory; give the model's directory, with tokenizer.json in it")
        file = path / "tokenizer.json"
        if not file.is_file():
            raise TokenizerError(
                f"{file} is missing; save the tokenizer in the fast format with transformers "
                "(AutoTokenizer.from_pretrained(...).save_pretrained(...))"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception for any content it does not know
            _read_json(file)
            raise TokenizerError(
                f"{file} is not a tokenizer that tokenizers {tokenizers.__version__} reads: {error}; "
                "fetch the file again or upgrade the tokenizers package"
            ) from error
        config = _read_json(path / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:
            config |= _read_json(path / "special_tokens_map.json")
        return cls(
            backend,
            config=config,
            chat_template=ChatTemplate.from_directory(path, config),
            extra_eos_token_ids=cls._generation_eos(path / "generation_config.json"),
        )

    @staticmethod
    def _generation_eos(file: Path) -> list[int]:
        eos = _read_json(file).get("eos_token_id")
        ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
        if not all(type(i) is int and i >= 0 for i in ids):
            raise TokenizerError(f"{file}: eos_token_id is {eos!r}; it must be a token id or a list of token ids")
        return ids

    def save_pretrained(self, path: str | Path) -> None:
        """Write ``tokenizer.json``, ``tokenizer_config.json`` and the chat templates; transformers loads them.

        Further EOS ids belong to ``generation_config.json``, which is the model's file and is not written here.

        Raises
        ------
        TokenizerError
            A file cannot be written. Each file is whole or absent.
        """
        path = Path(path)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self._config}
        if self.chat_template is not None:
            for name, source in self.chat_template.files().items():
                _write(path / name, source)
        _write(path / "tokenizer_config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")
        _write(path / "tokenizer.json", self.backend.to_str(pretty=True))

    def __len__(self) -> int:
        return self.vocab_size

    def __repr__(self) -> str:
        return f"Tokenizer(vocab_size={self.vocab_size}, special_tokens={self.special_tokens})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tables": {}}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; special tokens written in the text become their ids.

        Parameters
        ----------
        text
            Any Unicode text.
        add_special_tokens
            Put BOS or EOS around it where ``tokenizer.json`` says so. Leave this off for templated text.

        Raises
        ------
        RequestError
            ``text`` is not a string, or holds half of a surrogate pair.
        """
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text, computed in parallel; see :meth:`encode`."""
        # Unlike encode(), encode_batch_fast() releases the interpreter lock (2 MB of text: 70 ms against 5 ms held).
        try:
            encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except TypeError:
            for i, text in enumerate(texts):
                _check_text(text, i)
            raise
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: int | Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids: the same pieces that :meth:`stream_decoder` emits.

        Parameters
        ----------
        ids
            One id, or any iterable of them (a list, a 1-D tensor).
        skip_special_tokens
            Leave special tokens out.

        Notes
        -----
        Equal to transformers but for byte tokens (``<0xE4>``) that are not UTF-8 together: there every character of
        the run is lost, here only the broken one, as in SentencePiece.
        """
        ids = [ids] if isinstance(ids, int) else ids.tolist() if hasattr(ids, "tolist") else ids
        return self.stream_decoder(skip_special_tokens=skip_special_tokens).decode(ids)

    def decode_batch(self, batch: Iterable[Iterable[int]], *, skip_special_tokens: bool = True) -> list[str]:
        """Text of each sequence of token ids; see :meth:`decode`."""
        return [self.decode(ids, skip_special_tokens=skip_special_tokens) for ids in batch]

    def stream_decoder(self, *, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()) -> StreamDecoder:
        """A decoder for one generated sequence, fed one id at a time.

        Parameters
        ----------
        skip_special_tokens
            Leave special tokens out.
        prompt_ids
            Ids that come before, for a text that goes on from them: the first token then keeps its leading space.
        """
        return StreamDecoder(self._table(skip_special_tokens), prompt_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text, in UTF-8; a part of a character where that is spread over several tokens.

        Special tokens add their own text, ids outside of the vocabulary nothing.
        """
        table = self._table(skip_special_tokens=False)
        return table.partial.get(token_id) or table.whole.get(token_id, "").encode()

    def _table(self, skip_special_tokens: bool) -> PieceTable:
        table = self._tables.get(skip_special_tokens)
        if table is None:
            added = self.backend.get_added_tokens_decoder()
            skipped = frozenset(i for i, token in added.items() if token.special and skip_special_tokens)
            table = self._tables[skip_special_tokens] = PieceTable(self.backend, skipped)
        return table

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary entry of an id, None if there is none."""
        return self.backend.id_to_token(token_id) if token_id >= 0 else None

    def token_to_id(self, token: str) -> int | None:
        """The id of a vocabulary entry, None if there is none."""
        return self.backend.token_to_id(token)

    def get_vocab(self) -> dict[str, int]:
        """Vocabulary entries, added ones included, and their ids."""
        return self.backend.get_vocab()

    @overload
    def apply_chat_template(
        self, messages: Sequence[Any], *, tokenize: Literal[True] = True, **kwargs: Any
    ) -> list[int]: ...

    @overload
    def apply_chat_template(self, messages: Sequence[Any], *, tokenize: Literal[False], **kwargs: Any) -> str: ...

    def apply_chat_template(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tokenize: bool = True,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> list[int] | str:
        """Turn chat messages into the model's prompt.

        Parameters
        ----------
        messages, tools, add_generation_prompt, continue_final_message, chat_template, **kwargs
            As in :meth:`ChatTemplate.render`; the named special tokens are among its variables.
        tokenize
            Return token ids, encoded without adding special tokens because the template writes them; else the text.

        Raises
        ------
        RequestError
            The messages are malformed.
        ChatTemplateError
            The tokenizer has no template, or the template failed or refused the messages.
        """
        template = self.chat_template
        if template is None and chat_template is not None:
            template = ChatTemplate({})
        if template is None:
            raise ChatTemplateError(
                "the tokenizer has no chat template; put chat_template.jinja beside tokenizer.json, "
                "or send a plain prompt"
            )
        text = template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            **{**self.special_tokens, **kwargs},
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text


def _check_text(text: object, position: int) -> None:
    if not isinstance(text, str):
        raise RequestError(f"text {position} is a {type(text).__name__}; only strings can be encoded")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"text {position} has half of a surrogate pair, {text[error.start]!a}, at character {error.start}; "
            "send valid Unicode"
        ) from error
