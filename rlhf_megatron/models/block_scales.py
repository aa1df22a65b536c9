"""Weights in 8-bit floating point with a scale for each block, as DeepSeek-V3's files have them, or for each matrix.

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

ACTIVATIONS = "activation_scale"  # of a linear layer's input, which is not quantised here
Block = tuple[int, ...]  # rows, columns; empty: the matrix is one block, whose scale has no dimensions


def scales_shape(shape: Sequence[int], block: Block) -> tuple[int, ...]:
    """Return the shape of a matrix's scales."""
    return tuple(-(-size // of_block) for size, of_block in zip(shape, block, strict=bool(block)))


def scales_region(region: Region, block: Block) -> Region:
    """Return the scales that the numbers in ``region`` need."""
    return tuple((start // size, -(-stop // size)) for (start, stop), size in zip(region, block, strict=bool(block)))


def dequantized(numbers: Tensor, scales: Tensor, region: Region, block: Block) -> Tensor:
    """Return ``numbers``, those of ``region``, times ``scales``, those of its ``scales_region``, in float32."""
    values, factors = numbers.to(torch.float32), scales.to(torch.float32)
    for dimension, ((start, stop), size) in enumerate(zip(region, block, strict=bool(block))):
        before = start % size
        factors = factors.repeat_interleave(size, dimension).narrow(dimension, before, stop - start)
    return values * factors
