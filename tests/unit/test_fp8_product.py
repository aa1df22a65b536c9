"""Products in 8 bits for few tokens: the Triton kernels in Triton's interpreter, and compiled for a GPU."""

from __future__ import annotations

import pytest

from triton_kernels import assembly_for_hopper, run_in_interpreter


def test_the_kernels_equal_the_reference() -> None:
    run_in_interpreter("fp8_products.py")


@pytest.mark.parametrize("tokens", [16, 128])
def test_the_kernel_compiles_for_a_gpu_with_its_matrix_units_and_wide_accesses(tokens: int) -> None:
    pytest.importorskip("triton", reason="the compiler is Triton's")
    from rlhf_megatron.kernels.fp8_product import BLOCK
    from rlhf_megatron.kernels.triton_fp8_product import TILES, _multiply

    sizes = {"ROWS": TILES.rows, "TOKENS": tokens, "DEPTH": BLOCK}
    constants = sizes | {"HAS_BIAS": True, "IS_PART": False}
    pointers = {"tokens": "*fp8e4nv", "weights": "*fp8e4nv", "bias": "*bf16", "output": "*bf16"}
    pointers |= dict.fromkeys(("token_scales", "weight_scales", "parts"), "*fp32")
    types = {name: pointers.get(name, "i32") for name in _multiply.arg_names if name not in constants}
    assembly = assembly_for_hopper(_multiply, types, constants, [*pointers, "rows", "depth"], TILES.warps)
    assert f"wgmma.mma_async.sync.aligned.m64n{tokens}k32.f32.e4m3.e4m3" in assembly
    assert "cp.async.cg" in assembly, "16 bytes at a time"
