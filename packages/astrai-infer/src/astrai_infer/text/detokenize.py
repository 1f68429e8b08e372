"""The text of one completion as it grows: ids -> characters -> stop strings -> deltas."""

from __future__ import annotations

from astrai_core.tokenizer.tokenizer import Tokenizer
from astrai_core.types import SamplingParams
from astrai_infer.text.stop import StopMatcher


class TextStream:
    """One pipeline for streamed and whole answers: the joined deltas are the text."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._decoder = tokenizer.stream_decoder(skip_special_tokens=params.skip_special_tokens)
        self._matcher = StopMatcher(params.stop)
        self._has_stops = bool(params.stop)
        self._min_tokens = params.min_tokens
        self._keep_stop = params.include_stop_str_in_output
        self._n_tokens = 0  # counted for the stop strings, which wait for min_tokens
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        """Everything emitted so far."""
        return "".join(self._parts)

    def push(self, token_id: int) -> tuple[str, str | None]:
        """Add a token.

        Returns
        -------
        (delta, the stop string that ended the text or None)
        """
        text = self._decoder.step(token_id)
        if self._has_stops:
            self._n_tokens += 1
            return self._match(text)
        if text:
            self._parts.append(text)
        return text, None

    def end(self, stop_token_id: int | None = None) -> tuple[str, str | None]:
        """Flush what is held back: half characters first, then the tail that a stop string might have begun with.

        Parameters
        ----------
        stop_token_id
            The token that ended the completion, not pushed; its text is kept only with ``include_stop_str_in_output``.
        """
        delta, stop = "", None
        if stop_token_id is not None and self._keep_stop:
            delta, stop = self.push(stop_token_id)
        if stop is None:
            more, stop = self._match(self._decoder.flush())
            delta += more
        if stop is None:
            delta += self._emit(self._matcher.flush())
        return delta, stop

    def _match(self, text: str) -> tuple[str, str | None]:
        if self._n_tokens <= self._min_tokens:
            return self._emit(text), None
        delta, stop = self._matcher.push(text)
        if stop is not None and self._keep_stop:
            delta += stop
        return self._emit(delta), stop

    def _emit(self, text: str) -> str:
        if text:
            self._parts.append(text)
        return text
