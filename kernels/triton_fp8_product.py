"""The kernels of ``fp8_product``: a program for a tile of the output and a part of the inner dimension, and a sum.

Weights are the first factor of a tile's product: matrix units take 64 rows or more of that one, and as few columns as
there are tokens.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlhf_megatron.kernels.fp8_product import Quantized


class Tiles(NamedTuple):
    """Sizes of a program's product, and how the compiler is to carry it out."""

    rows: int = 128  # of the weights
    depth: int = 128
    warps: int = 8
    stages: int = 4
    most_tokens: int = 256
    fewest_blocks: int = 4  # of the inner dimension, for which a part of their own is worth its sum


TILES = Tiles()
_ROWS_OF_SUM = 1024


@triton.jit
def _multiply(  # type: ignore[no-untyped-def] # Triton looks names of annotations up and accepts its own alone
    tokens,
    token_scales,
    weights,
    weight_scales,
    bias,
    output,
    parts,
    n,
    rows,
    depth,
    blocks,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_PART: tl.constexpr,
):
    # Programs that read the same weights come one after the other.
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(2)
    is_row, is_token = row < rows, token < n
    begin = split * blocks * DEPTH
    of_weights = weights + row.to(tl.int64)[:, None] * depth
    of_tokens = tokens + token.to(tl.int64)[None, :] * depth
    product = tl.zeros([ROWS, TOKENS], dtype=tl.float32)
    for first in range(begin, min(begin + blocks * DEPTH, depth), DEPTH):
        column = first + tl.arange(0, DEPTH)
        inside = column < depth
        weight = tl.load(of_weights + column[None, :], mask=is_row[:, None] & inside[None, :], other=0.0)
        value = tl.load(of_tokens + column[:, None], mask=is_token[None, :] & inside[:, None], other=0.0)
        product = tl.dot(weight, value, product)
    target = token.to(tl.int64)[:, None] * rows + row[None, :]
    is_target = is_token[:, None] & is_row[None, :]
    if IS_PART:
        tl.store(parts + split.to(tl.int64) * n * rows + target, tl.trans(product), mask=is_target)
    else:
        product *= tl.load(weight_scales + row, mask=is_row, other=0.0)[:, None]
        product *= tl.load(token_scales + token, mask=is_token, other=0.0)[None, :]
        if HAS_BIAS:
            product += tl.load(bias + row, mask=is_row, other=0.0).to(tl.float32)[:, None]
        tl.store(output + target, tl.trans(product).to(output.dtype.element_ty), mask=is_target)


@triton.jit
def _add_parts(  # type: ignore[no-untyped-def]
    parts,
    token_scales,
    weight_scales,
    bias,
    output,
    n,
    rows,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    token = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    total = tl.zeros([ROWS], dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + (split * n + token) * rows + row, mask=inside, other=0.0)
    total *= tl.load(weight_scales + row, mask=inside, other=0.0) * tl.load(token_scales + token)
    if HAS_BIAS:
        total += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + token * rows + row, total.to(output.dtype.element_ty), mask=inside)


def launch(
    tokens: Quantized,
    weights: Quantized,
    bias: Tensor | None,
    dtype: torch.dtype,
    tiles: Tiles = TILES,
    splits: int | None = None,
) -> Tensor:
    """Do as ``fp8_product.fp8_product_reference`` does with contiguous tensors, of a multiple of 16 columns.

    ``splits`` of the inner dimension, by default for as many programs as a GPU has cores.
    """
    (values, token_scales), (matrix, weight_scales) = tokens, weights
    strides = [given.stride() for given in (*tokens, *weights) if not given.is_contiguous()]
    if strides:
        raise ValueError(f"tokens, weights or scales with strides {strides}: not contiguous")
    (n, depth), rows, device = values.shape, len(matrix), values.device
    output = torch.empty(n, rows, dtype=dtype, device=device)
    if not n:
        return output
    at_a_time = min(max(16, triton.next_power_of_2(n)), tiles.most_tokens)
    across, blocks = (triton.cdiv(n, at_a_time), triton.cdiv(rows, tiles.rows)), triton.cdiv(depth, tiles.depth)
    if splits is None:
        splits = min(_cores(device) // (across[0] * across[1]), blocks // tiles.fewest_blocks)
    of_split = triton.cdiv(blocks, max(1, splits))
    splits = triton.cdiv(blocks, of_split)  # none without blocks
    parts = torch.empty(splits, n, rows, dtype=torch.float32, device=device) if splits > 1 else output
    others = bias if bias is not None else output  # not read
    _multiply[(*across, splits)](
        values, token_scales, matrix, weight_scales, others, output, parts, n, rows, depth, of_split,
        tiles.rows, at_a_time, tiles.depth, bias is not None, splits > 1,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if splits > 1:
        _add_parts[(triton.cdiv(rows, _ROWS_OF_SUM), n)](
            parts, token_scales, weight_scales, others, output, n, rows, splits, _ROWS_OF_SUM, bias is not None
        )
    return output


@functools.cache
def _cores(device: torch.device) -> int:
    """Return the multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
