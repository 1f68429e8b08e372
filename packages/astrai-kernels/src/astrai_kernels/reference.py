"""The ops in plain torch, on any device and differentiable: what tests compare the kernels with.

Same arguments, roundings and results as the kernels, up to the order of additions; no ``out=``.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Twin of :func:`astrai_kernels.rms_norm`, with the roundings of Hugging Face's LlamaRMSNorm.

    Parameters
    ----------
    x : Tensor
        ``[..., hidden]``.
    weight : Tensor
        ``[hidden]``, of x's type.
    eps : float
        Added to the mean square.

    Returns
    -------
    Tensor
        Of x's shape and type.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Twin of :func:`astrai_kernels.add_rms_norm`.

    Parameters
    ----------
    x, residual : Tensor
        ``[..., hidden]``.
    weight : Tensor
        ``[hidden]``, of x's type.
    eps : float
        Added to the mean square.

    Returns
    -------
    normed, new_residual : Tensor
        Of x's shape and type.
    """
    new_residual = x + residual
    return rms_norm(new_residual, weight, eps), new_residual


def apply_rotary(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor,
    *,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Twin of :func:`astrai_kernels.apply_rotary`.

    Parameters
    ----------
    q, k : Tensor
        ``[tokens, heads, head_dim]``; k may be None.
    cos, sin : Tensor
        ``[max_pos, rotary_dim / 2]`` float32.
    position_ids : Tensor
        ``[tokens]`` integers; a position outside the tables gives NaN.
    interleaved : bool
        Pairs ``(x[2i], x[2i + 1])`` instead of ``(x[i], x[i + rotary_dim / 2])``.

    Returns
    -------
    q_out, k_out : Tensor, Tensor or None
    """
    known = ((position_ids >= 0) & (position_ids < cos.shape[0])).unsqueeze(-1)
    rows = position_ids.clamp(0, cos.shape[0] - 1).long()
    cos_rows = cos[rows].where(known, torch.nan).unsqueeze(1)
    sin_rows = sin[rows].where(known, torch.nan).unsqueeze(1)
    half = cos.shape[1]

    def rotate(x: Tensor) -> Tensor:
        turning, passing = x[..., : 2 * half].float(), x[..., 2 * half :]
        pairs = turning.unflatten(-1, (half, 2) if interleaved else (2, half))
        a, b = pairs.unbind(-1 if interleaved else -2)
        turned = torch.stack((a * cos_rows - b * sin_rows, b * cos_rows + a * sin_rows), -1 if interleaved else -2)
        return torch.cat((turned.flatten(-2).to(x.dtype), passing), dim=-1)

    return rotate(q), None if k is None else rotate(k)
