"""Per-token estimators of KL(policy || reference) from samples of the policy.

John Schulman, "Approximating KL Divergence", 2020 (joschu.net/blog/kl-approx.html).
"""

from __future__ import annotations

import torch
from torch import Tensor


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, estimator: str) -> Tensor:
    """[n], [n] -> [n] nats. With d = logprobs - reference: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d.

    k1 and k3 are unbiased; k2 and k3 are never negative. k3 is computed without cancellation near d = 0.
    Raises ValueError for another name.
    """
    difference = logprobs - reference_logprobs
    match estimator:
        case "k1":
            return difference
        case "k2":
            return difference.square() / 2
        case "k3":
            return torch.expm1(-difference) + difference
    raise ValueError(f"kl estimator {estimator!r}: use k1, k2 or k3")
