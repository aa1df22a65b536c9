"""Filters of groups without anything to learn from, and penalties of responses that are cut off or nearly so."""

from __future__ import annotations

import torch
from torch import Tensor


def informative_rows(values: Tensor, group_id: Tensor) -> Tensor:
    """Map values [R], group_id [R] -> [R] bool: the row's group has at least two different values.

    Dynamic sampling of DAPO (arXiv 2503.14476, eq. 11) keeps groups with some but not all answers right; for rewards of
    0 and 1 this is the same. A group of one has nothing to be compared with and is not kept.
    """
    _, index = group_id.unique(return_inverse=True)
    groups = int(index.max()) + 1 if len(index) else 0
    least = torch.full((groups,), torch.inf, dtype=values.dtype).scatter_reduce(0, index, values, "amin")
    most = torch.full((groups,), -torch.inf, dtype=values.dtype).scatter_reduce(0, index, values, "amax")
    return (most > least)[index]


def overlong_penalty(lengths: Tensor, limit: int, buffer: int, factor: float) -> Tensor:
    """Map lengths [R] in sampled tokens -> [R] float32, to be added to the rewards: 0 up to limit - buffer, then
    falling.

    The soft penalty of DAPO (arXiv 2503.14476, eq. 13), times ``factor``: inside the buffer
    -factor * (length - (limit - buffer)) / buffer, beyond ``limit`` -factor. Raises ValueError for a buffer that is not
    in 1 .. limit.
    """
    if not 1 <= buffer <= limit:
        raise ValueError(f"overlong_buffer.len={buffer} must be from 1 to {limit}, the longest response")
    over = (lengths.double() - (limit - buffer)) / buffer
    return (-factor * over.clamp(0.0, 1.0)).float()
