"""Tests of whether drawn tokens have a distribution."""

from __future__ import annotations

import torch


def chi_square_z(tokens: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Return the standard deviations by which the chi-square statistic of drawn tokens is above its mean; rare ones as
    one."""
    expected, found = len(tokens) * probabilities, torch.bincount(tokens, minlength=len(probabilities)).double()
    common = expected >= 5
    bins = [torch.cat((of[common], of[~common].sum()[None])) for of in (expected.double(), found)]
    freedom = len(bins[0]) - 1
    return float((((bins[1] - bins[0]) ** 2 / bins[0].clamp(min=1e-9)).sum() - freedom) / (2 * freedom) ** 0.5)
