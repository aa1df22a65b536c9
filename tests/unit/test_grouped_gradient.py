"""Gradients of experts added to their sums: the Triton kernel in Triton's interpreter, and compiled for a GPU."""

from __future__ import annotations

import pytest

from triton_kernels import assembly_for_hopper, run_in_interpreter


def test_the_kernel_equals_float64() -> None:
    run_in_interpreter("grouped_gradients.py")


def test_the_kernel_compiles_for_a_gpu_with_its_matrix_units_and_wide_accesses() -> None:
    pytest.importorskip("triton", reason="the compiler is Triton's")
    from rlhf_megatron.kernels.triton_grouped_gradient import COLUMNS, ROWS, TOKENS, WARPS, _add_gradient

    constants = {"ROWS": ROWS, "COLUMNS": COLUMNS, "TOKENS": TOKENS}
    others = {"total": "*fp32", "gradients": "*bf16", "inputs": "*bf16", "ends": "*i32"}
    types = {name: others.get(name, "i32") for name in _add_gradient.arg_names if name not in constants}
    aligned = ["total", "gradients", "inputs", "gradient_stride", "input_stride", "rows", "columns"]
    assembly = assembly_for_hopper(_add_gradient, types, constants, aligned, WARPS)
    assert "wgmma.mma_async" in assembly and "cp.async" in assembly
