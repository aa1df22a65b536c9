"""Selection of the tokens of a whole minibatch that a policy loss treats otherwise, before the minibatch is cut.

The covariance of a token, (A - mean A) (logprob - mean logprob), says how much it drives the entropy down
(arXiv 2505.22617, eq. 10). The means are over all sampled tokens of the minibatch, and the logprobs are the old ones:
they are known before the forward pass, and for the first update of a step they are the policy's own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlhf_megatron.algorithms.totals import ALONE, Totals, count, kth_lowest, total
from rlhf_megatron.data.rollout_batch import RolloutBatch
from rlhf_megatron.recipe import AlgorithmSection


def token_covariance(advantages: Tensor, logprobs: Tensor, totals: Totals = ALONE) -> Tensor:
    """Map [n], [n] -> [n] float64: each token's part of the covariance of advantage and logprob over all shares."""
    advantages, logprobs, number = advantages.double(), logprobs.double(), max(1, count(advantages, totals))
    return (advantages - total(advantages, totals) / number) * (logprobs - total(logprobs, totals) / number)


def clip_cov_selection(batch: RolloutBatch, settings: AlgorithmSection, totals: Totals = ALONE) -> Tensor:
    """Return [T] bool: a share of the sampled tokens, drawn from those whose covariance lies between the bounds.

    The draw hashes row, position and weight version, so that it does not depend on the order of rows.
    """
    covariance, section = _covariance_of(batch, totals), settings.covariance
    between = (covariance > section.low) & (covariance < section.high)
    position = torch.arange(len(batch.tokens)) - batch.cu_seqlens[batch.row_of_token]
    lots = _hash(_hash(_hash(batch.weight_version[batch.row_of_token]) ^ batch.row_id[batch.row_of_token]) ^ position)
    return _first(lots.double(), batch, section.fraction, between, totals)


def kl_cov_selection(batch: RolloutBatch, settings: AlgorithmSection, totals: Totals = ALONE) -> Tensor:
    """Return [T] bool: the share of the sampled tokens with the highest covariance."""
    return _first(-_covariance_of(batch, totals), batch, settings.covariance.fraction, batch.response_mask, totals)


def _covariance_of(batch: RolloutBatch, totals: Totals) -> Tensor:
    """Return [T] float64; minus infinity on tokens that were not sampled."""
    assert batch.advantages is not None and batch.old_logprobs is not None
    mask = batch.response_mask
    of_sampled = token_covariance(batch.advantages[mask], batch.old_logprobs[mask], totals)
    return torch.full((len(mask),), -torch.inf, dtype=torch.float64).masked_scatter(mask, of_sampled)


def _first(keys: Tensor, batch: RolloutBatch, fraction: float, allowed: Tensor, totals: Totals) -> Tensor:
    """Return [T] bool: the allowed tokens with the lowest keys of all shares, as many as ``fraction`` of the sampled,
    at least one. Of equal ones those come first that stand first."""
    marked = torch.stack([batch.response_mask.sum(), allowed.sum()])
    sampled, there = totals.sum(marked).tolist()
    wanted = min(max(1, int(fraction * sampled)), there)
    if not wanted:
        return torch.zeros_like(allowed)
    last = kth_lowest(keys[allowed], wanted - 1, totals)
    below, equal = allowed & (keys < last), allowed & (keys == last)
    of_shares = torch.zeros(totals.shares, dtype=torch.int64)
    of_shares[totals.share] = equal.sum()
    of_shares = totals.sum(of_shares)
    left = wanted - int(totals.sum(below.sum())) - int(of_shares[: totals.share].sum())
    return below | (equal & (equal.cumsum(0) <= left))


def _hash(values: Tensor) -> Tensor:
    """Map int64 -> int64, well mixed: the finaliser of SplitMix64 (Steele et al. 2014), with arithmetic modulo 2^64."""
    values = values + -7046029254386353131
    values = (values ^ (values >> 30 & (1 << 34) - 1)) * -4658895280553007687
    values = (values ^ (values >> 27 & (1 << 37) - 1)) * -7723592293110705685
    return values ^ (values >> 31 & (1 << 33) - 1)


SELECTIONS: dict[str, Callable[[RolloutBatch, AlgorithmSection, Totals], Tensor]] = {
    "clip_cov": clip_cov_selection,
    "kl_cov": kl_cov_selection,
}
