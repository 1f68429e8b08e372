"""A whole decode step in plain torch, made of the ops' own twins: what tests compare the kernel with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from .reference import embedding as gather
from .reference import linear, qkv_norm_rope_write, rms_norm
from .reference_attention import decode_attention

if TYPE_CHECKING:
    from .step import StepLayer


def decode_step(
    layers: Sequence[StepLayer],
    embedding: Tensor,
    final_norm: Tensor,
    head: Tensor,
    cos: Tensor,
    sin: Tensor,
    ids: Tensor,
    position_ids: Tensor,
    out_cache_loc: Tensor,
    seq_lens: Tensor,
    req_to_token: Tensor,
    req_indices: Tensor | None = None,
    *,
    n_heads: int,
    eps: float = 1e-6,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Twin of :func:`astrai_kernels.decode_step`, on any device and for any number of rows; the pools are written.

    Parameters
    ----------
    layers, embedding, final_norm, head, cos, sin, n_heads, eps, scale
        As :class:`astrai_kernels.DecodeStep` takes them; any floating type.
    ids, position_ids, out_cache_loc, seq_lens, req_to_token, req_indices
        As :func:`astrai_kernels.decode_step` takes them.

    Returns
    -------
    logits : Tensor
        ``[rows, vocab]``.
    last_hidden : Tensor
        ``[rows, hidden]``, after the final norm.
    """
    x = gather(ids, embedding)
    for layer in layers:
        qkv = linear(x, layer.qkv, bias=layer.qkv_bias, norm_weight=layer.input_norm, norm_eps=eps)
        n_kv_heads = layer.k_buffer.shape[1]
        q = qkv_norm_rope_write(
            *(qkv, position_ids, cos, sin, layer.k_buffer, layer.v_buffer, out_cache_loc, n_heads, n_kv_heads),
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=eps,
        )
        attended, _ = decode_attention(
            q, layer.k_buffer, layer.v_buffer, seq_lens, req_to_token=req_to_token, req_indices=req_indices, scale=scale
        )
        x = linear(attended.flatten(1), layer.o, bias=layer.o_bias, residual=x)
        gated = linear(x, layer.gate_up, activation="swiglu", norm_weight=layer.post_norm, norm_eps=eps)
        x = linear(gated, layer.down, residual=x)
    last_hidden = rms_norm(x, final_norm, eps)
    return linear(last_hidden, head), last_hidden
