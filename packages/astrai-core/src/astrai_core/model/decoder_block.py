"""One pre-norm decoder layer over a (x, residual) pair."""

from __future__ import annotations

from torch import Tensor, nn

from astrai_core.config.model import ModelConfig
from astrai_core.model.attention import Attention, DenseContext, PagedContext
from astrai_core.model.layers import RMSNorm
from astrai_core.model.mlp import SwiGLU


class DecoderBlock(nn.Module):
    """Attention and feed-forward, each behind a norm. The residual stream travels beside x, so that every addition
    fuses with the norm that follows it."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config)

    def forward(
        self, x: Tensor, residual: Tensor | None, context: DenseContext | PagedContext
    ) -> tuple[Tensor, Tensor]:
        """Return the layer's output, not yet added to the residual stream, and that stream.

        Parameters
        ----------
        x
            ``[..., hidden]``: what the last layer adds to the stream.
        residual
            ``[..., hidden]``, or None in the first layer.
        """
        x, residual = self.input_layernorm.add(x, residual)
        x = self.self_attn(x, context)
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x), residual
