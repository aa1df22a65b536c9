"""The objective of a policy update: clipped loss, KL to a reference and entropy bonus, summed with given weights."""

from __future__ import annotations

from torch import Tensor

from rlhf_megatron.algorithms.kl import kl_estimate
from rlhf_megatron.algorithms.policy_loss import clipped_policy_loss
from rlhf_megatron.recipe import AlgorithmSection

Metrics = dict[str, tuple[Tensor, Tensor]]


def policy_objective(
    logprobs: Tensor, entropy: Tensor, fields: dict[str, Tensor], settings: AlgorithmSection
) -> tuple[Tensor, Metrics]:
    """logprobs [n] and entropy [n] of some sampled tokens, and their ``fields`` [n]: old_logprobs, advantages, weights
    and, where ``settings.kl_coef`` is not 0, reference_logprobs -> (loss, metrics).

    The loss is a sum over these tokens of weight * (policy loss + kl_coef * KL - entropy_coef * entropy); since weights
    are normalised over the whole minibatch, sums over its parts add up to its loss. Metrics are (sum, count) pairs.
    """
    weights, advantages, old_logprobs = fields["weights"], fields["advantages"], fields["old_logprobs"]
    policy = clipped_policy_loss(
        logprobs,
        old_logprobs,
        advantages,
        settings.clip_ratio_low,
        settings.clip_ratio_high,
        settings.clip_ratio_dual,
    )
    per_token = policy.per_token - settings.entropy_coef * entropy
    count = logprobs.new_tensor(float(logprobs.numel()))
    metrics = {
        "clip_fraction": (policy.clipped.to(logprobs.dtype).sum(), count),
        "ratio": (policy.ratio.detach().sum(), count),
        "policy_kl": (kl_estimate(old_logprobs, logprobs.detach(), "k3").sum(), count),
    }
    if settings.kl_coef:
        divergence = kl_estimate(logprobs, fields["reference_logprobs"], settings.kl_estimator)
        per_token = per_token + settings.kl_coef * divergence
        metrics["kl"] = (divergence.detach().sum(), count)
    return (weights * per_token).sum(), metrics
