"""Gated feed-forward layer."""

from __future__ import annotations

from torch import Tensor, nn

from astrai_core import linear_ops, ops
from astrai_core.config.model import ModelConfig
from astrai_core.model.layers import FusedLinear, Linear, RMSNorm


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))`` (arXiv 2002.05202) over a fused gate/up projection."""

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__()
        self.gate_up_proj = FusedLinear(config.hidden_size, {"gate_proj": width, "up_proj": width}, config.mlp_bias)
        self.down_proj = Linear(width, config.hidden_size, config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., hidden]`` to ``[..., hidden]``."""
        return self.down_proj(ops.swiglu(self.gate_up_proj(x)))

    def can_add(self, x: Tensor) -> bool:
        """Whether :meth:`add_to` is two launches for as many rows as `x` has."""
        return self.gate_up_proj.bias is None and self.gate_up_proj.can_fuse(x) and self.down_proj.can_fuse(x)

    def add_to(
        self, stream: Tensor, norm: RMSNorm, half: linear_ops.HalfNorm | None, following: RMSNorm | None
    ) -> tuple[Tensor, linear_ops.HalfNorm | None]:
        """Return ``stream + mlp(norm(stream))``, ``[tokens, hidden]``, in as few launches as there can be.

        `half` is what has been done of the norm, and what is returned beside the stream that of the one `following`.
        """
        gated = self.gate_up_proj.fused(stream, norm=norm, half=half, gated=True)
        return self.down_proj.add_to(stream, gated, following)
