"""Advantages of whole responses from their rewards: one number per row, chosen by name."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

AdvantageFunction = Callable[[Tensor, Tensor, bool], Tensor]


def group_means(values: Tensor, group_id: Tensor) -> tuple[Tensor, Tensor]:
    """(mean of each row's group, size of each row's group), both [R]; groups are rows of equal ``group_id``."""
    _, index = group_id.unique(return_inverse=True)
    groups = int(index.max()) + 1 if len(index) else 0
    size = torch.zeros(groups, dtype=values.dtype).index_add_(0, index, torch.ones_like(values))
    total = torch.zeros(groups, dtype=values.dtype).index_add_(0, index, values)
    return (total / size)[index], size[index]


def centred_in_group(values: Tensor, group_id: Tensor) -> tuple[Tensor, Tensor]:
    """(values minus the mean of their group, size of the group), both [R]; exactly 0 where a group's are all equal."""
    _, index = group_id.unique(return_inverse=True)
    groups = int(index.max()) + 1 if len(index) else 0
    least = torch.full((groups,), torch.inf, dtype=values.dtype).scatter_reduce(0, index, values, "amin")
    above = values - least[index]  # the mean of equal numbers can differ from them by rounding; that of zeros cannot
    mean, size = group_means(above, group_id)
    return above - mean, size


def grpo_advantages(
    rewards: Tensor, group_id: Tensor, normalize_by_std: bool = True, epsilon: float = 1e-6
) -> Tensor:
    """rewards [R], group_id [R] -> [R]: reward minus the group's mean, over the group's standard deviation.

    DeepSeekMath (arXiv 2402.03300), section 4.1.2, with the unbiased standard deviation; without ``normalize_by_std``
    the form of Dr.GRPO (arXiv 2503.20783). A group of one, or one with equal rewards, has advantages of exactly 0.
    """
    centred, size = centred_in_group(rewards, group_id)
    if not normalize_by_std:
        return centred
    square, _ = group_means(centred.square(), group_id)
    deviation = (square * size / (size - 1).clamp(min=1)).sqrt()
    return centred / (deviation + epsilon)


def rloo_advantages(rewards: Tensor, group_id: Tensor, normalize_by_std: bool = False) -> Tensor:
    """rewards [R] -> [R]: reward minus the mean of the other rewards in its group (arXiv 2402.14740, eq. 8).

    A group of one has nothing to be compared with and gets 0. ``normalize_by_std`` is not part of the method and must
    be False.
    """
    if normalize_by_std:
        raise ValueError("rloo does not divide by the standard deviation; set algorithm.normalize_by_std to false")
    centred, size = centred_in_group(rewards, group_id)
    return centred * size / (size - 1).clamp(min=1)


ADVANTAGES: dict[str, AdvantageFunction] = {"grpo": grpo_advantages, "rloo": rloo_advantages}
