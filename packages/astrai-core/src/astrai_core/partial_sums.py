"""Products whose depth is cut into slices that nobody has added up yet: the norm that follows does, in its own launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from astrai_core import kernels, ops

PARTIAL_ROWS = 128
"""Most rows whose products come in slices, from where the linear kernel (:data:`astrai_core.ops.KERNEL_ROWS`) ends; 0: none
do. So many rows leave a third of a card idle unless a deep product is cut, and where the library cuts it, it adds up in a
launch of its own: 2.3 us in each of 24 layers at 128 rows (H200, the 1.2 B preset)."""

TILES, SLICE_DEPTH = 132, 768
"""Tiles of 64 features that a product in slices may have, about the multiprocessors of a card, and the depth that a slice
must keep."""


@dataclass(frozen=True)
class PartialSums:
    """A product ``[rows, out_features]`` in slices of its depth.

    Attributes
    ----------
    parts
        ``[slices, rows, out_features]`` float32; the product is their sum in rising order, rounded once.
    """

    parts: Tensor


def slices_of(out_features: int, in_features: int) -> int:
    """Return how many slices a product has, 1, 2 or 4: a function of the weight's shape alone."""
    for slices in (4, 2):
        if (
            in_features % (8 * slices) == 0
            and in_features // slices >= SLICE_DEPTH
            and out_features * slices <= 64 * TILES
        ):
            return slices
    return 1


def partial_sums(x: Tensor, weight: Tensor) -> PartialSums | None:
    """Project without adding up the slices, or return None where the product comes in one piece.

    Not in deterministic mode: the library's order of additions within a slice depends on the number of rows.

    Parameters
    ----------
    x
        ``[rows, in_features]``.
    weight
        ``[out_features, in_features]``.
    """
    if not ops._by_kernel(x) or x.dim() != 2 or not ops.KERNEL_ROWS < x.shape[0] <= PARTIAL_ROWS:
        return None
    out_features, in_features = weight.shape
    slices = slices_of(out_features, in_features)
    if (
        slices == 1
        or torch.are_deterministic_algorithms_enabled()
        or x.dtype not in (torch.float16, torch.bfloat16)
        or x.dtype != weight.dtype
        or out_features % 8
        or not (x.is_contiguous() and weight.is_contiguous())
    ):
        return None
    # Views: slice s of x and of the weight is the s-th part of every row.
    left = x.view(-1, slices, in_features // slices).transpose(0, 1)
    right = weight.view(out_features, slices, -1).permute(1, 2, 0)
    return PartialSums(torch.bmm(left, right, out_dtype=torch.float32))


def add_rms_norm(
    product: PartialSums, residual: Tensor, weight: Tensor, eps: float, *, overlap: bool
) -> tuple[Tensor, Tensor]:
    """Do :func:`astrai_core.ops.add_rms_norm` of a product in slices, on a CUDA device.

    Parameters
    ----------
    residual
        ``[rows, hidden]``.
    weight
        ``[hidden]``.

    Returns
    -------
    (normalised ``[rows, hidden]``, new residual ``[rows, hidden]``)
    """
    norm = kernels.module("partial_norm").add_rms_norm_partials
    normed, total = norm(product.parts, residual, weight, eps, overlap=overlap)
    return normed, total
