"""Importance weights against the mismatch of rollout engine and trainer, which disagree about the same weights.

Responses are drawn from the rollout's distribution and learned from as if from the trainer's; the ratio of the two,
truncated or masked, corrects that. Weights are computed once per batch and multiply those of the loss.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlhf_megatron.algorithms.diagnostics import effective_sample_fraction
from rlhf_megatron.algorithms.kl import LARGEST_LOG_RATIO
from rlhf_megatron.algorithms.totals import ALONE, Totals, count, largest, total
from rlhf_megatron.data.rollout_batch import RolloutBatch
from rlhf_megatron.recipe.algorithm import RolloutCorrectionSection


def correction_weights(
    log_ratio: Tensor, row: Tensor, rows: int, settings: RolloutCorrectionSection
) -> tuple[Tensor, Tensor]:
    """Weigh log_ratio [n], trainer - rollout logprobs of the sampled tokens; row [n] is their row out of ``rows``.

    Gives (weights [n], rejected [rows] bool). With rho the ratio of a token, or of its whole row (the product of its
    tokens') at level sequence:

    - none: 1;
    - tis: min(rho, threshold), truncated importance sampling (Ionides 2008; for language models Yao et al. 2025);
    - mis: rho where threshold_low <= rho <= threshold, else 0, masked importance sampling (IcePop, arXiv 2510.18855).

    A row is rejected, with weight 0, if the geometric mean of its tokens' ratios is beyond ``reject_threshold`` or
    below its inverse, or if the ratio of a token is below ``veto_threshold``. A row without tokens is not.
    """
    if settings.level == "sequence" or settings.reject_threshold is not None:
        sums = log_ratio.new_zeros(rows).index_add(0, row, log_ratio)
    at_level = sums[row] if settings.level == "sequence" else log_ratio
    ratio = at_level.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    match settings.type:
        case "none":
            weights = torch.ones_like(ratio)
        case "tis":
            weights = ratio.clamp(max=settings.threshold)
        case "mis":
            kept = (ratio >= settings.threshold_low) & (ratio <= settings.threshold)
            weights = torch.where(kept, ratio, 0.0)
    rejected = torch.zeros(rows, dtype=torch.bool, device=log_ratio.device)
    if settings.reject_threshold is None and settings.veto_threshold is None:
        return weights, rejected
    if settings.reject_threshold is not None:
        count, bound = torch.bincount(row, minlength=rows), math.log(settings.reject_threshold)
        rejected |= (sums / count.clamp(min=1)).abs() > bound
    if settings.veto_threshold is not None:
        least = log_ratio.new_full((rows,), torch.inf).scatter_reduce(0, row, log_ratio, "amin")
        rejected |= least.exp() < settings.veto_threshold
    return torch.where(rejected[row], 0.0, weights), rejected


def with_correction(
    batch: RolloutBatch, settings: RolloutCorrectionSection, totals: Totals = ALONE
) -> tuple[RolloutBatch, dict[str, float]]:
    """Return (the batch with ``correction`` [T], metrics of all shares); as it is, and {}, where the settings ask for
    nothing.

    ``train/correction_effective_fraction`` is the effective sample size of the weights over the tokens.
    """
    tokens = count(batch.tokens[batch.response_mask], totals) if settings.is_used else 0
    if not tokens:
        return batch, {}
    assert batch.old_logprobs is not None
    mask = batch.response_mask
    log_ratio = (batch.old_logprobs - batch.rollout_logprobs)[mask].double()
    weights, rejected = correction_weights(log_ratio, batch.row_of_sampled, batch.rows, settings)
    metrics = {
        "train/correction_weight_mean": float(total(weights, totals)) / tokens,
        "train/correction_weight_max": float(largest(weights, totals)),
        "train/correction_masked_fraction": 1.0 - float(total((weights != 0).double(), totals)) / tokens,
        "train/correction_rejected_fraction": float(total(rejected.double(), totals)) / count(rejected, totals),
        "train/correction_effective_fraction": effective_sample_fraction(weights, totals),
    }
    return batch.with_fields(correction=torch.zeros(len(mask)).masked_scatter(mask, weights.float())), metrics
