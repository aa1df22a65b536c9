"""The kernels of ``block_quantization``: a program for a block, or one of several rows, which it keeps in registers."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rlhf_megatron.kernels.block_quantization import BLOCK, LARGEST, SMALLEST_SCALE

WARPS, WARPS_OF_GROUPS = 8, 4
ROWS = 16  # of a program


@triton.jit
def _quantize(  # type: ignore[no-untyped-def] # Triton looks names of annotations up and accepts its own alone
    values,
    quantized,
    scales,
    row_stride,
    columns,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST_SCALE: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    within = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    block = tl.load(values + rows * row_stride + within).to(tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(block)), LARGEST), SMALLEST_SCALE)
    tl.store(scales + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), scale)
    tl.store(quantized + rows * columns + within, _of_scale(block, scale, LARGEST).to(quantized.dtype.element_ty))


@triton.jit(do_not_specialize=["rows", "scale_stride"])  # one kernel for any number of tokens
def _quantize_groups(  # type: ignore[no-untyped-def]
    values,
    quantized,
    scales,
    row_stride,
    rows,
    columns,
    scale_stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST_SCALE: tl.constexpr,
):
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    there = row < rows
    of_row = row.to(tl.int64)[:, None]
    within = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    group = tl.load(values + of_row * row_stride + within, mask=there[:, None], other=0.0).to(tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(group), 1), LARGEST), SMALLEST_SCALE)
    tl.store(scales + tl.program_id(0).to(tl.int64) * scale_stride + row, scale, mask=there)
    of_scale = _of_scale(group, scale[:, None], LARGEST).to(quantized.dtype.element_ty)
    tl.store(quantized + of_row * columns + within, of_scale, mask=there[:, None])


@triton.jit
def _of_scale(values, scale, LARGEST: tl.constexpr):  # type: ignore[no-untyped-def]
    quotient = tl.div_rn(values, tl.broadcast_to(scale, values.shape))
    return tl.clamp(quotient, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)


def launch(values: Tensor, quantized: Tensor, scales: Tensor) -> None:
    """Quantize as ``quantize_blocks`` does."""
    rows, columns = values.shape
    assert values.stride(1) == 1 and quantized.is_contiguous() and scales.is_contiguous()
    _quantize[rows // BLOCK, columns // BLOCK](
        values, quantized, scales, values.stride(0), columns, BLOCK, LARGEST, SMALLEST_SCALE, num_warps=WARPS
    )


def launch_groups(values: Tensor, quantized: Tensor, scales: Tensor) -> None:
    """Quantize as ``quantize_groups`` does, in place; columns of ``scales`` are contiguous."""
    rows, columns = values.shape
    assert values.stride(1) == 1 and quantized.is_contiguous() and scales.stride(0) == 1
    if rows:
        _quantize_groups[columns // BLOCK, triton.cdiv(rows, ROWS)](
            values, quantized, scales, values.stride(0), rows, columns, scales.stride(1),
            ROWS, BLOCK, LARGEST, SMALLEST_SCALE, num_warps=WARPS_OF_GROUPS,
        )  # fmt: skip
