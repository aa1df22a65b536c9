"""Statistics of responses over the groups that they belong to, and of values over a whole batch."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_megatron.algorithms.totals import ALONE, Totals, count, largest, total

# Added to a standard deviation before dividing by it.
EPSILON = 1e-6


def _group_sums(values: Tensor, index: Tensor) -> Tensor:
    """Map [R], [R] -> [groups]: the sum over each group's rows."""
    groups = int(index.max()) + 1 if len(index) else 0
    return torch.zeros(groups, dtype=values.dtype).index_add_(0, index, values)


def group_means(values: Tensor, group_id: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (mean of each row's group, size of each row's group), both [R]; groups are rows of equal ``group_id``.

    With ``weights`` [R] the mean is weighted by them; it is 0 in a group whose weights are all 0.
    """
    index = group_id.unique(return_inverse=True)[1]
    size = _group_sums(torch.ones_like(values), index)
    if weights is None:
        return (_group_sums(values, index) / size)[index], size[index]
    weight = _group_sums(weights, index)
    total = _group_sums(weights * values, index)
    return torch.where(weight > 0, total / weight, torch.zeros_like(total))[index], size[index]


def centred_in_group(values: Tensor, group_id: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (values minus the mean of their group, size of the group), both [R]; exactly 0 where a group's are all
    equal.

    ``weights`` as in ``group_means``.
    """
    index = group_id.unique(return_inverse=True)[1]
    groups = int(index.max()) + 1 if len(index) else 0
    least = torch.full((groups,), torch.inf, dtype=values.dtype).scatter_reduce(0, index, values, "amin")
    above = values - least[index]  # the mean of equal numbers can differ from them by rounding; that of zeros cannot
    mean, size = group_means(above, group_id, weights)
    return above - mean, size


def deviation_in_group(centred: Tensor, group_id: Tensor) -> Tensor:
    """Map [R] values minus their group's mean -> [R]: the group's unbiased standard deviation; 0 in a group of one."""
    square, size = group_means(centred.square(), group_id)
    return (square * size / (size - 1).clamp(min=1)).sqrt()


def whitened(values: Tensor, totals: Totals = ALONE) -> Tensor:
    """Map [n] -> [n]: minus the mean, over the unbiased standard deviation, both of all shares' values; exactly 0 where
    all are equal, or one alone."""
    number = count(values, totals)
    if number < 2:
        return torch.zeros_like(values)
    above = values + largest(-values, totals)
    centred = above - total(above, totals) / number
    return centred / ((total(centred.square(), totals) / (number - 1)).sqrt() + EPSILON)
