"""Rotary position tables: frequencies of every scaling type, and the cos/sin table the layers index."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from astrai_core.attention.rotary import Rope
from astrai_core.config.model import ModelConfig, RopeParameters


def _powers(rope: RopeParameters, dim: int) -> Tensor:
    """``theta ** (2i / dim)`` for i in 0 .. dim/2, fp32."""
    return rope.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)


def _default(rope: RopeParameters, dim: int) -> tuple[Tensor, float]:
    return 1.0 / _powers(rope, dim), 1.0


def _linear(rope: RopeParameters, dim: int) -> tuple[Tensor, float]:
    assert rope.factor is not None, "checked by RopeParameters"
    return 1.0 / _powers(rope, dim) / rope.factor, 1.0


def _yarn(rope: RopeParameters, dim: int) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071, sections 3.2-3.4): interpolate slow dimensions, keep fast ones, blend between."""
    assert rope.factor is not None and rope.original_max_position_embeddings is not None, "checked by RopeParameters"
    context = rope.original_max_position_embeddings

    def dimension_of(rotations: float) -> float:
        """Index of the dimension that turns `rotations` times over the original context."""
        return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    low, high = dimension_of(rope.beta_fast or 32.0), dimension_of(rope.beta_slow or 1.0)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = high - low if high != low else 0.001
    interpolated = ((torch.arange(dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    powers = _powers(rope, dim)
    inv_freq = interpolated / (rope.factor * powers) + (1 - interpolated) / powers

    def mscale(weight: float) -> float:
        assert rope.factor is not None
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return inv_freq, rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return inv_freq, mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return inv_freq, mscale(1.0)


def _llama3(rope: RopeParameters, dim: int) -> tuple[Tensor, float]:
    """Llama 3.1: divide the frequencies of long wavelengths, keep short ones, blend linearly between."""
    context, factor = rope.original_max_position_embeddings, rope.factor
    low, high = rope.low_freq_factor, rope.high_freq_factor
    assert context and factor and low and high, "checked by RopeParameters"
    inv_freq = 1.0 / _powers(rope, dim)
    wavelength = 2 * math.pi / inv_freq
    kept = ((context / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * inv_freq / factor + kept * inv_freq, 1.0


_SCALINGS: dict[str, Callable[[RopeParameters, int], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "yarn": _yarn,
    "llama3": _llama3,
}


def frequencies(rope: RopeParameters, rotary_dim: int) -> tuple[Tensor, float]:
    """Return angular frequencies ``[rotary_dim / 2]`` fp32 (radians per position) and the scale of cos and sin."""
    return _SCALINGS[rope.rope_type](rope, rotary_dim)


class RotaryTable(nn.Module):
    """cos and sin of every position, fp32 whatever the model's dtype.

    Attributes
    ----------
    cos, sin
        ``[max_position_embeddings, rotary_dim / 2]``; not part of the state dict.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("cos", torch.empty(0), persistent=False)
        self.register_buffer("sin", torch.empty(0), persistent=False)
        self.reset(self.cos.device)

    @torch.no_grad()
    def reset(self, device: torch.device) -> None:
        """Compute the table on `device` (a table built under the meta device has no values)."""
        shape = (self.config.max_position_embeddings, self.config.rotary_dim // 2)
        if device.type == "meta":
            self.cos = self.sin = torch.empty(shape, device=device)
            return
        with torch.device(device):
            inv_freq, scale = frequencies(self.config.rope_parameters, self.config.rotary_dim)
            angles = torch.outer(torch.arange(shape[0], dtype=torch.float32), inv_freq)
        self.cos, self.sin = angles.cos() * scale, angles.sin() * scale

    def forward(self, position_ids: Tensor) -> Rope:
        """Return the angles of tokens at position_ids ``[tokens]``."""
        return Rope(self.cos, self.sin, position_ids, self.config.rope_interleave)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        was_meta = self.cos.is_meta
        module: Any = super()._apply(fn, recurse)
        if was_meta or self.cos.dtype != torch.float32:
            self.reset(self.cos.device)
        return module
