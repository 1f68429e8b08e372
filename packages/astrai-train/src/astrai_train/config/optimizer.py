"""How the weights move: one class for each optimizer, told apart by `name`.

The composite optimizers split the parameters: hidden 2-D weights go to the matrix optimizer, and embeddings, output
head, norms, biases and scalars to its companion. Their own fields carry the part's name as a prefix.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from astrai_core.config.base import CONFIG, BaseConfig, dataclass
from astrai_train.config.fields import Share

Betas = tuple[Share, Share]
"""Decays of the first and second moment."""


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class AdamWConfig(BaseConfig):
    """AdamW on every parameter (torch's fused implementation)."""

    name: Literal["adamw"] = "adamw"
    """Selects this optimizer."""

    lr: PositiveFloat
    """Base learning rate."""

    betas: Betas = (0.9, 0.95)
    """Decays of the first and second moment."""

    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""

    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay, scaled by the learning rate; matrices only, never norms or biases."""

    decay_embeddings: bool = True
    """Decay the embedding table too, and with it an output head that is tied to it."""


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class MuonAdamWConfig(BaseConfig):
    """Muon on matrices, AdamW on the rest (K. Jordan; arXiv 2502.16982)."""

    name: Literal["muon_adamw"] = "muon_adamw"
    """Selects this optimizer."""

    lr: PositiveFloat
    """Base learning rate of the matrices."""

    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay of the matrices, scaled by the unadjusted learning rate."""

    muon_momentum: Share = 0.95
    """Decay of the momentum."""

    muon_nesterov: bool = True
    """Look one step ahead along the momentum."""

    muon_ns_steps: Annotated[int, Field(ge=1, le=20)] = 5
    """Newton-Schulz iterations."""

    muon_ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    """Coefficients a, b, c of X <- a X + (b A + c A^2) X with A = X X^T."""

    muon_ns_dtype: Literal["bf16", "fp32"] = "bf16"
    """Numbers of the Newton-Schulz iteration; ``fp32`` is slower on a GPU and often faster on a CPU."""

    muon_eps: PositiveFloat = 1e-7
    """Guards the division by the Frobenius norm."""

    muon_scale: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Scale of an update of shape [m, n]: ``match_rms_adamw`` 0.2 sqrt(max(m, n)), which lets AdamW's learning rate
    and decay be kept; ``original`` sqrt(max(1, m / n)), which wants a larger `lr` and a separate `adamw_lr`."""

    adamw_lr: PositiveFloat | None = None
    """Base learning rate of the other parameters; null is `lr`."""

    adamw_betas: Betas = (0.9, 0.95)
    """AdamW's decays of the first and second moment."""

    adamw_eps: PositiveFloat = 1e-8
    """Added to the root of AdamW's second moment."""

    adamw_weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of the embeddings, the output head, adapters and routers."""


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class ManoAdamWConfig(BaseConfig):
    """Mano, second version, on matrices; AdamW on the rest (arXiv 2601.23000; rows O2 and O3)."""

    name: Literal["mano_adamw"] = "mano_adamw"
    """Selects this optimizer."""

    lr: PositiveFloat = 1e-3
    """Base learning rate of the matrices."""

    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay of the matrices."""

    mano_momentum: Share = 0.95
    """Decay of the heavy-ball momentum."""

    mano_nesterov: bool = True
    """Look one step ahead along the momentum."""

    mano_eps: PositiveFloat = 1e-8
    """Added to the norm of the tangent; a slice without tangent does not move."""

    adamw_lr: PositiveFloat | None = None
    """Base learning rate of the other parameters; null is `lr`."""

    adamw_betas: Betas = (0.9, 0.95)
    """AdamW's decays of the first and second moment."""

    adamw_eps: PositiveFloat = 1e-8
    """Added to the root of AdamW's second moment."""

    adamw_weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of the embeddings, the output head, adapters and routers."""


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class NoraNAdamWConfig(BaseConfig):
    """Nora on matrices, NAdamW on the rest (arXiv 2605.03769)."""

    name: Literal["nora_nadamw"] = "nora_nadamw"
    """Selects this optimizer."""

    lr: PositiveFloat = 5e-3
    """Base learning rate of the matrices."""

    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of the matrices; at 0 a row's squared norm grows by exactly (lr * scale)^2 a step."""

    nora_beta: Share = 0.95
    """Decay of the moving average of the gradient."""

    nora_momentum: Share = 0.95
    """Weight of the moving average in the Nesterov step; the gradient has the rest."""

    nora_eps: PositiveFloat = 1e-10
    """Guards the division by a row's norm; a zero row is not projected."""

    nadamw_lr: PositiveFloat | None = None
    """Base learning rate of the other parameters; null is `lr`."""

    nadamw_betas: Betas = (0.9, 0.999)
    """NAdamW's decays of the first and second moment."""

    nadamw_eps: PositiveFloat = 1e-8
    """Added to the root of NAdamW's second moment."""

    nadamw_weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of the embeddings, the output head, adapters and routers."""


OptimizerConfig = Annotated[
    AdamWConfig | MuonAdamWConfig | ManoAdamWConfig | NoraNAdamWConfig, Field(discriminator="name")
]
"""One of the optimizers, chosen by its `name`."""
