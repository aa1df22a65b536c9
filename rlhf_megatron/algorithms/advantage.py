"""Advantages: how much better a response, or a token of it, was than what could be expected; chosen by name.

Functions of rewards [R] and groups give one number per row, which ``of_rows`` puts on all of its sampled tokens; those
of per-token rewards are in ``returns``. All work in the precision of their inputs; the estimators use float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rlhf_megatron.algorithms.filters import informative_rows
from rlhf_megatron.algorithms.group_statistics import EPSILON, centred_in_group, deviation_in_group, whitened
from rlhf_megatron.algorithms.returns import discounted_sums, gae, rewards_of_tokens
from rlhf_megatron.data.rollout_batch import RolloutBatch
from rlhf_megatron.recipe import AlgorithmSection


def grpo_advantages(rewards: Tensor, group_id: Tensor, normalize_by_std: bool = True) -> Tensor:
    """rewards [R], group_id [R] -> [R]: reward minus the group's mean, over the group's standard deviation.

    DeepSeekMath (arXiv 2402.03300), section 4.1.2, with the unbiased standard deviation; without ``normalize_by_std``
    the form of Dr.GRPO (arXiv 2503.20783). A group of one, or one with equal rewards, has advantages of exactly 0.
    """
    centred, _ = centred_in_group(rewards, group_id)
    return centred / (deviation_in_group(centred, group_id) + EPSILON) if normalize_by_std else centred


def rloo_advantages(rewards: Tensor, group_id: Tensor) -> Tensor:
    """rewards [R] -> [R]: reward minus the mean of the other rewards in its group (arXiv 2402.14740, eq. 8).

    A group of one has nothing to be compared with and gets 0.
    """
    centred, size = centred_in_group(rewards, group_id)
    return centred * size / (size - 1).clamp(min=1)


def opo_advantages(rewards: Tensor, group_id: Tensor, lengths: Tensor) -> Tensor:
    """rewards [R], lengths [R] in sampled tokens -> [R]: reward minus the group's mean weighted by length.

    The baseline of least variance where a response's gradient grows with its length (OPO, arXiv 2505.23585). A group
    of one, or one with equal rewards, gets exactly 0.
    """
    return centred_in_group(rewards, group_id, lengths.to(rewards.dtype))[0]


def reinforce_plus_plus_baseline_advantages(rewards: Tensor, group_id: Tensor) -> Tensor:
    """rewards [R] -> [R]: reward minus the group's mean, over the standard deviation of that in the whole batch.

    REINFORCE++ with baseline (arXiv 2501.03262v9, section 3). The mean over the batch is 0 already, so it is not
    subtracted, and a group with equal rewards keeps advantages of exactly 0.
    """
    centred, _ = centred_in_group(rewards, group_id)
    deviation = (centred.square().sum() / max(1, len(centred) - 1)).sqrt()
    return centred / (deviation + EPSILON)


def remax_advantages(rewards: Tensor, baseline_rewards: Tensor) -> Tensor:
    """rewards [R], baseline_rewards [R] of the greedy response to each row's prompt -> [R]: their difference.

    ReMax (arXiv 2310.10505, algorithm 1).
    """
    return rewards - baseline_rewards


def gpg_advantages(rewards: Tensor, group_id: Tensor, normalize_by_std: bool = False) -> Tensor:
    """rewards [R] -> [R]: alpha * (reward - group's mean), by the group's deviation too if ``normalize_by_std``.

    GPG (arXiv 2504.02546): alpha = R / (R - M) where M rows are in groups whose rewards are all equal, so that these
    do not dilute the gradient. They themselves get exactly 0.
    """
    informative = int(informative_rows(rewards, group_id).sum())
    return grpo_advantages(rewards, group_id, normalize_by_std) * (len(rewards) / max(1, informative))


def pass_at_k_advantages(
    rewards: Tensor, group_id: Tensor, k: int | None = None, normalize_by_std: bool = False
) -> Tensor:
    """rewards [R] -> [R]: how much a response adds to the best of k, over all sets of k of its group that it is in.

    The mean over those sets of max(set) - max(set without it), which is unbiased for the gradient of the expected best
    of k, up to the factor k: Walder and Karkhanis, arXiv 2505.15201, eq. 33. With r in ascending order and n responses,
    A_i = sum over j < i of (r_i - r_j) C(j - 1, k - 2) / C(n - 1, k - 1). Without ``k`` it is n, where the best alone
    gets something, its lead over the second (arXiv 2503.19595). ``normalize_by_std`` divides by the group's deviation.

    A group of one, or one with equal rewards, gets exactly 0. Raises ValueError for k below 2.
    """
    if k is not None and k < 2:
        raise ValueError(f"pass_k={k}: must be at least 2; for 1 use grpo or rloo")
    order = group_id.argsort(stable=True)
    advantages = torch.zeros_like(rewards)
    for rows in order.split(group_id.unique(return_counts=True)[1].tolist()):
        group = rewards[rows]
        n, of = len(rows), min(k or len(rows), len(rows))
        if n == 1:
            continue
        chances = [math.comb(j, of - 2) / math.comb(n - 1, of - 1) for j in range(n)]
        ascending = group.sort().values
        leads = (group[:, None] - ascending[None, :]).clamp(min=0)
        advantages[rows] = leads @ torch.tensor(chances, dtype=rewards.dtype)
    if normalize_by_std:
        centred, _ = centred_in_group(rewards, group_id)
        advantages = advantages / (deviation_in_group(centred, group_id) + EPSILON)
    return advantages


# ---- by name

Estimator = Callable[[RolloutBatch, AlgorithmSection], RolloutBatch]


def outcomes(batch: RolloutBatch) -> Tensor:
    """[R] float64: each row's reward, less the penalties of its tokens."""
    rewards = batch.rewards.double()
    if batch.penalties is None:
        return rewards
    return rewards.index_add(0, batch.row_of_token, batch.penalties.double(), alpha=-1)


def of_rows(batch: RolloutBatch, per_row: Tensor) -> RolloutBatch:
    """The batch with a row's advantage [R] on all of its sampled tokens."""
    return batch.with_fields(advantages=batch.spread(per_row.float()))


def _grpo(batch: RolloutBatch, settings: AlgorithmSection) -> RolloutBatch:
    return of_rows(batch, grpo_advantages(outcomes(batch), batch.group_id, settings.divides_by_std))


def _rloo(batch: RolloutBatch, settings: AlgorithmSection) -> RolloutBatch:
    return of_rows(batch, rloo_advantages(outcomes(batch), batch.group_id))


def _opo(batch: RolloutBatch, settings: AlgorithmSection) -> RolloutBatch:
    return of_rows(batch, opo_advantages(outcomes(batch), batch.group_id, batch.response_lengths))


def _gpg(batch: RolloutBatch, settings: AlgorithmSection) -> RolloutBatch:
    return of_rows(batch, gpg_advantages(outcomes(batch), batch.group_id, settings.divides_by_std))


def _pass_at_k(batch: RolloutBatch, settings: AlgorithmSection) -> RolloutBatch:
    return of_rows(
        batch, pass_at_k_advantages(outcomes(batch), batch.group_id, settings.pass_k, settings.divides_by_std)
    )


def _remax(batch: RolloutBatch, settings: AlgorithmSection) -> RolloutBatch:
    assert batch.baseline_rewards is not None, "remax needs the rewards of greedy responses"
    return of_rows(batch, remax_advantages(outcomes(batch), batch.baseline_rewards.double()))


def _reinforce_plus_plus_baseline(batch: RolloutBatch, settings: AlgorithmSection) -> RolloutBatch:
    return of_rows(batch, reinforce_plus_plus_baseline_advantages(outcomes(batch), batch.group_id))


def _reinforce_plus_plus(batch: RolloutBatch, settings: AlgorithmSection) -> RolloutBatch:
    """Discounted sums of what follows each token, whitened over all sampled tokens (arXiv 2501.03262v9, section 3)."""
    mask = batch.response_mask
    following = discounted_sums(rewards_of_tokens(batch)[mask], batch.response_lengths, settings.gamma)
    return batch.with_fields(advantages=_on_tokens(whitened(following), mask).float())


def _gae(batch: RolloutBatch, settings: AlgorithmSection) -> RolloutBatch:
    assert batch.values is not None, "gae needs the critic's values"
    mask = batch.response_mask
    advantages, returns = gae(
        rewards_of_tokens(batch), batch.values.double(), mask, batch.cu_seqlens, settings.gamma, settings.gae_lambda
    )
    if settings.whiten_advantages:
        advantages = _on_tokens(whitened(advantages[mask]), mask)
    return batch.with_fields(advantages=advantages.float(), returns=returns.float())


def _on_tokens(sampled: Tensor, mask: Tensor) -> Tensor:
    """[n] -> [T]: values of the sampled tokens at their places, 0 elsewhere."""
    return torch.zeros(len(mask), dtype=sampled.dtype).masked_scatter(mask, sampled)


ADVANTAGES: dict[str, Estimator] = {
    "grpo": _grpo,
    "rloo": _rloo,
    "reinforce_plus_plus": _reinforce_plus_plus,
    "reinforce_plus_plus_baseline": _reinforce_plus_plus_baseline,
    "remax": _remax,
    "opo": _opo,
    "gpg": _gpg,
    "pass_at_k": _pass_at_k,
    "gae": _gae,
}


def estimate_advantages(batch: RolloutBatch, settings: AlgorithmSection) -> RolloutBatch:
    """The batch with ``advantages`` [T] by ``settings.advantage``, and ``returns`` [T] where a critic learns.

    It must be the whole step's: gpg, reinforce_plus_plus, its baseline form and the whitening of gae look at all rows.
    """
    return ADVANTAGES[settings.advantage](batch, settings)
