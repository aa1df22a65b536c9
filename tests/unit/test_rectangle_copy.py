"""Copies of rectangles: the reference here, the Triton kernel in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from rlhf_megatron.kernels.rectangle_copy import RectangleCopies
from triton_kernels import assembly_for_hopper, run_in_interpreter


def test_the_kernel_copies_what_torch_copies() -> None:
    run_in_interpreter("rectangles.py")


def test_the_kernel_compiles_for_a_gpu_with_the_widest_accesses() -> None:
    language = pytest.importorskip("triton", reason="the compiler is Triton's").language
    from rlhf_megatron.kernels.triton_rectangle_copy import _copy_tile

    values = {"ORIGIN": language.float32, "TARGET": language.bfloat16, "ALIGNED": True, "ROWS": 16, "COLUMNS": 1024}
    assembly = assembly_for_hopper(_copy_tile, {"jobs": "*i64", "tiles": "*i32"}, values)
    assert "ld.global.v4.b32" in assembly and "st.global.v4.b32" in assembly
    assert "cvt.rn.bf16x2.f32" in assembly  # rounds to the nearest, as torch does


def test_copies_follow_their_origins() -> None:
    origin, target = torch.zeros(3, 4), torch.full((4, 8), 7.0)
    copies = RectangleCopies([target[1:, 2:6]], [origin])
    for number in (1.0, 2.0):
        origin.fill_(number)
        copies.run()
        assert (target[1:, 2:6] == number).all() and (target == 7).sum() == 20
    assert RectangleCopies([], []).launches == []


def test_rows_that_are_not_contiguous_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a rectangle \[4, 3\] with strides \(1, 4\) has no contiguous rows"):
        RectangleCopies([torch.zeros(3, 4).T], [torch.zeros(4, 3)], use_triton=True)
