"""The rotary angles of a step: :class:`Rope`."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(eq=False)
class Rope:
    """Angles of a step's tokens, in the form that kernels read and, made once a step, the one of the torch twin."""

    cos: Tensor
    """``[max_pos, rotary_dim / 2]`` fp32, a row for every position."""
    sin: Tensor
    """The same for sines."""
    position_ids: Tensor
    """``[tokens]`` int64: each token's row of the tables."""
    interleaved: bool = False
    """Pairs are neighbours (2i, 2i+1) instead of halves (i, i + rotary_dim/2)."""
    _of_tokens: tuple[Tensor, Tensor] | None = field(default=None, init=False, repr=False)

    def of_tokens(self) -> tuple[Tensor, Tensor]:
        """Return cos and sin ``[tokens, 1, rotary_dim]``: every angle stands at both dimensions of its pair, the sine
        negative at the first."""
        # Not functools.cached_property: torch.compile cannot trace its lock (Python 3.11).
        if self._of_tokens is None:
            cos, sin = self.cos[self.position_ids].unsqueeze(1), self.sin[self.position_ids].unsqueeze(1)
            if self.interleaved:
                self._of_tokens = cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)
            else:
                self._of_tokens = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return self._of_tokens
