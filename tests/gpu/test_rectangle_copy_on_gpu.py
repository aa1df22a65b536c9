"""The kernel that copies rectangles, on the hardware that it is for."""

from __future__ import annotations

from rectangles import check_kernel


def test_the_kernel_copies_what_torch_copies() -> None:
    check_kernel("cuda", exact_casts=True)
