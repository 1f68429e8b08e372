"""LoRA in plain torch; see :mod:`astrai_kernels.reference`."""

from __future__ import annotations

import torch
from torch import Tensor


def lora_shrink(x: Tensor, a: Tensor, adapter_ids: Tensor) -> Tensor:
    """Twin of :func:`astrai_kernels.lora_shrink`.

    Parameters
    ----------
    x : Tensor
        ``[rows, in_features]``.
    a : Tensor
        ``[adapters, rank, in_features]``.
    adapter_ids : Tensor
        ``[rows]`` integers: the adapter of each row; negative: none; any other index makes the row NaN.

    Returns
    -------
    Tensor
        ``[rows, rank]`` float32.
    """
    hidden = torch.zeros(x.shape[0], a.shape[1], dtype=torch.float32, device=x.device)
    for index, matrix in enumerate(a):
        mine = adapter_ids == index
        hidden[mine] = x[mine].float() @ matrix.float().T
    hidden[adapter_ids >= a.shape[0]] = torch.nan
    return hidden


def lora_expand(base: Tensor, hidden: Tensor, b: Tensor, adapter_ids: Tensor, scaling: Tensor) -> Tensor:
    """Twin of :func:`astrai_kernels.lora_expand`.

    Parameters
    ----------
    base : Tensor
        ``[rows, out_features]``.
    hidden : Tensor
        ``[rows, rank]`` float32.
    b : Tensor
        ``[adapters, out_features, rank]``.
    adapter_ids : Tensor
        ``[rows]`` integers, as for :func:`lora_shrink`.
    scaling : Tensor
        ``[adapters]`` float32.

    Returns
    -------
    Tensor
        ``[rows, out_features]``, of base's type; rounded once.
    """
    out = base.clone()
    for index, matrix in enumerate(b):
        mine = adapter_ids == index
        delta = hidden[mine] @ matrix.float().T * scaling[index]
        out[mine] = (base[mine].float() + delta).to(base.dtype)
    out[adapter_ids >= b.shape[0]] = torch.nan
    return out
