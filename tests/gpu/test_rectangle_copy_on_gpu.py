"""The kernel that copies rectangles, on the hardware that it is for."""

from __future__ import annotations

import pytest

from rectangles import check_kernel


@pytest.mark.parametrize("recorded", [False, True])
def test_the_kernel_copies_what_torch_copies(recorded: bool) -> None:
    check_kernel("cuda", exact_casts=True, recorded=recorded)
