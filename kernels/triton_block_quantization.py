"""The kernel of ``block_quantization``: a program for a block, which it keeps in registers."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rlhf_megatron.kernels.block_quantization import BLOCK, LARGEST, SMALLEST_SCALE

WARPS = 8


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
    of_scale = tl.div_rn(block, tl.broadcast_to(scale, block.shape))
    inside = tl.clamp(of_scale, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(quantized + rows * columns + within, inside.to(quantized.dtype.element_ty))


def launch(values: Tensor, quantized: Tensor, scales: Tensor) -> None:
    """Quantize as ``quantize_blocks`` does."""
    rows, columns = values.shape
    assert values.stride(1) == 1 and quantized.is_contiguous() and scales.is_contiguous()
    _quantize[rows // BLOCK, columns // BLOCK](
        values, quantized, scales, values.stride(0), columns, BLOCK, LARGEST, SMALLEST_SCALE, num_warps=WARPS
    )
