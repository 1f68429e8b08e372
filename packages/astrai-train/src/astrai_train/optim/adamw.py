"""AdamW (Loshchilov & Hutter, arXiv 1711.05101): torch's fused implementation, alone or beside a matrix optimizer."""

from __future__ import annotations

from typing import Any

from torch import nn, optim

from astrai_train.optim.composite import CompositeOptimizer
from astrai_train.optim.groups import decay_groups, optimized_parameters


def fused_adamw(groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float) -> optim.AdamW:
    """Build torch's fused AdamW over `groups`, each with its own ``weight_decay``."""
    return optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)


class AdamW(CompositeOptimizer):
    """AdamW on every trainable parameter; :class:`~astrai_train.config.AdamWConfig` describes the options."""

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        decay_embeddings: bool,
    ) -> None:
        groups = decay_groups(optimized_parameters(model), weight_decay, decay_embeddings=decay_embeddings)
        super().__init__({"adamw": fused_adamw(groups, lr=lr, betas=betas, eps=eps)})
