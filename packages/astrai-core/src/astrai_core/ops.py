"""The ops door: every fused op of the model, by kernel where one can run, else by its torch twin.

An op uses the kernel when its input is on a CUDA device, no gradient is recorded (row K11), and the kernels wheel
fits (:func:`astrai_core.kernels.status`). The twins below are the reference in every other case and in training.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from astrai_core import kernels


def _by_kernel(x: Tensor) -> bool:
    return x.is_cuda and not torch.is_grad_enabled() and kernels.status().available


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension (arXiv 1910.07467).

    Statistics in fp32; the normalised value is rounded to ``x.dtype`` before the weight multiplies it.

    Parameters
    ----------
    x
        ``[..., hidden]``.
    weight
        ``[hidden]``.
    """
    if _by_kernel(x):
        return kernels.module("fused").rms_norm(x, weight, eps)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add `x` to the residual stream and normalise the sum.

    Parameters
    ----------
    x
        ``[..., hidden]``, the output of the last sublayer.
    residual
        ``[..., hidden]``, or None before the first layer, where `x` itself starts the stream.

    Returns
    -------
    (normalised ``[..., hidden]``, new residual ``[..., hidden]``)
    """
    if residual is None:
        return rms_norm(x, weight, eps), x
    if _by_kernel(x):
        return kernels.module("fused").add_rms_norm(x, residual, weight, eps)
    total = x + residual
    return rms_norm(total, weight, eps), total


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate the leading ``2 * cos.shape[-1]`` dimensions of each head (RoFormer, arXiv 2104.09864).

    Parameters
    ----------
    x
        ``[tokens, n_heads, head_dim]``.
    cos, sin
        ``[tokens, rotary_dim / 2]`` fp32, one row per token.
    interleaved
        Pairs are neighbours (2i, 2i+1) instead of halves (i, i + rotary_dim/2).
    """
    rotary_dim = 2 * cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    part = x[..., :rotary_dim].float()
    if interleaved:
        first, second = part[..., 0::2], part[..., 1::2]
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)
    else:
        first, second = part.chunk(2, -1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    turned = turned.to(x.dtype)
    return turned if rotary_dim == x.shape[-1] else torch.cat((turned, x[..., rotary_dim:]), -1)


def swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` over a fused projection (arXiv 2002.05202).

    Parameters
    ----------
    gate_up
        ``[..., 2 * intermediate]``: gate, then up.

    Returns
    -------
    ``[..., intermediate]``
    """
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``.

    Parameters
    ----------
    x
        ``[..., in_features]``.
    weight
        ``[out_features, in_features]``.
    """
    return F.linear(x, weight, bias)
