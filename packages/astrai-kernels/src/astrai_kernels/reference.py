"""The ops in plain torch, on any device and differentiable: what tests compare the kernels with.

Same arguments, roundings and results as the kernels, up to the order of additions; no ``out=``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._checks import check_epilogue
from ._reference_lora import lora_expand as lora_expand
from ._reference_lora import lora_shrink as lora_shrink
from ._reference_sampling import apply_penalties as apply_penalties
from ._reference_sampling import argmax as argmax
from ._reference_sampling import sample as sample
from ._reference_sampling import uniform as uniform

E4M3_LARGEST = 448.0
"""Largest finite float8_e4m3fn."""


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


def linear(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> Tensor:
    """Twin of :func:`astrai_kernels.linear`.

    Parameters
    ----------
    x : Tensor
        ``[..., in_features]``.
    weight : Tensor
        ``[out_features, in_features]``; with ``"swiglu"`` ``[2 * out_features, in_features]``, gate rows first. The
        kernel keeps gate and up in fp32, where this twin rounds them to x's type.
    bias : Tensor, optional
        ``[out_features]``.
    residual : Tensor, optional
        ``[..., out_features]``, added to the rounded product.
    activation : {None, "swiglu"}
        ``silu(gate) * up``.
    norm_weight : Tensor, optional
        ``[in_features]``: x is RMS-normalised first, as by :func:`rms_norm`.
    norm_eps : float
        Added to the mean square.

    Returns
    -------
    Tensor
        ``[..., out_features]``, of x's type.

    Raises
    ------
    ValueError
        If the activation is unknown, or "swiglu" meets a bias or residual.
    """
    check_epilogue(bias, residual, activation)
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, norm_eps)
    y = torch.nn.functional.linear(x, weight, bias)
    if activation is not None:
        gate, up = y.float().chunk(2, dim=-1)
        y = (torch.nn.functional.silu(gate) * up).to(x.dtype)
    return y if residual is None else y + residual


def embedding_before_norm(ids: Tensor, table: Tensor, norm_weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Twin of :func:`astrai_kernels.embedding_before_norm`; see there."""
    return _begin_norm(embedding(ids, table), norm_weight)


def _begin_norm(out: Tensor, norm_weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    squares = out.float().square().view(-1, out.shape[-1] // 16, 16).sum(-1)
    return out, out * norm_weight, squares


def linear_before_norm(
    x: Tensor, weight: Tensor, norm_weight: Tensor, *, bias: Tensor | None = None, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Twin of :func:`astrai_kernels.linear_before_norm`; see there."""
    return _begin_norm(linear(x, weight, bias=bias, residual=residual), norm_weight)


def linear_after_norm(
    weighed: Tensor,
    squares: Tensor,
    weight: Tensor,
    *,
    eps: float,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Twin of :func:`astrai_kernels.linear_after_norm`, which rounds once, behind the product; see there."""
    scale = torch.rsqrt(squares.sum(-1) / weighed.shape[-1] + eps).view(*weighed.shape[:-1], 1)
    return linear((weighed.float() * scale).to(weighed.dtype), weight, bias=bias, activation=activation)


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


def qkv_norm_rope_write(
    qkv: Tensor,
    position_ids: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    k_buffer: Tensor,
    v_buffer: Tensor,
    out_cache_loc: Tensor,
    n_heads: int,
    n_kv_heads: int,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Twin of :func:`astrai_kernels.qkv_norm_rope_write`; writes the pools in place.

    Parameters
    ----------
    qkv : Tensor
        ``[tokens, (n_heads + 2 * n_kv_heads) * head_dim]``.
    position_ids, cos, sin, k_buffer, v_buffer, out_cache_loc, n_heads, n_kv_heads
        As the kernel takes them.
    q_norm, k_norm, eps, interleaved, k_scale, v_scale
        Likewise.

    Returns
    -------
    Tensor
        q, ``[tokens, n_heads, head_dim]``.
    """
    heads = qkv.unflatten(-1, (n_heads + 2 * n_kv_heads, -1))
    q, k, v = heads.split((n_heads, n_kv_heads, n_kv_heads), dim=1)
    q = q if q_norm is None else rms_norm(q, q_norm, eps)
    k = k if k_norm is None else rms_norm(k, k_norm, eps)
    if cos is not None and sin is not None and position_ids is not None:
        q, turned = apply_rotary(q, k, cos, sin, position_ids, interleaved=interleaved)
        k = k if turned is None else turned
    inside = (out_cache_loc >= 0) & (out_cache_loc < k_buffer.shape[0])
    slots = out_cache_loc[inside].long()
    for buffer, scales, rows in ((k_buffer, k_scale, k[inside]), (v_buffer, v_scale, v[inside])):
        if scales is None:
            buffer[slots] = rows
            continue
        wide = rows.float()
        # By a tensor: torch multiplies by the reciprocal of a number, which is not the quotient's bits.
        scale = wide.abs().amax(-1) / torch.tensor(E4M3_LARGEST, device=wide.device)
        inverse = torch.where(scale > 0, 1 / scale, 0.0)
        scales[slots] = scale
        buffer[slots] = (wide * inverse.unsqueeze(-1)).to(buffer.dtype)
    return q.contiguous()


def gated_activation(x: Tensor, kind: str = "silu") -> Tensor:
    """Twin of :func:`astrai_kernels.gated_activation`.

    Parameters
    ----------
    x : Tensor
        ``[..., 2 * width]``.
    kind : {"silu", "gelu_tanh", "gelu"}

    Returns
    -------
    Tensor
        ``[..., width]`` of x's type.
    """
    gate, up = x.chunk(2, dim=-1)
    if kind == "silu":
        return torch.nn.functional.silu(gate) * up
    return torch.nn.functional.gelu(gate, approximate={"gelu_tanh": "tanh", "gelu": "none"}[kind]) * up


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """Twin of :func:`astrai_kernels.embedding`.

    Parameters
    ----------
    ids : Tensor
        ``[tokens]`` integers; an id outside the table gives NaN.
    table : Tensor
        ``[vocab, hidden]``.

    Returns
    -------
    Tensor
        ``[tokens, hidden]``.
    """
    known = (ids >= 0) & (ids < table.shape[0])
    return table[ids.where(known, 0).long()].where(known.unsqueeze(-1), torch.nan)
