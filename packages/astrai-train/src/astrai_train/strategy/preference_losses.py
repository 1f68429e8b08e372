"""Losses on pairs of answers, of which one is preferred (DPO, arXiv 2305.18290, and what grew from it).

A loss is a function of the log-probabilities of a pair and of nothing else, so that a batch may be split in any way
(training rule 1). Throughout, ``d_c`` and ``d_r`` are the log-ratios ``log pi - log pi_ref`` of the chosen and the
rejected answer, summed over their tokens, and ``delta = d_c - d_r``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from astrai_core.errors import ConfigError
from astrai_core.registry import BaseFactory
from astrai_train.config.strategy import DPOConfig


@dataclass(frozen=True)
class PairLogprobs:
    """Log-probabilities of pairs, in nats, summed over each answer's tokens; every tensor is ``[pairs]``."""

    chosen: Tensor
    """Of the chosen answers under the model."""

    rejected: Tensor
    """Of the rejected answers under the model."""

    chosen_len: Tensor
    """Tokens of the chosen answers, at least 1."""

    rejected_len: Tensor
    """Tokens of the rejected answers, at least 1."""

    ref_chosen: Tensor | None = None
    """Of the chosen answers under the reference; None for losses without one."""

    ref_rejected: Tensor | None = None
    """Of the rejected answers under the reference; None for losses without one."""

    def log_ratios(self) -> tuple[Tensor, Tensor]:
        """Return ``(d_c, d_r)``.

        Raises
        ------
        ConfigError
            If there is no reference.
        """
        if self.ref_chosen is None or self.ref_rejected is None:
            raise ConfigError(
                "the preference loss needs log-probabilities of a reference; give ref_chosen, ref_rejected"
            )
        return self.chosen - self.ref_chosen, self.rejected - self.ref_rejected

    def means(self) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities per token under the model, chosen and rejected."""
        return self.chosen / self.chosen_len, self.rejected / self.rejected_len


class PreferenceLoss(ABC):
    """A loss of pairs.

    Parameters
    ----------
    beta
        Strength of the pull towards the reference.

    Raises
    ------
    ConfigError
        If an option is out of range.
    """

    needs_reference: ClassVar[bool] = True

    def __init__(self, *, beta: float) -> None:
        if beta <= 0:
            raise ConfigError(f"beta must be above 0, got {beta}")
        self.beta = beta

    @abstractmethod
    def __call__(self, pairs: PairLogprobs) -> Tensor:
        """Return the loss of each pair ``[pairs]``, with its graph."""

    def rewards(self, pairs: PairLogprobs) -> tuple[Tensor, Tensor]:
        """Return the implicit rewards of the chosen and the rejected answers ``[pairs]``, without graph."""
        chosen, rejected = pairs.log_ratios()
        return self.beta * chosen.detach(), self.beta * rejected.detach()


class PreferenceLossFactory(BaseFactory[PreferenceLoss]):
    """Preference losses by name."""


def create_preference_loss(config: DPOConfig) -> PreferenceLoss:
    """Build the loss of a recipe; each option that the loss has reaches it, the recipe class refuses the others."""
    options = {"beta": config.beta}
    if config.label_smoothing:
        options["label_smoothing"] = config.label_smoothing
    if config.simpo_gamma is not None:
        options["simpo_gamma"] = config.simpo_gamma
    return PreferenceLossFactory.create(config.loss, **options)


@PreferenceLossFactory.register("sigmoid")
class SigmoidLoss(PreferenceLoss):
    """DPO: ``-log sigmoid(beta delta)`` (arXiv 2305.18290, equation 7); ln 2 where the model is the reference."""

    def __call__(self, pairs: PairLogprobs) -> Tensor:
        """Return ``[pairs]``."""
        return -logsigmoid(self.beta * _delta(pairs))


@PreferenceLossFactory.register("hinge")
class HingeLoss(PreferenceLoss):
    """``max(0, 1 - beta delta)`` (SLiC-HF, arXiv 2305.10425, as RSO, arXiv 2309.06657, applies it to log-ratios)."""

    def __call__(self, pairs: PairLogprobs) -> Tensor:
        """Return ``[pairs]``."""
        return torch.relu(1.0 - self.beta * _delta(pairs))


@PreferenceLossFactory.register("ipo")
class IPOLoss(PreferenceLoss):
    """``(delta - 1 / (2 beta))^2`` (arXiv 2310.12036, equation 17).

    Parameters
    ----------
    beta
        The paper's tau.
    per_token
        Take the log-ratios per token, as the authors do in practice; without, the margin of ``1 / (2 beta)`` nats is
        asked of whole answers whatever their length.
    """

    def __init__(self, *, beta: float, per_token: bool = True) -> None:
        super().__init__(beta=beta)
        self.per_token = per_token

    def __call__(self, pairs: PairLogprobs) -> Tensor:
        """Return ``[pairs]``."""
        chosen, rejected = pairs.log_ratios()
        if self.per_token:
            chosen, rejected = chosen / pairs.chosen_len, rejected / pairs.rejected_len
        return (chosen - rejected - 1.0 / (2.0 * self.beta)).square()


class _SmoothedLoss(PreferenceLoss):
    def __init__(self, *, beta: float, label_smoothing: float) -> None:
        super().__init__(beta=beta)
        if not 0.0 <= label_smoothing < 0.5:
            raise ConfigError(f"label_smoothing must lie in [0, 0.5), got {label_smoothing}")
        self.label_smoothing = label_smoothing


@PreferenceLossFactory.register("cdpo")
class ConservativeLoss(_SmoothedLoss):
    """``(1 - e) L(beta delta) + e L(-beta delta)`` with DPO's L: labels are flipped with probability e.

    E. Mitchell, "A note on DPO with noisy preferences and relationship to IPO" (2023).
    """

    def __call__(self, pairs: PairLogprobs) -> Tensor:
        """Return ``[pairs]``."""
        margin, flipped = self.beta * _delta(pairs), self.label_smoothing
        return -(1.0 - flipped) * logsigmoid(margin) - flipped * logsigmoid(-margin)


@PreferenceLossFactory.register("robust")
class RobustLoss(_SmoothedLoss):
    """``((1 - e) L(beta delta) - e L(-beta delta)) / (1 - 2 e)``: unbiased under flipped labels (arXiv 2403.00409)."""

    def __call__(self, pairs: PairLogprobs) -> Tensor:
        """Return ``[pairs]``."""
        margin, flipped = self.beta * _delta(pairs), self.label_smoothing
        weighed = -(1.0 - flipped) * logsigmoid(margin) + flipped * logsigmoid(-margin)
        return weighed / (1.0 - 2.0 * flipped)


@PreferenceLossFactory.register("apo_zero")
class APOZeroLoss(PreferenceLoss):
    """``1 - sigmoid(beta d_c) + sigmoid(beta d_r)``: chosen up, rejected down (arXiv 2408.06266)."""

    def __call__(self, pairs: PairLogprobs) -> Tensor:
        """Return ``[pairs]``."""
        chosen, rejected = pairs.log_ratios()
        return torch.sigmoid(-self.beta * chosen) + torch.sigmoid(self.beta * rejected)


@PreferenceLossFactory.register("nca")
class NCALoss(PreferenceLoss):
    """Noise-contrastive alignment of pairs (arXiv 2402.05369).

    ``-log s(beta d_c) - (log s(-beta d_c) + log s(-beta d_r)) / 2`` with the sigmoid s.
    """

    def __call__(self, pairs: PairLogprobs) -> Tensor:
        """Return ``[pairs]``."""
        chosen, rejected = (self.beta * ratio for ratio in pairs.log_ratios())
        return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


@PreferenceLossFactory.register("sppo")
class SPPOLoss(PreferenceLoss):
    """Self-play preference optimisation with hard labels (arXiv 2405.00675): the answers win with probability 1 and 0.

    ``(d_c - 1 / (2 beta))^2 + (d_r + 1 / (2 beta))^2``, where ``1 / beta`` is the paper's eta.
    """

    def __call__(self, pairs: PairLogprobs) -> Tensor:
        """Return ``[pairs]``."""
        chosen, rejected = pairs.log_ratios()
        half = 1.0 / (2.0 * self.beta)
        return (chosen - half).square() + (rejected + half).square()


@PreferenceLossFactory.register("kto")
class KTOLoss(PreferenceLoss):
    """Kahneman-Tversky optimisation (arXiv 2402.01306) of the two answers of a pair, with equal weights.

    ``(1 - s(beta (d_c - z_c)) + 1 - s(beta (z_r - d_r))) / 2`` with the sigmoid s. The reference points z, through
    which no gradient goes, estimate the divergence from the reference by the pair's other answer: ``z_c = max(0,
    d_r)`` and ``z_r = max(0, d_c)``. The paper averages them over a batch, which would make the loss depend on how a
    step is split.
    """

    def __call__(self, pairs: PairLogprobs) -> Tensor:
        """Return ``[pairs]``."""
        chosen, rejected = pairs.log_ratios()
        z_chosen, z_rejected = rejected.detach().clamp(min=0), chosen.detach().clamp(min=0)
        desired = torch.sigmoid(self.beta * (z_chosen - chosen))
        undesired = torch.sigmoid(self.beta * (rejected - z_rejected))
        return (desired + undesired) / 2.0


@PreferenceLossFactory.register("simpo")
class SimPOLoss(PreferenceLoss):
    """``-log sigmoid(beta (log pi_c / n_c - log pi_r / n_r) - gamma)``, without reference (arXiv 2405.14734).

    Parameters
    ----------
    beta
        Scale of the reward, which is the log-probability per token.
    simpo_gamma
        Target margin of the rewards.
    """

    needs_reference = False

    def __init__(self, *, beta: float, simpo_gamma: float = 0.5) -> None:
        super().__init__(beta=beta)
        if simpo_gamma < 0:
            raise ConfigError(f"simpo_gamma must not be negative, got {simpo_gamma}")
        self.simpo_gamma = simpo_gamma

    def __call__(self, pairs: PairLogprobs) -> Tensor:
        """Return ``[pairs]``."""
        chosen, rejected = pairs.means()
        return -logsigmoid(self.beta * (chosen - rejected) - self.simpo_gamma)

    def rewards(self, pairs: PairLogprobs) -> tuple[Tensor, Tensor]:
        """Return ``beta`` times the log-probabilities per token ``[pairs]``, without graph."""
        chosen, rejected = pairs.means()
        return self.beta * chosen.detach(), self.beta * rejected.detach()


@PreferenceLossFactory.register("orpo")
class ORPOLoss(PreferenceLoss):
    """Cross entropy per token of the chosen answer plus beta times the odds-ratio loss (arXiv 2403.07691).

    The odds-ratio loss is ``-log sigmoid(log(odds_c / odds_r))`` with ``odds = p / (1 - p)`` and p the geometric mean
    of an answer's token probabilities; beta is the paper's lambda.
    """

    needs_reference = False

    def __call__(self, pairs: PairLogprobs) -> Tensor:
        """Return ``[pairs]``."""
        return -pairs.means()[0] + self.beta * self.odds_ratio_loss(pairs)

    @staticmethod
    def odds_ratio_loss(pairs: PairLogprobs) -> Tensor:
        """Return the second term alone ``[pairs]``, not yet weighed."""
        chosen, rejected = pairs.means()
        return -logsigmoid(_log_odds(chosen) - _log_odds(rejected))

    def rewards(self, pairs: PairLogprobs) -> tuple[Tensor, Tensor]:
        """Return ``beta`` times the log-probabilities per token ``[pairs]``, without graph."""
        chosen, rejected = pairs.means()
        return self.beta * chosen.detach(), self.beta * rejected.detach()


def _delta(pairs: PairLogprobs) -> Tensor:
    chosen, rejected = pairs.log_ratios()
    return chosen - rejected


def _log_odds(logprob: Tensor) -> Tensor:
    """Return ``log(p / (1 - p))`` of a log-probability; one that rounded to 0 counts as just below."""
    below = logprob.clamp(max=-torch.finfo(logprob.dtype).eps)
    return below - torch.log(-torch.expm1(below))
