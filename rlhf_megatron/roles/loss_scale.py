"""A dynamic loss scale for float16, which has 10 bits of mantissa, where bfloat16 has 7, and little range.

A loss that is a mean over all tokens of a step has gradients of activations far below what float16 can hold. So it is
multiplied by a power of two, and the sums of gradients, which are float32, are divided by it again. Where that was too
much, and a gradient is not finite, the passes are made again with less: the batch is there, and no step is lost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

_FIRST, _MOST = 2.0**20, 2.0**40
_BACKOFF, _GROWTH = 2.0**-4, 2.0
_STEPS_TO_GROW = 50


class LossScale:
    """The factor of a role's loss; the same on all of its ranks, since gradients' norms are.

    Attributes:
        value: a power of two.
    """

    def __init__(self) -> None:
        self.value = self._before = _FIRST
        self._steps = 0  # since it has changed

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss, or a part of it, to go backward from."""
        return loss * self.value

    def unscale(self, chunks: Sequence[Any]) -> None:
        """Make the gradients in the buffers of Megatron's DistributedDataParallel those of the loss itself."""
        for chunk in chunks:
            chunk.scale_gradients(1.0 / self.value)

    def was_too_high(self, grad_norm: float) -> bool:
        """Return whether a gradient that has this norm is to be computed again, with the scale as it is now.

        A gradient that is not finite whatever the scale is so for another reason, and the scale is as before.
        """
        if math.isfinite(grad_norm):
            self._steps += 1
            if self._steps >= _STEPS_TO_GROW:
                self.value, self._steps = min(self.value * _GROWTH, _MOST), 0
            self._before = self.value
            return False
        if self.value <= 1.0:
            self.value = self._before
            return False
        self.value, self._steps = max(1.0, self.value * _BACKOFF), 0
        return True

    def state(self) -> list[float]:
        """Return what a checkpoint keeps, as JSON."""
        return [self.value, self._steps]

    def load(self, state: Sequence[float]) -> None:
        """Go on where ``state`` was taken."""
        value, steps = state
        self.value = self._before = float(value)
        self._steps = int(steps)
