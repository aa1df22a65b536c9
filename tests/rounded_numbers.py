"""Numbers in 8 bits by the formula, for the tests of training and of rollout."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

LARGEST = 448.0  # of e4m3, arXiv 2209.05433, table 1


def rounded_blocks(values: Tensor, rows: int = 128, columns: int = 128) -> Tensor:
    """Map [n, m] -> the same as e4m3 leaves it, scaled by the largest of each block (arXiv 2412.19437, section 3.3.2).

    Scales are no powers of two: ``prepare_environment`` sees to that in training.
    """
    n, m = values.shape
    padded = pad(values, (0, -m % columns, 0, -n % rows))
    blocked = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
    largest = blocked.abs().amax((1, 3), keepdim=True).clamp_min(1e-30)
    # Not by a number: torch on a GPU would multiply by 1 / 448, and numbers half-way between two round the other way.
    scale = largest / torch.full_like(largest, LARGEST)
    return ((blocked / scale).to(torch.float8_e4m3fn).float() * scale).flatten(2, 3).flatten(0, 1)[:n, :m]


def rounded(values: Tensor, parts: int = 1) -> Tensor:
    """Return what e4m3 with one scale for each row, or each of equal ``parts`` of one, leaves of [n, m]."""
    return rounded_blocks(values, 1, values.shape[1] // parts)
