"""Samples to token ids and masks, in batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from astrai_core.errors import ChatTemplateError, ConfigError, RequestError
from astrai_core.tokenizer.tokenizer import Tokenizer
from astrai_train.data.preprocess.chat_mask import ChatMasker
from astrai_train.data.preprocess.config import PreprocessConfig
from astrai_train.data.preprocess.records import BadRow, Completion, Conversation, DroppedRow, Pair, Prompt, Sample
from astrai_train.data.preprocess.token_bytes import Ids, Spans, TokenBytes, id_array

Encoded = tuple[Ids, NDArray[np.uint8]]
"""Ids and mask."""

Row = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class _Part:
    """One text of a sample."""

    text: str
    spans: Spans | None
    """Supervised characters; None where no mask is wanted."""
    special: bool
    """Whether the tokenizer adds its special tokens; what a template rendered has them already."""
    eos: bool
    """Whether the text ends with the end-of-text token."""


class Encoder:
    """Turns samples into the rows of a store.

    Parameters
    ----------
    config
        Decides what is supervised and how texts end.
    tokenizer
        Whose ids these become.

    Raises
    ------
    ConfigError, ChatTemplateError
        If the chat template cannot be read, is missing or does not work.
    """

    def __init__(self, config: PreprocessConfig, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._eos = tokenizer.eos_token_id if config.append_eos else None
        self._template = _template(config.chat_template, tokenizer)
        self._variables = config.template_variables
        self._bytes = TokenBytes(tokenizer)
        # Whether texts are their tokens' bytes is the tokenizer's nature, asked once so that no order of rows decides.
        probe = " A\u00e9 b\n"
        ids = id_array(tokenizer.encode(probe, add_special_tokens=False))
        self._is_bytewise = self._bytes.spell(ids).tobytes() == probe.encode()
        self._masker: ChatMasker | None = None
        if config.format in ("messages", "sharegpt", "alpaca"):
            self._masker = self.masker

    def encode(self, samples: Sequence[Sample]) -> list[Row | BadRow | DroppedRow]:
        """Encode each sample; what cannot be encoded becomes its reason."""
        prepared = [self._prepared(sample) for sample in samples]
        parts = [part for item in prepared if not isinstance(item, BadRow) for part in item]
        try:
            encoded = iter(self._encoded(parts))
        except (TypeError, RequestError):
            # Some text is no valid Unicode; each sample by itself, so that the others are kept.
            if len(samples) == 1:
                return [BadRow("holds half of a surrogate pair (\\ud800 to \\udfff); send valid Unicode")]
            return [row for sample in samples for row in self.encode([sample])]
        rows: list[Row | BadRow | DroppedRow] = []
        for sample, item in zip(samples, prepared, strict=True):
            rows.append(item if isinstance(item, BadRow) else self._row(sample, [next(encoded) for _ in item]))
        return rows

    def _encoded(self, parts: list[_Part]) -> list[Encoded]:
        """Ids and mask of each part."""
        result: list[Any] = [None] * len(parts)
        for special, masked in ((True, True), (True, False), (False, True), (False, False)):
            mine = [i for i, part in enumerate(parts) if (part.special, part.spans is not None) == (special, masked)]
            encode = self._masked if masked else self._unmasked
            for i, pair in zip(mine, encode([parts[i] for i in mine], special) if mine else [], strict=True):
                result[i] = pair
        return result

    def _prepared(self, sample: Sample) -> list[_Part] | BadRow:
        try:
            if isinstance(sample, Pair):
                return [self._part(sample.chosen), self._part(sample.rejected)]
            return [self._part(sample)]
        except BadRow as error:
            return error

    def _part(self, part: str | Conversation | Completion | Prompt) -> _Part:
        if isinstance(part, str):
            return _Part(part, None, special=True, eos=True)
        if isinstance(part, Completion):
            whole = part.prompt + part.completion
            return _Part(whole, [(len(part.prompt), len(whole))], special=True, eos=True)
        if isinstance(part, Conversation):
            return _Part(*self.masker.spans(part), special=False, eos=False)
        if isinstance(part.prompt, str):
            return _Part(part.prompt, None, special=True, eos=False)
        try:
            text = self.masker.render(part.prompt, part.tools, generation_prompt=True)
        except (RequestError, ChatTemplateError) as error:
            raise BadRow(str(error)) from None
        return _Part(text, None, special=False, eos=False)

    @property
    def masker(self) -> ChatMasker:
        """Made at first use where records may be plain text, which needs no chat template."""
        if self._masker is None:
            self._masker = ChatMasker(self._tokenizer, self._template, self._variables)
        return self._masker

    def _row(self, sample: Sample, encoded: list[Encoded]) -> Row | BadRow | DroppedRow:
        ids, mask = encoded[0]
        if isinstance(sample, str):
            return {"input_ids": ids} if len(ids) else DroppedRow("empty text")
        if isinstance(sample, Prompt):
            columns = np.frombuffer(sample.columns.encode(), np.uint8)
            return {"prompt": ids, "columns": columns} if len(ids) else DroppedRow("empty prompt")
        if not all(mask.any() for _, mask in encoded):
            return BadRow("no token is supervised; check the roles, the weights and the chat template")
        if isinstance(sample, Pair):
            return _split_pair(*encoded)
        return {"input_ids": ids, "mask": mask}

    def _unmasked(self, parts: list[_Part], special: bool) -> list[Encoded]:
        """Ids of texts without spans."""
        encoded = []
        all_ids = self._tokenizer.encode_batch([part.text for part in parts], add_special_tokens=special)
        for part, ids in zip(parts, all_ids, strict=True):
            if part.eos and self._eos is not None and not (ids and ids[-1] == self._eos):
                ids.append(self._eos)
            encoded.append((id_array(ids), np.ones(len(ids), np.uint8)))
        return encoded

    def _masked(self, parts: list[_Part], special: bool) -> list[Encoded]:
        """Ids and masks of texts with spans; by offsets where bytes do not tell."""
        if not self._is_bytewise:
            return self._by_offsets(parts, special)
        texts = [part.text for part in parts]
        all_ids = [id_array(ids) for ids in self._tokenizer.encode_batch(texts, add_special_tokens=special)]
        masks = self._bytes.masks(all_ids, texts, [part.spans or [] for part in parts])
        unspelt = iter(self._by_offsets([p for p, m in zip(parts, masks, strict=True) if m is None], special))
        return [
            next(unspelt) if mask is None else self._ended(part, ids, mask)
            for part, ids, mask in zip(parts, all_ids, masks, strict=True)
        ]

    def _by_offsets(self, parts: list[_Part], special: bool) -> list[Encoded]:
        encodings = self._tokenizer.backend.encode_batch([p.text for p in parts], add_special_tokens=special)
        encoded = []
        for part, encoding in zip(parts, encodings, strict=True):
            mask = np.zeros(len(encoding), np.uint8)
            for start, stop in part.spans or []:
                tokens = tokens_of(encoding, start, stop)
                mask[tokens.start : tokens.stop] = 1
            encoded.append(self._ended(part, id_array(encoding.ids), mask))
        return encoded

    def _ended(self, part: _Part, ids: Ids, mask: NDArray[np.uint8]) -> Encoded:
        """A completion with its end-of-text token, which is supervised whoever put it there."""
        if not part.eos or self._eos is None:
            return ids, mask
        if len(ids) and ids[-1] == self._eos:
            mask[-1] = 1
            return ids, mask
        return np.append(ids, np.uint32(self._eos)), np.append(mask, np.uint8(1))


def tokens_of(encoding: tokenizers.Encoding, start: int, stop: int) -> range:
    """Return the tokens that hold any character from `start` to `stop`.

    Characters that a tokenizer drops belong to no token; a character of several tokens belongs to all of them.
    """
    first = next((t for c in range(start, stop) if (t := encoding.char_to_token(c)) is not None), None)
    if first is None:
        return range(0)
    last = next(t for c in range(stop - 1, start - 1, -1) if (t := encoding.char_to_token(c)) is not None)
    n_tokens = len(encoding)
    while last + 1 < n_tokens and (chars := encoding.token_to_chars(last + 1)) is not None and chars[0] < stop:
        if chars[0] == chars[1]:
            break
        last += 1
    return range(first, last + 1)


def _split_pair(chosen: Encoded, rejected: Encoded) -> Row | BadRow | DroppedRow:
    """Cut both where the first supervised token of either stands, or they first differ: a common prefix of ids."""
    starts = [int(np.argmax(mask)) for _, mask in (chosen, rejected)]
    n_prompt = min(starts)
    differ = np.flatnonzero(chosen[0][:n_prompt] != rejected[0][:n_prompt])
    if len(differ):
        n_prompt = int(differ[0])
    ends = [len(mask) - int(np.argmax(mask[::-1])) for _, mask in (chosen, rejected)]
    if not all(mask[start:end].all() for (_, mask), start, end in zip((chosen, rejected), starts, ends, strict=True)):
        return BadRow("an answer has several turns; give pairs that differ in their last turn")
    if n_prompt == 0:
        return DroppedRow("empty prompt")
    return {
        "prompt": chosen[0][:n_prompt],
        "chosen": chosen[0][n_prompt : ends[0]],
        "rejected": rejected[0][n_prompt : ends[1]],
    }


def _template(given: str | None, tokenizer: Tokenizer) -> str | None:
    """The name of one of the tokenizer's templates, or the source in a file."""
    if given is None or (tokenizer.chat_template is not None and given in tokenizer.chat_template.names):
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        names = ", ".join(tokenizer.chat_template.names) if tokenizer.chat_template else "none"
        raise ConfigError(
            f"field 'chat_template': {given!r} is neither a file that can be read ({error}) nor one of the tokenizer's "
            f"templates ({names})"
        ) from None
