"""Gated feed-forward layer."""

from __future__ import annotations

from torch import Tensor, nn

from astrai_core import ops
from astrai_core.config.model import ModelConfig
from astrai_core.model.layers import FusedLinear, Linear


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))`` (arXiv 2002.05202) over a fused gate/up projection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.intermediate_size
        self.gate_up_proj = FusedLinear(config.hidden_size, {"gate_proj": width, "up_proj": width}, config.mlp_bias)
        self.down_proj = Linear(width, config.hidden_size, config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., hidden]`` to ``[..., hidden]``."""
        return self.down_proj(ops.swiglu(self.gate_up_proj(x)))
