"""Tokens times weights, both in 8 bits (e4m3) with a scale for each row, for as few tokens as a decode step has.

A layer's weights are then read once, and that takes the time, if all of a GPU's cores read. A product cut into tiles of
its output alone has too few of them for that; so ``triton_fp8_product`` splits the inner dimension too, and sums the
parts in their order. Here: the product in plain torch, which is the reference, and what CPUs use.
"""

from __future__ import annotations

import torch
from torch import Tensor

TYPE = torch.float8_e4m3fn
Quantized = tuple[Tensor, Tensor]
"""Rows [n, k] in ``TYPE``, and their scales [n, 1] float32, of which the product is nearly the rows in full."""


def fp8_product_reference(tokens: Quantized, weights: Quantized, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return ``tokens`` of n rows x ``weights``^T of m rows + ``bias`` [m]: [n, m] in ``dtype``."""
    product = (tokens[0].float() * tokens[1]) @ (weights[0].float() * weights[1]).t()
    return product.to(dtype) if bias is None else (product + bias).to(dtype)
