"""KL(policy || reference) from samples of the policy: estimators per token, the penalty in the reward, its controller.

John Schulman, "Approximating KL Divergence", 2020 (joschu.net/blog/kl-approx.html).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlhf_megatron.data.rollout_batch import RolloutBatch
from rlhf_megatron.recipe import AlgorithmSection

# exp(20) is 5e8: no update needs more, and float32 overflows at exp(89).
LARGEST_LOG_RATIO = 20.0


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, estimator: str, gradient: str | None = None) -> Tensor:
    """Map [n], [n] -> [n] nats. With d = logprobs - reference: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d.

    k1 and k3 are unbiased; k2 and k3 are never negative. k3 takes d between -20 and 20, so that one token which the
    policy has all but excluded cannot overflow. As terms of a loss they differ: the expected gradient is 0 for k1,
    that of KL(policy || reference) for k2, and that of KL(reference || policy) for k3. So ``gradient`` may name another
    estimator to take the gradient of (straight-through): the value is that of ``estimator``. Raises ValueError for
    another name.
    """
    if gradient is not None and gradient != estimator:
        value = kl_estimate(logprobs, reference_logprobs, estimator).detach()
        slope = kl_estimate(logprobs, reference_logprobs, gradient)
        return value + (slope - slope.detach())
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
    """Return exp(-d) - 1 + d. Near 0 the terms cancel to d^2 / 2, so there it is its Taylor series, to d^6."""
    d = difference
    small = d.abs() < 0.05  # the first term left out is d^5 / 2520 of the whole: 1e-10
    series = d.square() * (1 / 2 - d * (1 / 6 - d * (1 / 24 - d * (1 / 120 - d / 720))))
    return torch.where(small, series, torch.expm1(-d) + d)


def with_kl_penalties(batch: RolloutBatch, settings: AlgorithmSection, coefficient: float) -> RolloutBatch:
    """Return the batch with ``penalties`` [T]: coefficient * KL(old policy, reference) of each sampled token.

    Advantages are of the reward less these: RLHF's reward (arXiv 2203.02155, eq. 2).
    """
    assert batch.old_logprobs is not None and batch.reference_logprobs is not None, "the KL needs both logprobs"
    divergence = kl_estimate(batch.old_logprobs, batch.reference_logprobs, settings.kl_estimator)
    return batch.with_fields(penalties=coefficient * divergence * batch.response_mask)


class KLController:
    """The coefficient of the KL term: fixed, or raised and lowered so that the KL stays near its target."""

    def __init__(self, settings: AlgorithmSection) -> None:
        """Start at ``settings.kl_coef``."""
        self.coefficient = settings.kl_coef
        self._settings = settings.kl_controller

    def observe(self, divergence: float, responses: int) -> None:
        """Take note of a step of ``responses`` rows with a mean ``divergence`` in nats per token.

        Proportional control in the logarithm (Ziegler et al. 2019, arXiv 1909.08593, section 2.2): the coefficient is
        multiplied by 1 + clip(divergence / target - 1, -0.2, 0.2) * min(1, responses / horizon). Their steps are
        smaller than the horizon; without the minimum a larger one could make the coefficient negative.
        """
        if self._settings.target is not None and math.isfinite(divergence):
            error = min(max(divergence / self._settings.target - 1.0, -0.2), 0.2)
            self.coefficient *= 1.0 + error * min(1.0, responses / self._settings.horizon)

    def state(self) -> dict[str, float]:
        """Return state for a checkpoint."""
        return {"coefficient": self.coefficient}

    def load(self, state: dict[str, float]) -> None:
        """Go on where ``state`` was taken; a fixed coefficient is the recipe's."""
        if self._settings.type == "adaptive":
            coefficient = float(state["coefficient"])
            if not 0.0 <= coefficient < math.inf:
                raise ValueError(f"a coefficient of {coefficient} is none")
            self.coefficient = coefficient
