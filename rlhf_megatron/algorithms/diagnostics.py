"""Diagnostics of logprobs. Numbers for people; nothing here has a gradient."""

from __future__ import annotations

from torch import Tensor

from rlhf_megatron.algorithms.kl import LARGEST_LOG_RATIO, kl_estimate


def effective_sample_fraction(weights: Tensor) -> float:
    """[n] -> (sum w)^2 / (n sum w^2): Kish's effective sample size, over n; 0 where all weights are 0."""
    square = float(weights.square().sum())
    return float(weights.sum()) ** 2 / (len(weights) * square) if square else 0.0


def mismatch_metrics(trainer_logprobs: Tensor, rollout_logprobs: Tensor, response_mask: Tensor) -> dict[str, float]:
    """Measures how far trainer and rollout disagree about the same weights; all [T], over the sampled tokens.

    ``train/mismatch_kl`` estimates KL(rollout || trainer) by k3: the samples are the rollout's.
    ``train/mismatch_effective_fraction`` is the effective sample size of the ratios trainer / rollout, over the tokens.
    """
    trainer, rollout = trainer_logprobs[response_mask].double(), rollout_logprobs[response_mask].double()
    if not len(trainer):
        return {}
    difference = (trainer - rollout).abs()
    ratio = (trainer - rollout).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    return {
        "train/mismatch_kl": float(kl_estimate(rollout, trainer, "k3").mean()),
        "train/mismatch_effective_fraction": effective_sample_fraction(ratio),
        "train/rollout_logprob_abs_diff": float(difference.mean()),
        "train/rollout_logprob_abs_diff_median": float(difference.median()),
        "train/rollout_logprob_abs_diff_max": float(difference.max()),
    }


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """values [n], returns [n] -> 1 - Var(returns - values) / Var(returns): 1 for a perfect critic, 0 for a constant.

    nan is not told: where all returns are equal there is nothing to explain, and the result is 0.
    """
    variance = float(returns.double().var(unbiased=False)) if len(returns) else 0.0
    return 1.0 - float((returns - values).double().var(unbiased=False)) / variance if variance else 0.0
