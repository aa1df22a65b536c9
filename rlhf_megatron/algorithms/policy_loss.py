"""Policy losses, one number per token, chosen by name. How tokens are added up is ``aggregation``'s matter.

A loss is a function of ``Tokens`` and the recipe's settings. It sees whole rows, a part of the minibatch at a time, and
must give each token what it would get if it saw them all: it may look at other tokens of the same row, never at other
rows. What a whole minibatch decides is decided before (``selection``).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from rlhf_megatron.algorithms.kl import LARGEST_LOG_RATIO
from rlhf_megatron.recipe import AlgorithmSection


@dataclasses.dataclass(frozen=True)
class Tokens:
    """n sampled tokens of whole rows; all tensors [n]."""

    logprobs: Tensor  # of the policy that is trained: the one input with a gradient
    old_logprobs: Tensor
    advantages: Tensor
    row: Tensor  # int64: equal for the tokens of one response, which follow each other
    selected: Tensor | None = None  # bool: those that ``selection`` picked, for clip_cov and kl_cov

    @functools.cached_property
    def log_ratio(self) -> Tensor:
        """Logarithm of new over old probability, between -20 and 20: no token makes a loss or gradient infinite."""
        return (self.logprobs - self.old_logprobs).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)

    def row_means(self, values: Tensor) -> Tensor:
        """Map [n] -> [n]: the mean over the token's row. The same bits in every run: no atomic additions."""
        if not len(values):  # segment_reduce wants a segment
            return values
        count = self.row.unique_consecutive(return_counts=True)[1]
        means = torch.segment_reduce(values, "mean", lengths=count)
        return means.repeat_interleave(count, output_size=len(values))

    def as_sequence(self, log_ratio: Tensor) -> Tensor:
        """Map [n] -> [n]: the row's mean, with the gradient of a token's own.

        GSPO-token (arXiv 2507.18071, eq. 14): summed over a row with equal weights and one advantage, gradients are
        those of the mean itself, and an advantage per token keeps its meaning.
        """
        return self.row_means(log_ratio).detach() + (log_ratio - log_ratio.detach())


@dataclasses.dataclass(frozen=True)
class PolicyLoss:
    """Per-token results [n]."""

    per_token: Tensor
    clipped: Tensor  # bool: a bound decided


PolicyLossFunction = Callable[[Tokens, AlgorithmSection], PolicyLoss]


def _clipped_surrogate(log_ratio: Tensor, advantages: Tensor, settings: AlgorithmSection) -> PolicyLoss:
    """Return -min(r A, clip(r, 1 - low, 1 + high) A), and at most -c A where A < 0 with dual clip."""
    ratio = log_ratio.exp()
    free = -ratio * advantages
    bounded = -ratio.clamp(1.0 - settings.clip_ratio_low, 1.0 + settings.clip_ratio_high) * advantages
    per_token, clipped = torch.maximum(free, bounded), bounded > free
    if settings.clip_ratio_dual is not None:
        ceiling = -settings.clip_ratio_dual * advantages
        over = (advantages < 0) & (per_token > ceiling)
        per_token, clipped = torch.where(over, ceiling, per_token), clipped | over
    return PolicyLoss(per_token, clipped)


def clip_loss(tokens: Tokens, settings: AlgorithmSection) -> PolicyLoss:
    """Return PPO's clipped surrogate (arXiv 1707.06347, eq. 7), with separate bounds as in DAPO (arXiv 2503.14476, eq.
    8).

    With ``clip_ratio_dual`` c the loss of a token with A < 0 is at most -c A (arXiv 1912.09729, eq. 5).
    """
    return _clipped_surrogate(tokens.log_ratio, tokens.advantages, settings)


def gspo_loss(tokens: Tokens, settings: AlgorithmSection) -> PolicyLoss:
    """Return the same with the sequence's ratio, the geometric mean over its tokens (GSPO, arXiv 2507.18071, eq. 5 and
    7)."""
    return _clipped_surrogate(tokens.as_sequence(tokens.log_ratio), tokens.advantages, settings)


def gmpo_loss(tokens: Tokens, settings: AlgorithmSection) -> PolicyLoss:
    """Return -A times the geometric mean of the tokens' clipped ratios (GMPO, arXiv 2507.20673).

    The bounds are those of the LOGARITHM of a token's ratio, -low and high, and each holds in the one direction that
    the advantage pushes to.
    """
    direction = tokens.advantages.sign()
    bounded = tokens.log_ratio.clamp(-settings.clip_ratio_low, settings.clip_ratio_high)
    log_ratio = direction * torch.minimum(direction * tokens.log_ratio, direction * bounded)
    per_token = -tokens.as_sequence(log_ratio).exp() * tokens.advantages
    return PolicyLoss(per_token, direction * tokens.log_ratio > direction * bounded)


