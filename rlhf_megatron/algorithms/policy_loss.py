"""The clipped policy-gradient loss, one number per token. How tokens are added up is ``aggregation``'s matter."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from rlhf_megatron.algorithms.kl import LARGEST_LOG_RATIO


@dataclasses.dataclass(frozen=True)
class PolicyLoss:
    """Per-token results, all of the logprobs' shape."""

    per_token: Tensor
    ratio: Tensor  # new over old probability
    clipped: Tensor  # bool: the bound decided, so the token has no gradient


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_dual: float | None = None,
) -> PolicyLoss:
    """-min(r A, clip(r, 1 - low, 1 + high) A), r = exp(logprobs - old_logprobs); all tensors [n].

    PPO (arXiv 1707.06347, eq. 7), with separate bounds as in DAPO (arXiv 2503.14476, eq. 8). With ``clip_ratio_dual`` c
    the loss of a token with A < 0 is at most -c A (arXiv 1912.09729, eq. 5). The logarithm of r is taken between -20
    and 20, so that no token makes the loss or its gradient infinite.
    """
    ratio = (logprobs - old_logprobs).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    free = -ratio * advantages
    bounded = -ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high) * advantages
    per_token, clipped = torch.maximum(free, bounded), bounded > free
    if clip_ratio_dual is not None:
        ceiling = -clip_ratio_dual * advantages
        over = (advantages < 0) & (per_token > ceiling)
        per_token, clipped = torch.where(over, ceiling, per_token), clipped | over
    return PolicyLoss(per_token, ratio, clipped)
