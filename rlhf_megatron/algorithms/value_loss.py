"""The critic's loss, one number per token. How tokens are added up is ``aggregation``'s matter."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class ValueLoss:
    """Per-token results [n]."""

    per_token: Tensor
    clipped: Tensor  # bool: the bound decided, so the token has no gradient


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> ValueLoss:
    """Return max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2; all tensors [n].

    The clipped value loss of PPO's implementation (arXiv 2005.12729, section 3, the first item); without ``clip`` half
    the squared error.
    """
    free = (values - returns).square() / 2
    if clip is None:
        return ValueLoss(free, torch.zeros_like(free, dtype=torch.bool))
    bounded = (values.clamp(old_values - clip, old_values + clip) - returns).square() / 2
    return ValueLoss(torch.maximum(free, bounded), bounded > free)
