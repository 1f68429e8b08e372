"""The shapes that steps are padded to, so that few captured graphs serve every batch. No torch here."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

FEWEST_CHUNK_TOKENS, EVEN_CHUNK_TOKENS, MOST_CHUNK_TOKENS = 16, 256, 2048
"""Token buckets of chunks: powers of two from the first, then multiples of the second, to the third. Beyond, the device
works longer than the host launches (about 10 ms for 24 layers), and a graph would gain nothing."""


MOST_CHUNKS = 16
"""Chunks of a bucket; a step of more is rare."""


def chunk_bucket(n_tokens: int) -> int:
    """Return the bucket of so many tokens of chunks."""
    if n_tokens > EVEN_CHUNK_TOKENS:
        return -(-n_tokens // EVEN_CHUNK_TOKENS) * EVEN_CHUNK_TOKENS
    return max(FEWEST_CHUNK_TOKENS, 1 << (n_tokens - 1).bit_length())


@dataclass(frozen=True)
class StepShape:
    """Sizes of a step's tensors. The rows that decode come first, then the chunks."""

    n_decode: int
    """Rows that feed one token each."""
    n_chunk_tokens: int = 0
    n_chunks: int = 0
    n_logits: int | None = None
    """Rows of logits, where prompts want some besides each request's last."""
    verifies: bool = False
    """The host names the tokens of the rows that decode. Without chunks these are positions of fewer sequences: newest
    tokens, and guesses behind them."""
    is_bucket: bool = True
    """One of few shapes that steps are padded to: worth a graph."""

    @property
    def n_requests(self) -> int:
        """Rows that get a token."""
        return self.n_decode + self.n_chunks

    @property
    def n_tokens(self) -> int:
        """Tokens fed."""
        return self.n_decode + self.n_chunk_tokens


class Buckets:
    """Chooses the shape for a step.

    Parameters
    ----------
    max_rows
        Requests of a step at most.
    max_len
        Longest sequence: a chunk of padding is no longer.
    max_tokens
        Most tokens of a step.
    verifies
        Whether steps without chunks verify guesses. Of several tokens for a row the host knows which one counts, so it names
        those of the rows that decode in all steps.
    """

    def __init__(self, max_rows: int, max_len: int, max_tokens: int, *, verifies: bool = False) -> None:
        self.verifies = verifies
        self.max_rows = max_rows
        self.most_chunk_tokens = min(MOST_CHUNK_TOKENS, chunk_bucket(max_tokens))
        self._max_len = max_len
        sizes = [1, 2, 4, 8]
        while sizes[-1] < max_rows:
            sizes.extend((sizes[-1] * 3 // 2, sizes[-1] * 2))
        self.decode_sizes = sorted({min(size, max_rows) for size in sizes})
        """Powers of two, from eight on also one between each two, and the most there can be."""

    @property
    def first(self) -> list[StepShape]:
        """The shapes captured before the first request comes, the largest first: all that only decode. When requests end
        one by one, a step of each size comes along, and each capture would hold everybody up for 30 ms."""
        return [StepShape(size, verifies=self.verifies) for size in reversed(self.decode_sizes)]

    @property
    def widest(self) -> list[StepShape]:
        """The shapes whose work needs the most memory, for a step of chunks and one of decodes."""
        n_tokens = min(self.most_chunk_tokens, MOST_CHUNKS * self._max_len)
        return [StepShape(self.max_rows, n_tokens, -(-n_tokens // self._max_len)), self.first[0]]

    def decode(self, n: int) -> StepShape:
        """Return the shape for a step of `n` decoding requests."""
        return StepShape(self.decode_sizes[bisect_left(self.decode_sizes, n)])

    def verify(self, n: int) -> StepShape:
        """Return the shape for a step that feeds `n` newest tokens and guesses."""
        return StepShape(self.decode(n).n_decode, verifies=True)

    def mixed(self, n_decode: int, n_chunks: int, n_chunk_tokens: int) -> StepShape:
        """Return the shape for a step with chunks. What is left of the bucket's chunks must have a token each."""
        verifies = self.verifies and n_decode > 0
        exact = StepShape(n_decode, n_chunk_tokens, n_chunks, verifies=verifies, is_bucket=False)
        rows = self.decode(n_decode).n_decode if n_decode else 0
        chunks = 1 << (n_chunks - 1).bit_length()
        while True:
            least = n_chunk_tokens + chunks - n_chunks
            tokens = chunk_bucket(least)
            if tokens == n_chunk_tokens or chunks > n_chunks:
                break
            chunks *= 2  # the padding needs a chunk of its own
        longest_pad = tokens - least + 1
        if tokens > self.most_chunk_tokens or chunks > MOST_CHUNKS or longest_pad > self._max_len:
            return exact
        return StepShape(rows, tokens, chunks, verifies=verifies)
