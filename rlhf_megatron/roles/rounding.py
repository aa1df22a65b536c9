"""Rounding of the optimizer's moments, at random: to the nearest, a decay of a thousandth would never be seen."""

from __future__ import annotations

import torch
from torch import Tensor

_DROPPED_BITS = 16  # of float32's 32, that bfloat16 has not


def rounded_at_random(values: Tensor, seed: int) -> Tensor:
    """Return float32 ``values`` as bfloat16, rounded up or down so that their expectation is the value itself.

    The same ``seed`` rounds alike on a device of the same kind. What is not finite stays.
    """
    assert values.dtype == torch.float32
    generator = torch.Generator(values.device).manual_seed(seed)
    noise = torch.randint(
        1 << _DROPPED_BITS, values.shape, dtype=torch.int32, device=values.device, generator=generator
    )
    bits = values.contiguous().view(torch.int32)
    rounded = ((bits + noise) & (-1 << _DROPPED_BITS)).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)
