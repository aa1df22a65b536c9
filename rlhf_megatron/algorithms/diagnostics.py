"""Diagnostics of logprobs. Numbers for people; nothing here has a gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_megatron.algorithms.kl import LARGEST_LOG_RATIO, kl_estimate
from rlhf_megatron.algorithms.totals import ALONE, Totals, count, kth_lowest, largest, total


def effective_sample_fraction(weights: Tensor, totals: Totals = ALONE) -> float:
    """Map [n] -> (sum w)^2 / (n sum w^2): Kish's effective sample size, over n; 0 where all weights are 0."""
    plain, square = totals.sum(torch.stack([weights.sum(), weights.square().sum()])).tolist()
    return float(plain) ** 2 / (count(weights, totals) * float(square)) if square else 0.0


def mismatch_metrics(
    trainer_logprobs: Tensor, rollout_logprobs: Tensor, response_mask: Tensor, totals: Totals = ALONE
) -> dict[str, float]:
    """Measure how far trainer and rollout disagree about the same weights; all [T], over the sampled tokens.

    ``train/mismatch_kl`` estimates KL(rollout || trainer) by k3: the samples are the rollout's.
    ``train/mismatch_effective_fraction`` is the effective sample size of the ratios trainer / rollout, over the tokens.
    """
    trainer, rollout = trainer_logprobs[response_mask].double(), rollout_logprobs[response_mask].double()
    number = count(trainer, totals)
    if not number:
        return {}
    difference = (trainer - rollout).abs()
    ratio = (trainer - rollout).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    return {
        "train/mismatch_kl": float(total(kl_estimate(rollout, trainer, "k3"), totals)) / number,
        "train/mismatch_effective_fraction": effective_sample_fraction(ratio, totals),
        "train/rollout_logprob_abs_diff": float(total(difference, totals)) / number,
        "train/rollout_logprob_abs_diff_median": kth_lowest(difference, (number - 1) // 2, totals),
        "train/rollout_logprob_abs_diff_max": float(largest(difference, totals)),
    }


def explained_variance(values: Tensor, returns: Tensor, totals: Totals = ALONE) -> float:
    """Map values [n], returns [n] -> 1 - Var(returns - values) / Var(returns): 1 for a perfect critic, 0 for a
    constant.

    nan is not told: where all returns are equal there is nothing to explain, and the result is 0.
    """
    variance = _variance(returns.double(), totals)
    return 1.0 - _variance((returns - values).double(), totals) / variance if variance else 0.0


def _variance(values: Tensor, totals: Totals) -> float:
    number = count(values, totals)
    mean = total(values, totals) / max(1, number)
    return float(total((values - mean).square(), totals)) / max(1, number)
