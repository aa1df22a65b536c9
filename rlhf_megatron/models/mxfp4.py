"""MXFP4 (OCP Microscaling Formats 1.0): blocks of 32 4-bit floating-point numbers with a common power of two.

A row of n numbers is stored as n / 32 blocks of 16 bytes, two numbers in each, the low half first, and n / 32 scales,
whose exponents are counted from 127. bfloat16 has every value exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127


def unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """Map blocks [..., n / 32, 16] and scales [..., n / 32], both uint8 -> [..., n] bfloat16."""
    values = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], dtype=torch.float32)
    pairs = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2).long()
    exponents = (scales.to(torch.int32) - _BIAS)[..., None]
    return torch.ldexp(values[pairs], exponents).flatten(-2).to(torch.bfloat16)
