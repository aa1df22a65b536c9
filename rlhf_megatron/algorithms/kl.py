"""Per-token estimators of KL(policy || reference) from samples of the policy.

John Schulman, "Approximating KL Divergence", 2020 (joschu.net/blog/kl-approx.html).
"""

from __future__ import annotations

import torch
from torch import Tensor

# exp(20) is 5e8: no update needs more, and float32 overflows at exp(89).
LARGEST_LOG_RATIO = 20.0


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, estimator: str) -> Tensor:
    """[n], [n] -> [n] nats. With d = logprobs - reference: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d.

    k1 and k3 are unbiased; k2 and k3 are never negative. k3 takes d between -20 and 20, so that one token which the
    policy has all but excluded cannot overflow. Raises ValueError for another name.
    """
    difference = logprobs - reference_logprobs
    match estimator:
        case "k1":
            return difference
        case "k2":
            return difference.square() / 2
        case "k3":
            return _k3(difference.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))
    raise ValueError(f"kl estimator {estimator!r}: use k1, k2 or k3")


def _k3(difference: Tensor) -> Tensor:
    """exp(-d) - 1 + d. Near 0 the terms cancel to d^2 / 2, so there it is its Taylor series, to d^6."""
    d = difference
    small = d.abs() < 0.05  # the first term left out is d^5 / 2520 of the whole: 1e-10
    series = d.square() * (1 / 2 - d * (1 / 6 - d * (1 / 24 - d * (1 / 120 - d / 720))))
    return torch.where(small, series, torch.expm1(-d) + d)
