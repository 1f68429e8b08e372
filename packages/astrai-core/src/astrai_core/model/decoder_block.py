"""One pre-norm decoder layer over a (x, residual) pair."""

from __future__ import annotations

from torch import Tensor, nn

from astrai_core.config.model import ModelConfig
from astrai_core.linear_ops import HalfNorm
from astrai_core.model.attention import Attention, DenseContext, PagedContext
from astrai_core.model.layers import RMSNorm
from astrai_core.model.mlp import SwiGLU
from astrai_core.model.moe import SparseMoE


class DecoderBlock(nn.Module):
    """Attention and feed-forward, each behind a norm. The residual stream travels beside x, so that every addition
    fuses with the norm that follows it."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp: SparseMoE | SwiGLU = (
            SparseMoE(config, layer) if config.moe_layers[layer] else SwiGLU(config, config.intermediate_size)
        )

    def can_add(self, x: Tensor) -> bool:
        """Whether a step over the pool adds to the stream in the projections, for as many rows as `x` has."""
        mlp = self.mlp
        return isinstance(mlp, SwiGLU) and self.self_attn.can_add(x) and mlp.can_add(x)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        context: DenseContext | PagedContext,
        half: HalfNorm | None = None,
        following: RMSNorm | None = None,
    ) -> tuple[Tensor, Tensor | None, HalfNorm | None]:
        """Return the layer's output, not yet added to the residual stream, that stream, and half of the next norm.

        Where few rows, or in deterministic mode any number, go through the kernels, the additions happen in the
        projections before them, and norms in the projections around them: x is then the whole stream, and there is no
        residual (six launches instead of nine).

        Parameters
        ----------
        x
            ``[..., hidden]``: what the last layer adds to the stream.
        residual
            ``[..., hidden]``, or None in the first layer.
        half
            What the layer ahead, or the embedding, has done of this layer's first norm.
        following
            The norm that reads the stream behind this layer, if this layer may do half of it.
        """
        if residual is None and isinstance(context, PagedContext) and self.can_add(x):
            mlp: SwiGLU = self.mlp  # type: ignore[assignment]
            norm = self.post_attention_layernorm
            stream, half = self.self_attn.add_to(x, self.input_layernorm, context, half, norm)
            stream, half = mlp.add_to(stream, norm, half, following)
            return stream, None, half
        x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, context)
        x, residual = self.post_attention_layernorm(x, residual)
        if isinstance(self.mlp, SparseMoE):
            return self.mlp(x, context.router if isinstance(context, DenseContext) else None), residual, None
        return self.mlp(x), residual, None
