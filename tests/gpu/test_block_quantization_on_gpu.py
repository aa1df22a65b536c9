"""The kernels that quantize weights and tokens by blocks on the hardware that they are for."""

from __future__ import annotations

from quantized_blocks import check_kernels


def test_the_kernels_equal_the_reference() -> None:
    check_kernels("cuda")
