"""Structured output by llguidance: which tokens may come next. No torch here."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from astrai_core.errors import MissingDependencyError, RequestError
from astrai_core.tokenizer.tokenizer import Tokenizer
from astrai_core.types import StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

WHITESPACE = r"[ \t\n\r]{0,20}"
"""Between the tokens of JSON: a model that is stuck in white space gets out of it."""


class Grammar:
    """Where one completion stands in its language.

    Attributes
    ----------
    error
        Why it cannot go on (a limit of the library); empty while all is well.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._words = np.zeros((vocab_size + 31) // 32, dtype=np.int32)
        self.error = ""

    def copy(self) -> Self:
        """Return an independent one in the same state."""
        return type(self)(self._matcher.deep_copy(), 32 * len(self._words))

    def allowed(self, width: int) -> np.ndarray:
        """Return which of the `width` columns of the logits may be sampled, ``[width]`` bool."""
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        bits = np.unpackbits(self._words.view(np.uint8), bitorder="little")
        return bits[:width].view(np.bool_)

    def accept(self, token_id: int) -> bool:
        """Take the sampled token; return whether the completion is complete."""
        if not self._matcher.consume_token(token_id):
            self.error = _one_line(self._matcher.get_error()) or f"token {token_id} does not belong there"
        return self._matcher.is_stopped()


class GrammarCompiler:
    """Compiles for one model; any thread may.

    Parameters
    ----------
    vocab_size
        Width of the model's logits.
    eos_ids
        Ids that may be sampled where the completion may end.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = max(vocab_size, tokenizer.vocab_size)
        self._eos_ids = sorted(eos_ids)
        self._table: LLTokenizer | None = None
        self._lock = threading.Lock()

    def compile(self, structured: StructuredOutput) -> Grammar:
        """Return the start of the language.

        Raises
        ------
        RequestError
            If the schema, expression or grammar is not valid.
        MissingDependencyError
            If llguidance is not installed.
        """
        try:
            import llguidance
        except ImportError:
            raise MissingDependencyError(
                "structured output needs llguidance; run `pip install 'astrai-infer[server]'`"
            ) from None
        with self._lock:  # the table of a vocabulary of 49k takes 0.6 s
            if self._table is None:
                eos = self._eos_ids or [self._vocab_size - 1]
                self._table = llguidance.LLTokenizer(self._tokenizer.backend.to_str(), self._vocab_size, eos)
        field, source = _source(structured)
        matcher = llguidance.LLMatcher(self._table, source, log_level=0)
        if matcher.is_error():
            raise RequestError(f"structured.{field} cannot be used: {_one_line(matcher.get_error())}; correct it")
        return Grammar(matcher, self._vocab_size)


def _source(structured: StructuredOutput) -> tuple[str, str]:
    """The field that was given, and llguidance's own form of it."""
    from llguidance import LLMatcher

    if structured.json_schema is not None:
        field = "json_schema"
        try:
            body = LLMatcher.grammar_from_json_schema(
                structured.json_schema, overrides={"whitespace_pattern": WHITESPACE}
            )
        except ValueError as error:
            raise RequestError(f"structured.json_schema cannot be used: {_one_line(str(error))}; correct it") from None
    elif structured.regex is not None:
        field, body = "regex", LLMatcher.grammar_from_regex(structured.regex)
    elif structured.choice:
        field = "choice"
        body = LLMatcher.grammar_from_lark("start: " + " | ".join(map(_quoted, structured.choice)))
    else:
        field, body = "grammar", LLMatcher.grammar_from_lark(structured.grammar or "")
        if body.lstrip().startswith("{"):
            raise RequestError("structured.grammar cannot be used: it is JSON; give a grammar in Lark")
    return field, body if structured.think == "no" else _after_thinking(body, structured.think)


def _after_thinking(body: str, think: str) -> str:
    first = "thought GAP" if think == "opened" else '("<think>" thought GAP)?'
    rules = 'thought[suffix="</think>"]: /(?s:.*)/\nGAP: /\\s{0,8}/\n'
    main: dict[str, Any] = {"name": "main", "lark_grammar": f"start: {first} @answer\n{rules}"}
    # Of a JSON schema llguidance makes its own JSON form, of all else Lark.
    answer = json.loads(body)["grammars"][0] if body.startswith("{") else {"lark_grammar": body}
    answer |= {"name": "answer"}
    return json.dumps({"grammars": [main, answer]})


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _one_line(text: str) -> str:
    return " ".join(text.split())