def cispo_loss(tokens: Tokens, settings: AlgorithmSection) -> PolicyLoss:
    """Return -clip(r, 1 - low, 1 + high) A logprob, without gradient through the ratio (CISPO, arXiv 2506.13585, eq. 4
    and 5).

    Every token keeps a gradient; the clipped weight bounds it. The loss's value has no meaning.
    """
    ratio = tokens.log_ratio.exp().detach()
    weight = ratio.clamp(1.0 - settings.clip_ratio_low, 1.0 + settings.clip_ratio_high)
    return PolicyLoss(-weight * tokens.advantages * tokens.logprobs, weight != ratio)


def sapo_loss(tokens: Tokens, settings: AlgorithmSection) -> PolicyLoss:
    """Return -A (4 / tau) sigmoid(tau (r - 1)): a gate instead of a bound (SAPO, arXiv 2511.20347).

    tau is ``sapo.temperature_positive`` where A > 0, else ``sapo.temperature_negative``.
    """
    positive, negative = settings.sapo.temperature_positive, settings.sapo.temperature_negative
    temperature = torch.full_like(tokens.advantages, negative).masked_fill(tokens.advantages > 0, positive)
    gate = torch.sigmoid(temperature * (tokens.log_ratio.exp() - 1.0)) * (4.0 / temperature)
    return PolicyLoss(-gate * tokens.advantages, torch.zeros_like(tokens.row, dtype=torch.bool))


def clip_cov_loss(tokens: Tokens, settings: AlgorithmSection) -> PolicyLoss:
    """Return ``clip_loss`` without the selected tokens of high covariance (arXiv 2505.22617, eq. 11 and 12)."""
    assert tokens.selected is not None
    clip = clip_loss(tokens, settings)
    return PolicyLoss(torch.where(tokens.selected, 0.0, clip.per_token), clip.clipped | tokens.selected)


def kl_cov_loss(tokens: Tokens, settings: AlgorithmSection) -> PolicyLoss:
    """Return -r A, plus kl_coef |log r| on the selected tokens of highest covariance (arXiv 2505.22617, eq. 13 and
    14)."""
    assert tokens.selected is not None
    penalty = torch.where(tokens.selected, settings.covariance.kl_coef * tokens.log_ratio.abs(), 0.0)
    return PolicyLoss(-tokens.log_ratio.exp() * tokens.advantages + penalty, tokens.selected)


def dppo_tv_loss(tokens: Tokens, settings: AlgorithmSection) -> PolicyLoss:
    """Return -M r A, with M by the distance |new - old| of the token's probability (DPPO, arXiv 2602.04879, eq. 12 and
    13)."""
    distance = (tokens.logprobs.exp() - tokens.old_logprobs.exp()).abs()
    return _masked_surrogate(tokens, distance.detach(), settings)


def dppo_kl_loss(tokens: Tokens, settings: AlgorithmSection) -> PolicyLoss:
    """Return -M r A, with M by the KL(old || new) between "this token" and "another" (arXiv 2602.04879, eq. 12 and
    14)."""
    old, new = (logprobs.detach().exp().clamp(max=1.0 - 1e-6) for logprobs in (tokens.old_logprobs, tokens.logprobs))
    other = (1.0 - old) * (torch.log1p(-old) - torch.log1p(-new))
    return _masked_surrogate(tokens, other - old * tokens.log_ratio.detach(), settings)


def _masked_surrogate(tokens: Tokens, divergence: Tensor, settings: AlgorithmSection) -> PolicyLoss:
    """Return -M r A. M = 0 where the advantage pushes a token further away that is beyond its bound, low where A < 0.

    With ``clip_ratio_dual`` c it is -M min(r, c) A logprob, without gradient through the ratio (section 5.4): below c
    the gradient is the same, above it the token keeps one of weight c.
    """
    log_ratio, advantages = tokens.log_ratio, tokens.advantages
    beyond_high = (advantages > 0) & (log_ratio > 0) & (divergence > settings.clip_ratio_high)
    beyond_low = (advantages < 0) & (log_ratio < 0) & (divergence > settings.clip_ratio_low)
    masked = beyond_high | beyond_low
    weighted = log_ratio.exp()
    if settings.clip_ratio_dual is not None:
        weighted = weighted.detach().clamp(max=settings.clip_ratio_dual) * tokens.logprobs
    return PolicyLoss(torch.where(masked, 0.0, -weighted * advantages), masked)


def reinforce_loss(tokens: Tokens, settings: AlgorithmSection) -> PolicyLoss:
    """Return -A logprob: the policy gradient without a ratio, for one update per step (Williams 1992; arXiv
    2504.02546)."""
    return PolicyLoss(-tokens.advantages * tokens.logprobs, torch.zeros_like(tokens.row, dtype=torch.bool))


POLICY_LOSSES: dict[str, PolicyLossFunction] = {
    "clip": clip_loss,
    "gspo": gspo_loss,
    "gmpo": gmpo_loss,
    "cispo": cispo_loss,
    "sapo": sapo_loss,
    "clip_cov": clip_cov_loss,
    "kl_cov": kl_cov_loss,
    "dppo_tv": dppo_tv_loss,
    "dppo_kl": dppo_kl_loss,
    "reinforce": reinforce_loss,
}
