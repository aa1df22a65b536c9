"""Tokens times weights, both in 8 bits (e4m3) with a scale for each row, for as few tokens as a decode step has.

A layer's weights are then read once, and that takes the time, if all of a GPU's cores read. A product cut into tiles of
its output alone has too few of them for that; so the inner dimension is split too, and parts are summed in their order.
The product in plain torch is the reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

TYPE = torch.float8_e4m3fn


def fp8_product_reference(
    tokens: Tensor,
    token_scales: Tensor,
    weights: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return [n, rows] in ``dtype``: (tokens [n, k] x token_scales [n, 1]) (weights [rows, k] x weight_scales
    [rows, 1])^T + bias [rows]. Both factors are in e4m3, scales in float32."""
    product = (tokens.float() * token_scales) @ (weights.float() * weight_scales).t()
    return product.to(dtype) if bias is None else (product + bias).to(dtype)


def fp8_product(
    tokens: Tensor,
    token_scales: Tensor,
    weights: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Do as the reference does; on a GPU all are contiguous, and k is a multiple of 16."""
    if not tokens.is_cuda:
        return fp8_product_reference(tokens, token_scales, weights, weight_scales, bias, dtype)
    from rlhf_megatron.kernels.triton_fp8_product import launch

    return launch(tokens, token_scales, weights, weight_scales, bias, dtype)
