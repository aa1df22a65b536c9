"""The kernels of ``fp8_product``: a program for a tile of the output and a part of the inner dimension, and a sum.

Weights are the first factor of a tile's product: matrix units take 64 rows or more of that one, and as few columns as
there are tokens. Those units keep some 14 bits of a sum; so each block's is added to one in float32, with its scales.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlhf_megatron.kernels.fp8_product import BLOCK, Quantized


class Tiles(NamedTuple):
    """Sizes of a program's product, and how the compiler is to carry it out."""

    rows: int = 128  # of the weights; a block has a multiple of them
    warps: int = 8
    stages: int = 4
    most_tokens: int = 128
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
    scales_apart,  # of a token's numbers, which follow each other
    blocks_apart,  # of a token's scales
    blocks,  # of a part
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_PART: tl.constexpr,
):
    # Programs that read the same weights come one after the other.
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, DEPTH)
    split = tl.program_id(2)
    is_token = token < n
    of_weights = weights + row.to(tl.int64)[:, None] * depth + column[None, :]
    of_tokens = tokens + token.to(tl.int64)[None, :] * depth + column[:, None]
    scales_of_weights = weight_scales + (tl.program_id(1) * ROWS // DEPTH) * (depth // DEPTH)
    scales_of_tokens = token_scales + token * scales_apart
    product = tl.zeros([ROWS, TOKENS], dtype=tl.float32)
    for block in range(split * blocks, min((split + 1) * blocks, depth // DEPTH)):
        weight = tl.load(of_weights + block * DEPTH)
        value = tl.load(of_tokens + block * DEPTH, mask=is_token[None, :], other=0.0)
        scale = tl.load(scales_of_tokens + block * blocks_apart, mask=is_token, other=0.0)
        scale *= tl.load(scales_of_weights + block)
        product += tl.dot(weight, value) * scale[None, :]
    target = token.to(tl.int64)[:, None] * rows + row[None, :]
    if IS_PART:
        tl.store(parts + split.to(tl.int64) * n * rows + target, tl.trans(product), mask=is_token[:, None])
    else:
        if HAS_BIAS:
            product += tl.load(bias + row).to(tl.float32)[:, None]
        tl.store(output + target, tl.trans(product).to(output.dtype.element_ty), mask=is_token[:, None])


@triton.jit
def _add_parts(  # type: ignore[no-untyped-def]
    parts, bias, output, n, rows, SPLITS: tl.constexpr, ROWS: tl.constexpr, HAS_BIAS: tl.constexpr
):
    token = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    total = tl.zeros([ROWS], dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + (split * n + token) * rows + row, mask=inside, other=0.0)
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
    """Do as ``fp8_product.fp8_product_reference`` does, with contiguous tensors but for the scales of tokens.

    ``splits`` of the inner dimension, by default for as many programs as a GPU has cores.
    """
    (values, token_scales), (matrix, weight_scales) = tokens, weights
    strides = [given.stride() for given in (values, *weights) if not given.is_contiguous()]
    if strides:
        raise ValueError(f"tokens, weights or scales of weights with strides {strides}: not contiguous")
    (n, depth), rows, device = values.shape, len(matrix), values.device
    if rows % BLOCK or depth % BLOCK:
        raise ValueError(f"{rows} x {depth} weights are not whole blocks of {BLOCK} x {BLOCK}")
    output = torch.empty(n, rows, dtype=dtype, device=device)
    if not n:
        return output
    at_a_time = min(max(16, triton.next_power_of_2(n)), tiles.most_tokens)
    across, blocks = (triton.cdiv(n, at_a_time), rows // tiles.rows), depth // BLOCK
    if splits is None:
        splits = min(_cores(device) // (across[0] * across[1]), blocks // tiles.fewest_blocks)
    of_split = triton.cdiv(blocks, max(1, splits))
    splits = triton.cdiv(blocks, of_split)  # none without blocks
    parts = torch.empty(splits, n, rows, dtype=torch.float32, device=device) if splits > 1 else output
    added = bias if bias is not None else output  # else not read
    _multiply[(*across, splits)](
        values, token_scales, matrix, weight_scales, added, output, parts, n, rows, depth, *token_scales.stride(),
        of_split, tiles.rows, at_a_time, BLOCK, bias is not None, splits > 1,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if splits > 1:
        _add_parts[(triton.cdiv(rows, _ROWS_OF_SUM), n)](
            parts, added, output, n, rows, splits, _ROWS_OF_SUM, bias is not None
        )
    return output


@functools.cache
def _cores(device: torch.device) -> int:
    """Return the multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
