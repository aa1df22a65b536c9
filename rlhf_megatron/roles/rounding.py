"""The optimizer's state in fewer bytes: moments rounded at random, since to the nearest a decay of a thousandth would
never be seen, and master weights as what their bfloat16 lacks."""

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


def remainder_of(master: Tensor, rounded: Tensor) -> Tensor:
    """Return what float32 ``master`` weights have beyond themselves ``rounded`` to bfloat16: int16.

    Rounding to the nearest is half a unit off at most, 2^15 of float32's. Exactly so much upwards, one of 2^17 numbers,
    is 2^15 - 1 afterwards. What is not a number stays none.
    """
    apart = master.view(torch.int32) - _bits(rounded)
    return apart.clamp_(-(1 << _DROPPED_BITS - 1), (1 << _DROPPED_BITS - 1) - 1).to(torch.int16)


def with_remainder(rounded: Tensor, remainder: Tensor) -> Tensor:
    """Return the float32 weights again that ``remainder_of`` was given."""
    return _bits(rounded).add_(remainder).view(torch.float32)


def _bits(rounded: Tensor) -> Tensor:
    """Return bfloat16 numbers as the bits of float32, int32."""
    assert rounded.dtype == torch.bfloat16
    return rounded.view(torch.int16).to(torch.int32).bitwise_left_shift_(_DROPPED_BITS)
