"""The kernels for products in 8 bits on the hardware that they are for."""

from __future__ import annotations

from fp8_products import check_kernel


def test_the_kernels_equal_the_reference() -> None:
    check_kernel("cuda")
