"""The kernel that quantizes weights by blocks on the hardware that it is for."""

from __future__ import annotations

from quantized_blocks import check_kernel


def test_the_kernel_equals_the_reference() -> None:
    check_kernel("cuda")
