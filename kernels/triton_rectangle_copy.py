"""The kernel of ``rectangle_copy``: one program copies one tile of one rectangle, which it looks up in a table."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlhf_megatron.kernels.rectangle_copy import COLUMNS, ROWS

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _copy_tile(  # type: ignore[no-untyped-def] # Triton looks names of annotations up and accepts its own alone
    jobs,
    tiles,
    ORIGIN: tl.constexpr,
    TARGET: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    tile = tiles + tl.program_id(0).to(tl.int64) * 3
    job = jobs + tl.load(tile).to(tl.int64) * 6
    rows = tl.load(tile + 1).to(tl.int64) + tl.arange(0, ROWS)
    columns = tl.load(tile + 2).to(tl.int64) + tl.arange(0, COLUMNS)
    origin = tl.load(job).to(tl.pointer_type(ORIGIN))
    target = tl.load(job + 1).to(tl.pointer_type(TARGET))
    height = tl.load(job + 2)
    width = tl.load(job + 3)
    origin_stride = tl.load(job + 4)
    target_stride = tl.load(job + 5)
    if ALIGNED:  # tells the compiler that it may use the widest accesses
        origin = tl.multiple_of(origin, 16)
        target = tl.multiple_of(target, 16)
        width = tl.multiple_of(width, 8)
        origin_stride = tl.multiple_of(origin_stride, 8)
        target_stride = tl.multiple_of(target_stride, 8)
        columns = tl.max_contiguous(tl.multiple_of(columns, COLUMNS), COLUMNS)
    inside = (rows[:, None] < height) & (columns[None, :] < width)
    values = tl.load(origin + rows[:, None] * origin_stride + columns[None, :], mask=inside)
    tl.store(target + rows[:, None] * target_stride + columns[None, :], values.to(TARGET), mask=inside)


def launch(jobs: Tensor, tiles: Tensor, origin: torch.dtype, target: torch.dtype, aligned: bool) -> Callable[[], None]:
    """Return a function that copies ``jobs`` [j, 6] int64 by ``tiles`` [t, 3] int32 (see ``rectangle_copy``)."""
    grid = (len(tiles), 1, 1)
    arguments = jobs, tiles, _TYPES[origin], _TYPES[target], aligned, ROWS, COLUMNS
    compiled = _copy_tile.warmup(*arguments, num_warps=8, grid=grid)
    # What is compiled starts in a third of the time that looking it up by its arguments takes; Triton's interpreter
    # compiles nothing.
    start = compiled[grid] if compiled else functools.partial(_copy_tile[grid], num_warps=8)
    return functools.partial(start, *arguments)
