"""The shapes that steps are padded to, so that few captured graphs serve every batch. No torch here."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

FEWEST_CHUNK_TOKENS, MOST_CHUNK_TOKENS = 16, 512
"""Token buckets of chunks: powers of two in this range. Beyond, the device works longer than the host launches, and a
graph would gain nothing."""


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
    """The rows that decode are positions of fewer sequences: newest tokens, and guesses behind them."""
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
    """

    def __init__(self, max_rows: int, max_len: int) -> None:
        self.max_rows = max_rows
        self._max_len = max_len
        sizes = [1, 2, 4, 8]
        while sizes[-1] < max_rows:
            sizes.extend((sizes[-1] * 3 // 2, sizes[-1] * 2))
        self.decode_sizes = sorted({min(size, max_rows) for size in sizes})
        """Powers of two, from eight on also one between each two, and the most there can be."""

    @property
    def first(self) -> list[StepShape]:
        """The shapes worth a graph before the first request comes: powers of two and the largest, the largest first."""
        sizes = [size for size in self.decode_sizes if size & (size - 1) == 0 or size == self.max_rows]
        return [StepShape(size) for size in reversed(sizes)]

    def decode(self, n: int) -> StepShape:
        """Return the shape for a step of `n` decoding requests."""
        return StepShape(self.decode_sizes[bisect_left(self.decode_sizes, n)])

    def verify(self, n: int) -> StepShape:
        """Return the shape for a step that feeds `n` newest tokens and guesses."""
        return StepShape(self.decode(n).n_decode, verifies=True)

    def mixed(self, n_decode: int, n_chunks: int, n_chunk_tokens: int) -> StepShape:
        """Return the shape for a step with chunks. What is left of the bucket's chunks must have a token each."""
        exact = StepShape(n_decode, n_chunk_tokens, n_chunks, is_bucket=False)
        rows = self.decode(n_decode).n_decode if n_decode else 0
        chunks = 1 << (n_chunks - 1).bit_length()
        while True:
            least = n_chunk_tokens + chunks - n_chunks
            tokens = max(FEWEST_CHUNK_TOKENS, 1 << (least - 1).bit_length())
            if tokens == n_chunk_tokens or chunks > n_chunks:
                break
            chunks *= 2  # the padding needs a chunk of its own
        longest_pad = tokens - least + 1
        if tokens > MOST_CHUNK_TOKENS or longest_pad > self._max_len:
            return exact
        return StepShape(rows, tokens, chunks)
