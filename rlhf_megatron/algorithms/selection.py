"""Selection of the tokens of a whole minibatch that a policy loss treats otherwise, before the minibatch is cut.

The covariance of a token, (A - mean A) (logprob - mean logprob), says how much it drives the entropy down
(arXiv 2505.22617, eq. 10). The means are over all sampled tokens of the minibatch, and the logprobs are the old ones:
they are known before the forward pass, and for the first update of a step they are the policy's own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlhf_megatron.data.rollout_batch import RolloutBatch
from rlhf_megatron.recipe import AlgorithmSection


def token_covariance(advantages: Tensor, logprobs: Tensor) -> Tensor:
    """[n], [n] -> [n] float64: each token's part of the covariance of advantage and logprob."""
    advantages, logprobs = advantages.double(), logprobs.double()
    return (advantages - advantages.mean()) * (logprobs - logprobs.mean())


def clip_cov_selection(batch: RolloutBatch, settings: AlgorithmSection) -> Tensor:
    """[T] bool: a share of the sampled tokens, drawn from those whose covariance lies between the bounds.

    The draw hashes row, position and weight version, so that it does not depend on the order of rows.
    """
    covariance, section = _covariance_of(batch), settings.covariance
    between = (covariance > section.low) & (covariance < section.high)
    position = torch.arange(len(batch.tokens)) - batch.cu_seqlens[batch.row_of_token]
    lots = _hash(_hash(_hash(batch.weight_version[batch.row_of_token]) ^ batch.row_id[batch.row_of_token]) ^ position)
    return _first(torch.where(between, lots.double(), torch.inf), batch, section.fraction, between)


def kl_cov_selection(batch: RolloutBatch, settings: AlgorithmSection) -> Tensor:
    """[T] bool: the share of the sampled tokens with the highest covariance."""
    return _first(-_covariance_of(batch), batch, settings.covariance.fraction, batch.response_mask)


def _covariance_of(batch: RolloutBatch) -> Tensor:
    """[T] float64; minus infinity on tokens that were not sampled."""
    assert batch.advantages is not None and batch.old_logprobs is not None
    mask = batch.response_mask
    of_sampled = token_covariance(batch.advantages[mask], batch.old_logprobs[mask])
    return torch.full((len(mask),), -torch.inf, dtype=torch.float64).masked_scatter(mask, of_sampled)


def _first(keys: Tensor, batch: RolloutBatch, fraction: float, allowed: Tensor) -> Tensor:
    """[T] bool: the allowed tokens with the lowest keys, as many as ``fraction`` of the sampled, at least one."""
    wanted = max(1, int(fraction * int(batch.response_mask.sum())))
    chosen = keys.topk(min(wanted, int(allowed.sum())), largest=False).indices
    return torch.zeros_like(batch.response_mask).index_fill(0, chosen, True)


def _hash(values: Tensor) -> Tensor:
    """int64 -> int64, well mixed: the finaliser of SplitMix64 (Steele et al. 2014), with arithmetic modulo 2^64."""
    values = values + -7046029254386353131
    values = (values ^ (values >> 30 & (1 << 34) - 1)) * -4658895280553007687
    values = (values ^ (values >> 27 & (1 << 37) - 1)) * -7723592293110705685
    return values ^ (values >> 31 & (1 << 33) - 1)


SELECTIONS: dict[str, Callable[[RolloutBatch, AlgorithmSection], Tensor]] = {
    "clip_cov": clip_cov_selection,
    "kl_cov": kl_cov_selection,
}
