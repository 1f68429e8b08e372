"""Self-attention of one decoder layer: dense (training, scoring) or through the paged pool (serving)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from astrai_core import linear_ops, ops
from astrai_core.attention.backend import AttentionBackend, AttentionSpec
from astrai_core.attention.rotary import Rope
from astrai_core.config.model import ModelConfig
from astrai_core.model.documents import DocumentAttention, attend_rows
from astrai_core.model.layers import FusedLinear, Linear, RMSNorm
from astrai_core.model.moe import RouterStats

if TYPE_CHECKING:
    from astrai_core.attention.metadata import KVCache


@dataclass(frozen=True)
class DenseContext:
    """What all layers of a pass without a cache share. Hidden states are ``[batch, seq, hidden]``."""

    rope: Rope
    """Of ``batch * seq`` tokens."""
    masks: Mapping[int | None, Tensor | None]
    """Window -> bool mask broadcastable to ``[batch, heads, seq, seq]``; None where plain causal masking is right."""
    documents: DocumentAttention | None = None
    """How the documents that make up the ``batch * seq`` tokens attend, each to itself alone; `masks` is not used then.
    None: a row is one document."""
    router: RouterStats | None = None
    """What the layers tell about their routing, if it is wanted."""


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
        qkv = self.qkv_proj(x)
        if isinstance(context, PagedContext):
            return self.o_proj(self._attend_paged(qkv, context))
        q_norm, k_norm = self._head_norms()
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
        dropout = self.dropout if self.training else 0.0
        if context.documents is not None:
            out = context.documents.attend(q, k, v, self.spec, dropout)
            return self.o_proj(out.reshape(batch, seq, -1))
        q, k, v = (part.view(batch, seq, -1, self.spec.head_dim).transpose(1, 2) for part in (q, k, v))
        out = attend_rows(q, k, v, context.masks[self.spec.window], self.spec, dropout)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def can_add(self, x: Tensor) -> bool:
        """Whether :meth:`add_to` is four launches, or three, for as many rows as `x` has."""
        return self.qkv_proj.can_fuse(x) and self.o_proj.can_fuse(x)

    def add_to(
        self,
        stream: Tensor,
        norm: RMSNorm,
        context: PagedContext,
        half: linear_ops.HalfNorm | None,
        following: RMSNorm | None,
    ) -> tuple[Tensor, linear_ops.HalfNorm | None]:
        """Return ``stream + attention(norm(stream))``, ``[tokens, hidden]``, in as few launches as there can be.

        `half` is what has been done of the norm, and what is returned beside the stream that of the one `following`.
        """
        qkv = self.qkv_proj.fused(stream, norm=norm, half=half)
        return self.o_proj.add_to(stream, self._attend_paged(qkv, context), following)

    def _attend_paged(self, qkv: Tensor, context: PagedContext) -> Tensor:
        """Return ``[tokens, n_heads * head_dim]``; keys and values go into the pool."""
        attended = context.backend.attend(qkv, self.spec, context.cache, context.rope, *self._head_norms())
        return attended.flatten(1)

    def _head_norms(self) -> tuple[Tensor | None, Tensor | None]:
        return (
            None if self.q_norm is None else self.q_norm.weight,
            None if self.k_norm is None else self.k_norm.weight,
        )
