"""Advantages: how much better a response, or a token of it, was than what could be expected; chosen by name.

Functions of rewards [R] and groups give one number per row, which is that of all of its sampled tokens; those
of per-token rewards are in ``returns``. All work in the precision of their inputs; the estimators use float64.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from rlhf_megatron.algorithms.filters import informative_rows
from rlhf_megatron.algorithms.group_statistics import EPSILON, centred_in_group, deviation_in_group, whitened
from rlhf_megatron.algorithms.returns import discounted_sums, factors, gae, rewards_of_tokens
from rlhf_megatron.algorithms.totals import ALONE, Totals
from rlhf_megatron.data.rollout_batch import RolloutBatch
from rlhf_megatron.data.row_numbers import RowNumbers
from rlhf_megatron.recipe import AlgorithmSection


def grpo_advantages(rewards: Tensor, group_id: Tensor, normalize_by_std: bool = True) -> Tensor:
    """Map rewards [R], group_id [R] -> [R]: reward minus the group's mean, over the group's standard deviation.

    DeepSeekMath (arXiv 2402.03300), section 4.1.2, with the unbiased standard deviation; without ``normalize_by_std``
    the form of Dr.GRPO (arXiv 2503.20783). A group of one, or one with equal rewards, has advantages of exactly 0.
    """
    centred, _ = centred_in_group(rewards, group_id)
    return centred / (deviation_in_group(centred, group_id) + EPSILON) if normalize_by_std else centred


def rloo_advantages(rewards: Tensor, group_id: Tensor) -> Tensor:
    """Map rewards [R] -> [R]: reward minus the mean of the other rewards in its group (arXiv 2402.14740, eq. 8).

    A group of one has nothing to be compared with and gets 0.
    """
    centred, size = centred_in_group(rewards, group_id)
    return centred * size / (size - 1).clamp(min=1)


def opo_advantages(rewards: Tensor, group_id: Tensor, lengths: Tensor) -> Tensor:
    """Map rewards [R], lengths [R] in sampled tokens -> [R]: reward minus the group's mean weighted by length.

    The baseline of least variance where a response's gradient grows with its length (OPO, arXiv 2505.23585). A group
    of one, or one with equal rewards, gets exactly 0.
    """
    return centred_in_group(rewards, group_id, lengths.to(rewards.dtype))[0]


def reinforce_plus_plus_baseline_advantages(rewards: Tensor, group_id: Tensor) -> Tensor:
    """Map rewards [R] -> [R]: reward minus the group's mean, over the standard deviation of that in the whole batch.

    REINFORCE++ with baseline (arXiv 2501.03262v9, section 3). The mean over the batch is 0 already, so it is not
    subtracted, and a group with equal rewards keeps advantages of exactly 0.
    """
    centred, _ = centred_in_group(rewards, group_id)
    deviation = (centred.square().sum() / max(1, len(centred) - 1)).sqrt()
    return centred / (deviation + EPSILON)


def remax_advantages(rewards: Tensor, baseline_rewards: Tensor) -> Tensor:
    """Map rewards [R], baseline_rewards [R] of the greedy response to each row's prompt -> [R]: their difference.

    ReMax (arXiv 2310.10505, algorithm 1).
    """
    return rewards - baseline_rewards


def gpg_advantages(rewards: Tensor, group_id: Tensor, normalize_by_std: bool = False) -> Tensor:
    """Map rewards [R] -> [R]: alpha * (reward - group's mean), by the group's deviation too if ``normalize_by_std``.

    GPG (arXiv 2504.02546): alpha = R / (R - M) where M rows are in groups whose rewards are all equal, so that these
    do not dilute the gradient. They themselves get exactly 0.
    """
    informative = int(informative_rows(rewards, group_id).sum())
    return grpo_advantages(rewards, group_id, normalize_by_std) * (len(rewards) / max(1, informative))


def pass_at_k_advantages(
    rewards: Tensor, group_id: Tensor, k: int | None = None, normalize_by_std: bool = False
) -> Tensor:
    """Map rewards [R] -> [R]: how much a response adds to the best of k, over all sets of k of its group that it is in.

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


@dataclasses.dataclass(frozen=True)
class Outcomes:
    """Quantities that estimators see of the trajectories of a whole step, [N] each; all but lengths and groups are
    float64.

    Attributes:
        of_rows: [R], the trajectory of each row; None where they are the same.
    """

    rewards: Tensor  # less the penalties of a row's tokens
    group_id: Tensor
    lengths: Tensor  # of sampled tokens
    baseline_rewards: Tensor | None = None
    of_rows: Tensor | None = None


def outcomes(numbers: RowNumbers, penalties: Tensor | None = None) -> Outcomes:
    """Return the outcomes of the trajectories of rows, whose tokens' ``penalties`` are summed [R]; rows of one
    trajectory have one reward, and all of their penalties and tokens count."""
    of_rows = None if numbers.trajectory_id is None else numbers.trajectories
    first = numbers.of_trajectories()
    rewards, baseline = first.rewards.double(), first.baseline_rewards
    return Outcomes(
        rewards if penalties is None else rewards - _sums(penalties, of_rows),
        first.group_id,
        _sums(numbers.response_lengths, of_rows),
        None if baseline is None else baseline.double(),
        of_rows,
    )


def _sums(values: Tensor, of_rows: Tensor | None) -> Tensor:
    """Map [R], [R] -> [N]: the sum over the rows of each trajectory; without several, themselves."""
    if of_rows is None or not len(of_rows):
        return values
    return values.new_zeros(int(of_rows.max()) + 1).index_add(0, of_rows, values)


def _grpo(rows: Outcomes, settings: AlgorithmSection) -> Tensor:
    return grpo_advantages(rows.rewards, rows.group_id, settings.divides_by_std)


def _rloo(rows: Outcomes, settings: AlgorithmSection) -> Tensor:
    return rloo_advantages(rows.rewards, rows.group_id)


def _opo(rows: Outcomes, settings: AlgorithmSection) -> Tensor:
    return opo_advantages(rows.rewards, rows.group_id, rows.lengths)


def _gpg(rows: Outcomes, settings: AlgorithmSection) -> Tensor:
    return gpg_advantages(rows.rewards, rows.group_id, settings.divides_by_std)


def _pass_at_k(rows: Outcomes, settings: AlgorithmSection) -> Tensor:
    return pass_at_k_advantages(rows.rewards, rows.group_id, settings.pass_k, settings.divides_by_std)


def _remax(rows: Outcomes, settings: AlgorithmSection) -> Tensor:
    assert rows.baseline_rewards is not None, "remax needs the rewards of greedy responses"
    return remax_advantages(rows.rewards, rows.baseline_rewards)


def _reinforce_plus_plus_baseline(rows: Outcomes, settings: AlgorithmSection) -> Tensor:
    return reinforce_plus_plus_baseline_advantages(rows.rewards, rows.group_id)


def _reinforce_plus_plus(batch: RolloutBatch, settings: AlgorithmSection, totals: Totals) -> RolloutBatch:
    """Return discounted sums of what follows each token, whitened over all sampled tokens (arXiv 2501.03262v9, section
    3)."""
    mask = batch.response_mask
    gamma = factors(settings.gamma, batch, settings.discount_per)
    following = discounted_sums(rewards_of_tokens(batch)[mask], batch.response_lengths, gamma)
    return batch.with_fields(advantages=_on_tokens(whitened(following, totals), mask).float())


def _gae(batch: RolloutBatch, settings: AlgorithmSection, totals: Totals) -> RolloutBatch:
    assert batch.values is not None, "gae needs the critic's values"
    mask = batch.response_mask
    gamma, gae_lambda = (factors(each, batch, settings.discount_per) for each in (settings.gamma, settings.gae_lambda))
    advantages, returns = gae(
        rewards_of_tokens(batch), batch.values.double(), mask, batch.cu_seqlens, gamma, gae_lambda
    )
    if settings.whiten_advantages:
        advantages = _on_tokens(whitened(advantages[mask], totals), mask)
    return batch.with_fields(advantages=advantages.float(), returns=returns.float())


def _on_tokens(sampled: Tensor, mask: Tensor) -> Tensor:
    """Map [n] -> [T]: values of the sampled tokens at their places, 0 elsewhere."""
    return torch.zeros(len(mask), dtype=sampled.dtype).masked_scatter(mask, sampled)


# Of the numbers of all rows alone -> the advantage of each row [R].
OF_ROWS: dict[str, Callable[[Outcomes, AlgorithmSection], Tensor]] = {
    "grpo": _grpo,
    "rloo": _rloo,
    "reinforce_plus_plus_baseline": _reinforce_plus_plus_baseline,
    "remax": _remax,
    "opo": _opo,
    "gpg": _gpg,
    "pass_at_k": _pass_at_k,
}
# Of the tokens of a share of the rows -> the share with ``advantages``, and ``returns`` where a critic learns.
OF_TOKENS: dict[str, Callable[[RolloutBatch, AlgorithmSection, Totals], RolloutBatch]] = {
    "reinforce_plus_plus": _reinforce_plus_plus,
    "gae": _gae,
}


def row_advantages(rows: Outcomes, settings: AlgorithmSection) -> Tensor | None:
    """Return [R] float32: the advantage of each row of a whole step by ``settings.advantage``, which all of its sampled
    tokens have; None where each token has its own."""
    estimator = OF_ROWS.get(settings.advantage)
    if estimator is None:
        return None
    advantages = estimator(rows, settings).float()
    return advantages if rows.of_rows is None else advantages[rows.of_rows]


def token_advantages(batch: RolloutBatch, settings: AlgorithmSection, totals: Totals = ALONE) -> RolloutBatch:
    """Return a share of a step's rows with ``advantages`` [T] of tokens, and ``returns`` [T] where a critic learns."""
    return OF_TOKENS[settings.advantage](batch, settings, totals)
