"""The ops door: every fused op of the model, by kernel where one can run, else by its torch twin.

An op uses the kernel when its input is on a CUDA device, no gradient is recorded (row K11), torch.compile is not at
work, the kernel takes the types of all its tensors, and the kernels wheel fits (:func:`astrai_core.kernels.status`). The
twins below are the reference in every other case and in training.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from astrai_core import kernels

if TYPE_CHECKING:
    from astrai_core.attention.rotary import Rope


def by_kernel(x: Tensor) -> bool:
    """Whether an op of such a tensor may be a kernel."""
    if not x.is_cuda or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return kernels.status().available


_KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _one_type(x: Tensor, *others: Tensor | None) -> bool:
    """Whether the kernels take these together: under autocast the weights have another type than the activations."""
    return x.dtype in _KERNEL_DTYPES and all(other is None or other.dtype == x.dtype for other in others)


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
    if _one_type(x, weight) and by_kernel(x):
        return kernels.module("fused").rms_norm(x, weight, eps)
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight * normed.to(x.dtype)).to(x.dtype)  # fp32 master weights leave bf16 activations what they are


OVERLAP = True
"""Whether a step's norms, and the launch that writes keys and values, read what is older than the product ahead of them
(the residual stream; positions, slots and angles) while that still runs, and the plan of attention is made beside the
embedding."""


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, overlap: bool = False
) -> tuple[Tensor, Tensor]:
    """Add `x` to the residual stream and normalise the sum.

    Parameters
    ----------
    x
        ``[..., hidden]``, the output of the last sublayer.
    residual
        ``[..., hidden]``, or None before the first layer, where `x` itself starts the stream.
    overlap
        The caller's word that a kernel which is no product has started since the residual was written.

    Returns
    -------
    (normalised ``[..., hidden]``, new residual ``[..., hidden]``)
    """
    if residual is None:
        return rms_norm(x, weight, eps), x
    if _one_type(x, residual, weight) and by_kernel(x):
        return kernels.module("fused").add_rms_norm(x, residual, weight, eps, overlap=overlap)
    total = x + residual
    return rms_norm(total, weight, eps), total


def rotary(x: Tensor, rope: Rope) -> Tensor:
    """Rotate the leading ``rotary_dim`` dimensions of each head (RoFormer, arXiv 2104.09864), in fp32.

    Parameters
    ----------
    x
        ``[tokens, n_heads, head_dim]``.
    rope
        Of these tokens.
    """
    if _one_type(x) and by_kernel(x):
        apply = kernels.module("rotary").apply_rotary
        return apply(x, None, rope.cos, rope.sin, rope.position_ids, interleaved=rope.interleaved)[0]
    cos, sin = rope.of_tokens()
    rotary_dim = cos.shape[-1]
    part = x[..., :rotary_dim].float()
    partner = part.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if rope.interleaved else part.roll(rotary_dim // 2, -1)
    turned = torch.addcmul(part * cos, partner, sin).to(x.dtype)
    return turned if rotary_dim == x.shape[-1] else torch.cat((turned, x[..., rotary_dim:]), -1)


def qkv_norm_rope(
    qkv: Tensor,
    n_heads: int,
    n_kv_heads: int,
    *,
    rope: Rope | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a fused projection into normed, rotated q and k and plain v, ``[tokens, heads, head_dim]`` each.

    Parameters
    ----------
    qkv
        ``[tokens, (n_heads + 2 * n_kv_heads) * head_dim]``.
    rope
        Of these tokens; None: no rotation.
    q_norm, k_norm
        ``[head_dim]`` weights of the norms of each head, both or neither.
    eps
        Of the norms.
    """
    heads = qkv.view(qkv.shape[0], n_heads + 2 * n_kv_heads, -1)
    n_rotated = n_heads + n_kv_heads
    v = heads[:, n_rotated:]
    if q_norm is None or k_norm is None:
        qk = heads[:, :n_rotated]
        if rope is not None:
            qk = rotary(qk, rope)
        return qk[:, :n_heads], qk[:, n_heads:], v
    q = rms_norm(heads[:, :n_heads], q_norm, eps)
    k = rms_norm(heads[:, n_heads:n_rotated], k_norm, eps)
    return (q, k, v) if rope is None else (rotary(q, rope), rotary(k, rope), v)


def qkv_norm_rope_write(
    qkv: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    out_cache_loc: Tensor,
    n_heads: int,
    n_kv_heads: int,
    *,
    rope: Rope | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    overlap: bool = False,
) -> Tensor:
    """Do :func:`qkv_norm_rope`, write k and v into the pool and return q ``[tokens, n_heads, head_dim]``.

    Parameters
    ----------
    k_buffer, v_buffer
        ``[size, n_kv_heads, head_dim]``; k and v are rounded to their dtype.
    out_cache_loc
        ``[tokens]`` int64: slot of each token.
    k_scale, v_scale
        ``[size, n_kv_heads]`` fp32, for buffers of float8_e4m3fn: set to the largest magnitude of each token and head over
        448, by which k and v are divided.
    overlap
        The caller's word that a kernel which is no product has started since `out_cache_loc` and `rope` were written.
    """
    fits = _one_type(qkv, q_norm, k_norm) and (k_buffer.dtype == qkv.dtype or k_scale is not None)
    if fits and by_kernel(qkv):
        return kernels.module("qkv").qkv_norm_rope_write(
            qkv,
            None if rope is None else rope.position_ids,
            None if rope is None else rope.cos,
            None if rope is None else rope.sin,
            k_buffer,
            v_buffer,
            out_cache_loc,
            n_heads,
            n_kv_heads,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=eps,
            interleaved=rope is not None and rope.interleaved,
            overlap=overlap,
            **({} if k_scale is None else {"k_scale": k_scale, "v_scale": v_scale}),
        )
    q, k, v = qkv_norm_rope(qkv, n_heads, n_kv_heads, rope=rope, q_norm=q_norm, k_norm=k_norm, eps=eps)
    _write_slots(k_buffer, k_scale, out_cache_loc, k)
    _write_slots(v_buffer, v_scale, out_cache_loc, v)
    return q


def _write_slots(buffer: Tensor, scales: Tensor | None, locs: Tensor, rows: Tensor) -> None:
    if scales is None:
        buffer.index_copy_(0, locs, rows.to(buffer.dtype))
        return
    wide = rows.float()
    scale = wide.abs().amax(-1) / torch.finfo(buffer.dtype).max
    narrow = (wide * torch.where(scale > 0, 1 / scale, 0.0).unsqueeze(-1)).to(buffer.dtype)
    scales.index_copy_(0, locs, scale)
    buffer.view(torch.uint8).index_copy_(0, locs, narrow.view(torch.uint8))  # torch moves no float8 by index on a CPU


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """Gather rows of a table.

    Parameters
    ----------
    ids
        ``[...]`` int64.
    table
        ``[vocab, hidden]``.

    Returns
    -------
    ``[..., hidden]``
    """
    if ids.dim() == 1 and _one_type(table) and by_kernel(table):
        return kernels.module("elementwise").embedding(ids, table)
    return F.embedding(ids, table)


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
    if _one_type(gate_up) and by_kernel(gate_up):
        return kernels.module("elementwise").gated_activation(gate_up, "silu")
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up
