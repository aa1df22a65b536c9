"""The kernel of ``grouped_gradient``: a program for a tile of one expert's matrix, over all tokens of that expert."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, TOKENS = 128, 128, 64  # of a tile, and tokens that are multiplied at a time
WARPS, STAGES = 4, 3


@triton.jit
def _add_gradient(  # type: ignore[no-untyped-def] # Triton looks names of annotations up and accepts its own alone
    total,
    gradients,
    inputs,
    ends,
    gradient_stride,
    input_stride,
    rows,
    columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    expert = tl.program_id(1)
    across = tl.cdiv(columns, COLUMNS)
    row = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    product = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in range(begin, end, TOKENS):
        token = first + tl.arange(0, TOKENS)
        there, position = token < end, token.to(tl.int64)
        gradient = tl.load(
            gradients + position[None, :] * gradient_stride + row[:, None],
            mask=(row < rows)[:, None] & there[None, :],
            other=0.0,
        )
        values = tl.load(
            inputs + position[:, None] * input_stride + column[None, :],
            mask=there[:, None] & (column < columns)[None, :],
            other=0.0,
        )
        product = tl.dot(gradient, values, product)
    target = total + (expert.to(tl.int64) * rows + row[:, None]) * columns + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :] & (begin < end)
    tl.store(target, tl.load(target, mask=inside, other=0.0) + product, mask=inside)


def launch(total: Tensor, gradients: Tensor, inputs: Tensor, ends: Tensor) -> None:
    """See ``grouped_gradient.add_grouped_gradient``."""
    if not total.is_contiguous():
        raise ValueError(f"sums of gradients {list(total.shape)} with strides {total.stride()} are not contiguous")
    if gradients.stride(1) != 1 or inputs.stride(1) != 1:
        raise ValueError(f"strides {gradients.stride()} or {inputs.stride()}: rows of tokens are not contiguous")
    experts, rows, columns = total.shape
    grid = (triton.cdiv(rows, ROWS) * triton.cdiv(columns, COLUMNS), experts)
    _add_gradient[grid](
        total,
        gradients,
        inputs,
        ends,
        gradients.stride(0),
        inputs.stride(0),
        rows,
        columns,
        ROWS,
        COLUMNS,
        TOKENS,
        num_warps=WARPS,
        num_stages=STAGES,
    )
