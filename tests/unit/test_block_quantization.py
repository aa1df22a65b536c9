"""Weights and tokens in 8 bits by blocks: the Triton kernels in Triton's interpreter, and compiled for a GPU."""

from __future__ import annotations

import pytest

from triton_kernels import assembly_for_hopper, run_in_interpreter


def test_the_kernels_equal_the_reference() -> None:
    run_in_interpreter("quantized_blocks.py")


def test_the_kernels_compile_for_a_gpu_with_wide_accesses() -> None:
    pytest.importorskip("triton", reason="the compiler is Triton's")
    from rlhf_megatron.kernels import triton_block_quantization as kernels
    from rlhf_megatron.kernels.block_quantization import BLOCK, LARGEST, SMALLEST_SCALE

    constants = {"BLOCK": BLOCK, "LARGEST": LARGEST, "SMALLEST_SCALE": SMALLEST_SCALE}
    of_rows = constants | {"ROWS": kernels.ROWS}
    types = {"values": "*bf16", "quantized": "*fp8e4nv", "scales": "*fp32", "row_stride": "i32", "columns": "i32"}
    of_groups = types | {"rows": "i32", "scale_stride": "i32"}
    blocks = assembly_for_hopper(kernels._quantize, types, constants, [*types], kernels.WARPS)
    groups = assembly_for_hopper(kernels._quantize_groups, of_groups, of_rows, [*types], kernels.WARPS_OF_GROUPS)
    for assembly in (blocks, groups):
        assert "ld.global.v4.b32" in assembly and "cvt.rn.satfinite.e4m3x2.f32" in assembly
