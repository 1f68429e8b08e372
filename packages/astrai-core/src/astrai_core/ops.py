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
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
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
    """Rotate the leading ``rotary_dim`` dimensions of each head (RoFormer, arXiv 2104.09864), in fp32.

    Parameters
    ----------
    x
        ``[tokens, n_heads, head_dim]``.
    cos, sin
        ``[tokens, 1, rotary_dim]`` fp32 as :class:`~astrai_core.model.rope.RotaryTable` returns them: every angle stands
        at both dimensions of its pair, the sine negative at the first.
    interleaved
        Pairs are neighbours (2i, 2i+1) instead of halves (i, i + rotary_dim/2).
    """
    rotary_dim = cos.shape[-1]
    part = x[..., :rotary_dim].float()
    partner = part.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if interleaved else part.roll(rotary_dim // 2, -1)
    turned = torch.addcmul(part * cos, partner, sin).to(x.dtype)
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


PACKED_ROWS = range(1, 33)
"""Row counts for which the packed layout wins on a CPU. All products of a SmolLM2-135M step in fp32 on two cores: one row
29 ms against 45 ms, eight rows 71 ms against 97 ms on one core."""


def can_pack(weight: Tensor) -> bool:
    """Whether :func:`pack` can lay this weight out for the CPU's matrix library."""
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()


def pack(weight: Tensor) -> Tensor:
    """Return a copy of ``[out_features, in_features]`` in oneDNN's own layout, for few-row products."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 8)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, packed: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``.

    Parameters
    ----------
    x
        ``[..., in_features]``.
    weight
        ``[out_features, in_features]``.
    packed
        The same weight from :func:`pack`, used where it is faster and no gradient is recorded.
    """
    if packed is not None and x.dim() == 2 and x.shape[0] in PACKED_ROWS and not torch.is_grad_enabled():
        return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return F.linear(x, weight, bias)
