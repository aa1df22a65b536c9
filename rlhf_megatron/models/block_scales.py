"""Weights in 8-bit floating point with a scale for each block, as DeepSeek-V3's files have them, read by rectangles.

A weight is its e4m3 number times the scale of its block, ``weight_scale_inv`` (arXiv 2412.19437, section 3.3). The last
blocks of a matrix may be cut off.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_megatron.models.weight_map import Region

QUANTIZED = "F8_E4M3"  # safetensors' name
SCALES = "_scale_inv"

Block = tuple[int, int]  # rows, columns


def scales_shape(shape: Sequence[int], block: Block) -> tuple[int, ...]:
    """Return the shape of a matrix's scales."""
    return tuple(-(-size // of_block) for size, of_block in zip(shape, block, strict=True))


def scales_region(region: Region, block: Block) -> Region:
    """Return the scales that the numbers in ``region`` need."""
    return tuple((start // size, -(-stop // size)) for (start, stop), size in zip(region, block, strict=True))


def dequantized(numbers: Tensor, scales: Tensor, region: Region, block: Block) -> Tensor:
    """Return ``numbers``, those of ``region``, times ``scales``, those of its ``scales_region``, in float32."""
    values, factors = numbers.to(torch.float32), scales.to(torch.float32)
    for dimension, ((start, stop), size) in enumerate(zip(region, block, strict=True)):
        before = start % size
        factors = factors.repeat_interleave(size, dimension).narrow(dimension, before, stop - start)
    return values * factors
