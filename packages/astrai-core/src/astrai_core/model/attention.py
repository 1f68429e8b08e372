"""Self-attention of one decoder layer: dense (training, scoring) or through the paged pool (serving)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from astrai_core import ops
from astrai_core.attention.backend import AttentionBackend, AttentionSpec
from astrai_core.attention.gather import causal_mask
from astrai_core.attention.rotary import Rope
from astrai_core.config.model import ModelConfig
from astrai_core.model.layers import FusedLinear, Linear, RMSNorm

if TYPE_CHECKING:
    from astrai_core.attention.metadata import KVCache


@dataclass(frozen=True)
class DenseContext:
    """What all layers of a pass without a cache share. Hidden states are ``[batch, seq, hidden]``."""

    rope: Rope
    """Of ``batch * seq`` tokens."""
    masks: Mapping[int | None, Tensor | None]
    """Window -> bool mask broadcastable to ``[batch, heads, seq, seq]``; None where plain causal masking is right."""
    doc_lens: tuple[int, ...] | None = None
    """Lengths of the documents that make up the ``batch * seq`` tokens, row after row; each attends to itself alone, and
    `masks` is not used. None: a row is one document."""


@dataclass(frozen=True)
class PagedContext:
    """What all layers of an engine step share. Hidden states are ``[tokens, hidden]``."""

    rope: Rope
    cache: KVCache
    backend: AttentionBackend


def attention_spec(config: ModelConfig, layer: int) -> AttentionSpec:
    """Return the facts of one layer's attention."""
    return AttentionSpec(
        layer=layer,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        window=config.window(layer),
        use_rope=config.rope_layers[layer],
        norm_eps=config.rms_norm_eps,
    )


class Attention(nn.Module):
    """Grouped-query self-attention (arXiv 2305.13245) over a fused q/k/v projection."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.spec = attention_spec(config, layer)
        self.dropout = config.attention_dropout
        self.qkv_proj = FusedLinear(
            config.hidden_size,
            {"q_proj": heads * dim, "k_proj": kv_heads * dim, "v_proj": kv_heads * dim},
            config.attention_bias,
        )
        self.o_proj = Linear(heads * dim, config.hidden_size, config.attention_out_bias)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, context: DenseContext | PagedContext) -> Tensor:
        """Attend; x and the result are ``[batch, seq, hidden]`` (dense) or ``[tokens, hidden]`` (paged)."""
        q_norm = None if self.q_norm is None else self.q_norm.weight
        k_norm = None if self.k_norm is None else self.k_norm.weight
        qkv = self.qkv_proj(x)
        if isinstance(context, PagedContext):
            backend, cache = context.backend, context.cache
            q = backend.qkv_norm_rope_write(qkv, self.spec, cache, context.rope, q_norm, k_norm)
            run = backend.fwd_decode if cache.phase == "decode" else backend.fwd_prefill
            return self.o_proj(run(q, self.spec, cache).flatten(1))
        batch, seq, _ = x.shape
        q, k, v = ops.qkv_norm_rope(
            qkv.flatten(0, 1),
            self.spec.n_heads,
            self.spec.n_kv_heads,
            rope=context.rope if self.spec.use_rope else None,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=self.spec.norm_eps,
        )
        if context.doc_lens is not None:
            parts = (part.split(context.doc_lens) for part in (q, k, v))
            out = torch.cat([self._document(*document) for document in zip(*parts, strict=True)])
            return self.o_proj(out.view(batch, seq, -1))
        q, k, v = (part.view(batch, seq, -1, self.spec.head_dim).transpose(1, 2) for part in (q, k, v))
        out = self._attend(q, k, v, context.masks[self.spec.window])
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _document(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend within one document; ``[tokens, heads, head_dim]`` each."""
        n, window = q.shape[0], self.spec.window
        mask = None if window is None or window >= n else causal_mask(n, n, window, q.device)
        q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (q, k, v))
        return self._attend(q, k, v, mask).squeeze(0).transpose(0, 1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """``[batch, heads, seq, head_dim]`` each; plain causal masking without a mask."""
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.spec.scale,
            enable_gqa=self.spec.n_heads != self.spec.n_kv_heads,
        )
