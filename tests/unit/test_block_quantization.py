"""Weights in 8 bits by blocks: the Triton kernel in Triton's interpreter, and compiled for a GPU."""

from __future__ import annotations

import pytest

from triton_kernels import assembly_for_hopper, run_in_interpreter


def test_the_kernel_equals_the_reference() -> None:
    run_in_interpreter("quantized_blocks.py")


def test_the_kernel_compiles_for_a_gpu_with_wide_accesses() -> None:
    pytest.importorskip("triton", reason="the compiler is Triton's")
    from rlhf_megatron.kernels.block_quantization import BLOCK, LARGEST, SMALLEST_SCALE
    from rlhf_megatron.kernels.triton_block_quantization import WARPS, _quantize

    constants = {"BLOCK": BLOCK, "LARGEST": LARGEST, "SMALLEST_SCALE": SMALLEST_SCALE}
    types = {"values": "*bf16", "quantized": "*fp8e4nv", "scales": "*fp32", "row_stride": "i32", "columns": "i32"}
    assembly = assembly_for_hopper(_quantize, types, constants, [*types], WARPS)
    assert "ld.global.v4.b32" in assembly and "cvt.rn.satfinite.e4m3x2.f32" in assembly
