"""Noise on the token vectors of training samples (NEFTune, arXiv 2310.05914)."""

from __future__ import annotations

import torch
from torch import Tensor

from astrai_train.data.collate import PADDING_DOC, TrainBatch
from astrai_train.strategy.base import runs


def neftune_scale(batch: TrainBatch, hidden_size: int, alpha: float) -> Tensor:
    """Return the largest noise of each token's vector: ``alpha / sqrt(L d)`` (Algorithm 1), 0 at padding.

    Parameters
    ----------
    batch
        On the host. L is the length of the token's own document, without padding and without its neighbours in a
        packed row; d is `hidden_size`.

    Returns
    -------
    ``[rows, seq_len]`` float32.
    """
    documents = runs(batch.doc_ids)
    lengths = torch.tensor([length for _, length in documents])
    scales = alpha / (lengths.double() * hidden_size).sqrt()
    scales[torch.tensor([document == PADDING_DOC for document, _ in documents])] = 0.0
    return scales.float().repeat_interleave(lengths).view(batch.doc_ids.shape)


def neftune_noise(batch: TrainBatch, hidden_size: int, alpha: float, device: torch.device) -> Tensor:
    """Draw uniform noise for the token vectors of a host batch, ``[rows, seq_len, hidden]`` float32 on `device`."""
    scale = neftune_scale(batch, hidden_size, alpha).to(device, non_blocking=True)
    return torch.empty(*scale.shape, hidden_size, device=device).uniform_(-1.0, 1.0) * scale[..., None]
