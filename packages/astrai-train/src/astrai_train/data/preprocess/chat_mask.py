"""Where the supervised turns lie in the rendering of a whole conversation (training rule 3).

Messages are never rendered alone: templates add headers, trim, move system prompts and rewrite earlier turns. A turn
is what the model has to write there: from the end of the prompt that inference would give it up to and including the
end-of-turn token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from astrai_core.errors import ChatTemplateError, RequestError
from astrai_core.tokenizer.tokenizer import Tokenizer
from astrai_train.data.preprocess.records import BadRow, Conversation
from astrai_train.data.preprocess.token_bytes import Spans

_PRIVATE_USE = range(0xE000, 0xF8FF)
"""Characters without a meaning, which stand for a turn's text while it is looked for."""


class ChatMasker:
    """Renders conversations and finds their supervised turns.

    Parameters
    ----------
    tokenizer
        With a chat template, unless one is given.
    chat_template
        Jinja source or the name of a template; None is the tokenizer's own.
    variables
        Further variables of the template.

    Raises
    ------
    ChatTemplateError
        If there is no template, or it refuses the simplest conversation.
    """

    def __init__(
        self, tokenizer: Tokenizer, chat_template: str | None = None, variables: Mapping[str, Any] | None = None
    ) -> None:
        self._tokenizer, self._template, self._variables = tokenizer, chat_template, dict(variables or {})
        special = [token.content for token in tokenizer.backend.get_added_tokens_decoder().values() if token.special]
        ask, mark = {"role": "user", "content": "?"}, chr(_PRIVATE_USE[0])
        before = self.render([ask])
        opened = self.render([ask], generation_prompt=True)
        # What inference puts in front of an answer; empty where the template has nothing to add.
        self._header = opened[len(before) :] if opened.startswith(before) else ""
        tail = self.render([ask, {"role": "assistant", "content": mark}]).rpartition(mark)[2]
        longest_first = sorted(filter(None, special), key=len, reverse=True)
        found = re.search("|".join(map(re.escape, longest_first)), tail) if longest_first else None
        # Text behind an answer up to its end-of-turn token, and that token; empty where the template writes none.
        self._ending = tail[: found.end()] if found else ""
        self._end_token = found[0] if found else ""

    def render(
        self, messages: Sequence[Any], tools: list[Any] | None = None, *, generation_prompt: bool = False
    ) -> str:
        """Return the text of a conversation, as inference renders it."""
        return self._tokenizer.apply_chat_template(
            messages,
            tools=tools,
            add_generation_prompt=generation_prompt,
            tokenize=False,
            chat_template=self._template,
            **self._variables,
        )

    def spans(self, conversation: Conversation) -> tuple[str, Spans]:
        """Return the whole rendering and the characters of its supervised turns, in order.

        Raises
        ------
        BadRow
            If the template refuses the messages, or a turn cannot be found in the rendering.
        """
        turns = [i for i, supervised in enumerate(conversation.supervised) if supervised]
        try:
            text = self.render(conversation.messages, conversation.tools)
            if not turns:
                return text, []
            return text, self._by_marks(text, conversation, turns) or [
                self._turn(text, conversation, turn) for turn in turns
            ]
        except (ChatTemplateError, RequestError) as error:
            raise BadRow(str(error)) from None

    def _by_marks(self, text: str, conversation: Conversation, turns: list[int]) -> Spans | None:
        """The spans with one more rendering, if every turn is plain text between this template's header and ending."""
        messages = conversation.messages
        if not self._header or any(
            messages[i].get("role") != "assistant"
            or not isinstance(messages[i].get("content"), str)
            or set(messages[i]) - {"role", "content"}
            for i in turns
        ):
            return None
        mark = _unused(text)
        chosen = set(turns)
        marked = [{**m, "content": mark} if i in chosen else m for i, m in enumerate(messages)]
        pieces = self.render(marked, conversation.tools).split(mark)
        if len(pieces) != len(turns) + 1 or not text.startswith(pieces[0]):
            return None
        spans, at = [], len(pieces[0])
        for turn, (before, after) in zip(turns, pairwise(pieces), strict=True):
            content = messages[turn]["content"]
            body = next((b for b in (content, content.strip()) if text.startswith(b + after, at)), None)
            if body is None or not before.endswith(self._header) or not after.startswith(self._ending):
                return None
            spans.append((at, at + len(body) + len(self._ending)))
            at += len(body) + len(after)
        return spans if at == len(text) else None

    def _turn(self, text: str, conversation: Conversation, turn: int) -> tuple[int, int]:
        """The span of one turn: between the prompt that leads to it and the rendering that ends with it."""
        messages, tools = conversation.messages, conversation.tools
        if messages[turn].get("role") != "assistant":
            return self._by_change(text, conversation, turn, {**messages[turn], "content": ""}, "")
        until = text if turn == len(messages) - 1 else self.render(messages[: turn + 1], tools)
        prompt = self.render(messages[:turn], tools, generation_prompt=True) if turn else None
        if prompt is not None and text.startswith(prompt) and text.startswith(until) and len(until) > len(prompt):
            return len(prompt), self._end(text, len(prompt), len(until))
        return self._by_change(text, conversation, turn, {"role": "assistant"}, self._header)

    def _end(self, text: str, start: int, stop: int) -> int:
        last = text.rfind(self._end_token, start, stop) if self._end_token else -1
        return last + len(self._end_token) if last >= 0 else start + len(text[start:stop].rstrip())

    def _by_change(
        self, text: str, conversation: Conversation, turn: int, other: Mapping[str, Any], header: str
    ) -> tuple[int, int]:
        """The span of a turn by what changes when `other`, with a mark as its content, takes its place.

        For what the template renders otherwise once more messages follow, and for roles that no prompt leads to.
        """
        messages = list(conversation.messages)
        mark = _unused(text)
        messages[turn] = {**other, "content": mark}
        before, found, after = self.render(messages, conversation.tools).partition(mark)
        start, stop = _common_prefix(text, before), len(text) - len(after)
        if not found or not text.endswith(after) or start > stop:
            raise BadRow(
                f"messages[{turn}]: the chat template does not show where this turn lies; use another template"
            )
        at = text.rfind(header, 0, start) if header else -1
        behind_header = at + len(header)
        # An end-of-turn token in between says that the header is an earlier turn's.
        if at >= 0 and self._end_token and self._end_token not in before[behind_header:]:
            start = behind_header
        return start, stop + len(self._ending) if text.startswith(self._ending, stop) else stop


def _common_prefix(one: str, two: str) -> int:
    """How many characters both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def _unused(text: str) -> str:
    for code in _PRIVATE_USE:
        if chr(code) not in text:
            return chr(code)
    raise BadRow("the conversation holds every private-use character, so that turns cannot be marked; remove some")
