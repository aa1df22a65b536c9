"""Totals of a batch whose rows lie on several ranks, for what looks at all of them; and order statistics from these."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Totals(Protocol):
    """Sums and maxima over the ranks that share a batch, equal on each; element by element."""

    @property
    def shares(self) -> int:
        """Number of shares of the batch."""

    @property
    def share(self) -> int:
        """The number of the one that is here, from 0."""

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of all shares' ``values``."""

    def largest(self, values: Tensor) -> Tensor:
        """Return the largest of all shares' ``values``."""


class Alone:
    """Those of a batch that is all here."""

    shares, share = 1, 0

    def sum(self, values: Tensor) -> Tensor:
        """See Totals."""
        return values

    def largest(self, values: Tensor) -> Tensor:
        """See Totals."""
        return values


ALONE = Alone()


def total(values: Tensor, totals: Totals) -> Tensor:
    """Map [n] -> []: the sum of all shares' values."""
    return totals.sum(values.sum())


def count(values: Tensor, totals: Totals) -> int:
    """Map [n] -> how many values all shares have."""
    return int(totals.sum(torch.tensor(len(values))))


def largest(values: Tensor, totals: Totals) -> Tensor:
    """Map [n] -> []: the largest of all shares' values; minus infinity where there are none."""
    return totals.largest(values.max() if len(values) else values.new_tensor(-torch.inf))


_DIGIT_BITS = 16
_VALUES = 1 << _DIGIT_BITS


def kth_lowest(values: Tensor, k: int, totals: Totals) -> float:
    """Map [n] float64 -> the value at ``place``, from 0, of all shares' in rising order; exactly.

    The bits of a float order it, so its digits are found one after the other from how many values have which.
    """
    bits = values.double().view(torch.int64)
    keys = bits ^ ((bits >> 63) & torch.iinfo(torch.int64).max)
    key_bits = 0
    for shift in range(64 - _DIGIT_BITS, -1, -_DIGIT_BITS):
        digits = keys >> shift
        digits = digits + _VALUES // 2 if shift == 64 - _DIGIT_BITS else digits & (_VALUES - 1)
        upto = totals.sum(torch.bincount(digits, minlength=_VALUES)).cumsum(0).cpu()
        digit = int(torch.searchsorted(upto, k, right=True))
        k -= int(upto[digit - 1]) if digit else 0
        keys = keys[digits == digit]
        key_bits = (digit - _VALUES // 2) << shift if shift == 64 - _DIGIT_BITS else key_bits | digit << shift
    key = torch.tensor(key_bits, dtype=torch.int64)
    return float((key ^ ((key >> 63) & torch.iinfo(torch.int64).max)).view(torch.float64))
