"""Tokens times weights, both in 8 bits (e4m3) by blocks, for as few tokens as a decode step has.

Tokens have a scale for each ``BLOCK`` numbers, weights for each ``BLOCK`` x ``BLOCK`` (DeepSeek-V3, arXiv 2412.19437,
section 3.3). A layer's weights are read once, and that takes the time, if all of a GPU's cores read. A product cut into
tiles of its output alone has too few of them for that; so ``triton_fp8_product`` splits the inner dimension too, and
sums the parts in their order. Here: the product in plain torch, which is the reference, and what CPUs use.
"""

from __future__ import annotations

import torch
from torch import Tensor

TYPE = torch.float8_e4m3fn
BLOCK = 128
Quantized = tuple[Tensor, Tensor]
"""Numbers in ``TYPE`` and float32 scales, of which the product is nearly the numbers in full: [n, k] and [n, k / BLOCK]
of tokens, [m, k] and [m / BLOCK, k / BLOCK] of weights."""


def fp8_product_reference(tokens: Quantized, weights: Quantized, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return ``tokens`` x ``weights``^T + ``bias`` [m]: [n, m] in ``dtype``."""
    (values, of_tokens), (matrix, of_weights) = tokens, weights
    in_full = matrix.float() * of_weights.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    product = (values.float() * of_tokens.repeat_interleave(BLOCK, 1)) @ in_full.t()
    return product.to(dtype) if bias is None else (product + bias).to(dtype)
