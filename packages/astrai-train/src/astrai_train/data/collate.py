"""Rows of documents as tensors: the one place where labels, positions and document ids are made.

A row holds spans of documents one after another. What is padding, where a document begins and which tokens are
supervised follow from lengths and spans alone, never from comparing with the pad id: the pad id may equal the
end-of-turn token, and id 0 is content (training rule 2).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray

IGNORE_LABEL = -100
"""Label of a token that is not supervised; ``torch.nn.functional.cross_entropy`` ignores it by default."""

PADDING_DOC = -1
"""Document id of padding."""

PositionIds = Literal["none", "doc_reset", "continuous"]


@dataclasses.dataclass(frozen=True, eq=False)
class TrainBatch:
    """Rows that one rank computes at once.

    Labels are *unshifted*: ``labels[b, i]`` is ``input_ids[b, i]`` where token i is supervised. The loss shifts once:
    the logits at i - 1 predict ``labels[b, i]``. The first token of every document of a row carries no label, because
    nothing of its own document comes before it; so `n_supervised` is exactly the number of terms of the loss.
    """

    input_ids: torch.Tensor
    """[rows, seq_len] int64."""

    labels: torch.Tensor
    """[rows, seq_len] int64; `IGNORE_LABEL` (-100) where the token is not supervised."""

    position_ids: torch.Tensor | None
    """[rows, seq_len] int64; None leaves the positions to the model."""

    doc_ids: torch.Tensor
    """[rows, seq_len] int32: which document of its row a token belongs to, from 0 upwards; -1 is padding. A token may
    attend to the tokens of its own document only."""

    n_supervised: int
    """Labels of the batch that are not -100."""

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """Return the batch with its tensors on `device`."""
        moved: dict[str, Any] = {
            field.name: upload(value, torch.device(device)) if non_blocking else value.to(device)
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        return dataclasses.replace(self, **moved)

    @property
    def n_tokens(self) -> int:
        """Tokens that are not padding."""
        return int((self.doc_ids != PADDING_DOC).sum())


@dataclasses.dataclass(frozen=True, eq=False)
class PairBatch(TrainBatch):
    """Preference pairs: row 2k is the chosen answer of pair k, row 2k + 1 the rejected one; each row one document.

    The two rows of a pair begin with the same `prompt_len[k]` tokens (training rule 10); the answers are supervised.
    """

    prompt_len: torch.Tensor
    """[rows / 2] int64."""


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Send a host tensor to the device without waiting for it.

    Through pinned memory: from any other a copy waits until the device has done all that it was given before.
    """
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class BatchSource(Protocol):
    """Where a trainer gets this rank's micro-batches, without end."""

    def __len__(self) -> int:
        """Return the batches of one whole pass on this rank (the same number on every rank)."""
        ...

    def __iter__(self) -> Iterator[TrainBatch]:
        """Yield batches from the current position on, epoch after epoch without end."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was *yielded* (not prefetched), as plain JSON data."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position; the next iteration yields what would have followed it.

        Raises
        ------
        ConfigError
            If the position belongs to other data or settings; the message names what differs.
        """
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Span:
    """A document, or the part of one that lies in a row."""

    input_ids: NDArray[np.int64]
    """[tokens]."""

    mask: NDArray[Any] | None = None
    """[tokens], nonzero where a token is supervised; None supervises all."""


def collate(
    rows: Sequence[Sequence[Span]],
    *,
    pad_id: int,
    position_ids: PositionIds = "doc_reset",
    seq_len: int | None = None,
    pad_to_multiple: int = 8,
) -> TrainBatch:
    """Lay out rows of documents as tensors.

    Parameters
    ----------
    rows
        The documents of each row, in order; a row may be empty.
    pad_id
        What stands where there is no token; any id will do.
    position_ids
        ``doc_reset`` counts from 0 in each document, ``continuous`` through the row; ``none`` gives no positions.
    seq_len
        Length of the rows; None takes the longest row, rounded up to a multiple of `pad_to_multiple`.

    Raises
    ------
    ValueError
        If a row is longer than `seq_len`.
    """
    longest = max((sum(len(span.input_ids) for span in row) for row in rows), default=0)
    if seq_len is None:
        seq_len = max(-(-longest // pad_to_multiple), 1) * pad_to_multiple
    elif longest > seq_len:
        raise ValueError(f"a row of {longest} tokens does not fit seq_len {seq_len}")
    shape = (len(rows), seq_len)
    ids = np.full(shape, pad_id, np.int64)
    labels = np.full(shape, IGNORE_LABEL, np.int64)
    positions = np.zeros(shape, np.int64)
    docs = np.full(shape, PADDING_DOC, np.int32)
    for r, row in enumerate(rows):
        at = 0
        for d, span in enumerate(row):
            n = len(span.input_ids)
            here = (r, slice(at, at + n))
            ids[here] = span.input_ids
            labels[here] = span.input_ids if span.mask is None else np.where(span.mask, span.input_ids, IGNORE_LABEL)
            if n:
                labels[r, at] = IGNORE_LABEL
            first = 0 if position_ids == "doc_reset" else at
            positions[here] = np.arange(first, first + n)
            docs[here] = d
            at += n
    return TrainBatch(
        input_ids=torch.from_numpy(ids),
        labels=torch.from_numpy(labels),
        position_ids=None if position_ids == "none" else torch.from_numpy(positions),
        doc_ids=torch.from_numpy(docs),
        n_supervised=int((labels != IGNORE_LABEL).sum()),
    )


def collate_pairs(
    pairs: Sequence[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]],
    *,
    pad_id: int,
    position_ids: PositionIds = "doc_reset",
) -> PairBatch:
    """Lay out (prompt, chosen, rejected) as two rows for each pair; see `PairBatch`."""
    rows = []
    for prompt, *answers in pairs:
        for answer in answers:
            mask = np.concatenate([np.zeros(len(prompt), np.uint8), np.ones(len(answer), np.uint8)])
            rows.append([Span(np.concatenate([prompt, answer]), mask)])
    batch = collate(rows, pad_id=pad_id, position_ids=position_ids)
    lengths = torch.tensor([len(prompt) for prompt, *_ in pairs], dtype=torch.int64)
    return PairBatch(**vars(batch), prompt_len=lengths)
