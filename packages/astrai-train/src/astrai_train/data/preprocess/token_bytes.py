"""Which tokens hold which characters, from the bytes of the tokens: a whole batch of texts at once.

Offsets cost the tokenizer library a fifth of its time, and a Python object for each token costs more than that. Where
the tokens' bytes are the text's, lengths and sums of lengths say the same.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from astrai_core.tokenizer.tokenizer import Tokenizer

Spans = list[tuple[int, int]]
"""Characters as (first, behind the last)."""

Ids = NDArray[np.uint32]
"""Token ids of one text."""


def id_array(ids: list[int]) -> Ids:
    """Return ids as an array; three times as fast as numpy's own reading of a list."""
    return np.frombuffer(array("I", ids), np.uintc).astype(np.uint32, copy=False)


class TokenBytes:
    """What each token of a vocabulary adds to a text, looked up when it is first met."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._sizes = np.full(tokenizer.vocab_size, -1, np.int32)
        self._starts = np.zeros(tokenizer.vocab_size, np.int32)
        self._pool = np.zeros(0, np.uint8)

    def sizes(self, ids: Ids) -> NDArray[np.int32]:
        """Return the bytes that each token adds, ``[tokens]``."""
        sizes = self._sizes[ids]
        unknown = np.unique(ids[sizes < 0]).tolist()
        if unknown:
            pieces = [self._tokenizer.token_bytes(token_id) for token_id in unknown]
            lengths = np.array([len(piece) for piece in pieces], np.int32)
            self._sizes[unknown] = lengths
            self._starts[unknown] = len(self._pool) + np.cumsum(lengths) - lengths
            self._pool = np.concatenate([self._pool, np.frombuffer(b"".join(pieces), np.uint8)])
            sizes = self._sizes[ids]
        return sizes

    def spell(self, ids: Ids) -> NDArray[np.uint8]:
        """Return the bytes of the tokens, one token behind the other."""
        sizes = self.sizes(ids)
        shifts = self._starts[ids] - (np.cumsum(sizes) - sizes)
        places = np.repeat(shifts, sizes)
        places += np.arange(len(places))
        return self._pool[places]

    def masks(
        self, encoded: Sequence[Ids], texts: Sequence[str], spans: Sequence[Spans]
    ) -> list[NDArray[np.uint8] | None]:
        """Mark the tokens that hold any character of a span.

        Parameters
        ----------
        encoded, texts, spans
            Of each text its tokens, itself, and the characters to mark.

        Returns
        -------
        Of each text a mask ``[tokens]`` of 0 and 1; None where its tokens' bytes are not its own (normalised text,
        stripped spaces, tokens put around it).
        """
        marked = self._masks(encoded, texts, spans)
        if marked is not None:
            return list(marked)
        if len(texts) == 1:
            return [None]
        alone = zip(encoded, texts, spans, strict=True)
        return [self.masks([ids], [text], [wanted])[0] for ids, text, wanted in alone]

    def _masks(
        self, encoded: Sequence[Ids], texts: Sequence[str], spans: Sequence[Spans]
    ) -> list[NDArray[np.uint8]] | None:
        """The masks of texts all of which are spelt by their tokens."""
        written = [text.encode() for text in texts]
        ids = np.concatenate(encoded)
        ends = np.cumsum(self.sizes(ids), dtype=np.int64)
        last = np.cumsum([len(part) for part in encoded])
        behind = np.cumsum([len(part) for part in written])
        # Texts must end where their tokens do: only together could one's bytes be another's.
        if not np.array_equal(np.concatenate([[0], ends])[last], behind):
            return None
        if not np.array_equal(self.spell(ids), np.frombuffer(b"".join(written), np.uint8)):
            return None
        edges = np.array(
            [
                (at + _bytes_before(text, start), at + _bytes_before(text, stop) - 1)
                for at, text, wanted in zip([0, *behind.tolist()], texts, spans, strict=False)
                for start, stop in wanted
                if stop > start
            ],
            np.int64,
        ).reshape(-1, 2)
        # The first token that ends behind the span's first byte, to the first that ends at its last or behind it.
        mask = np.zeros(len(ids), np.uint8)
        for first, final in np.searchsorted(ends, edges, side="right").tolist():
            mask[first : final + 1] = 1
        return np.split(mask, last[:-1])


def _bytes_before(text: str, at: int) -> int:
    return at if text.isascii() else len(text[:at].encode())
