"""The kernel of a barrier of GPUs, on the hardware that it is for; with others in test_peer_memory_on_gpu.py."""

from __future__ import annotations

import pytest

from peer_barriers import check_alone


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("others", [0, 1, 7, 40])
def test_the_kernel_counts_and_tells(others: int, recorded: bool) -> None:
    check_alone("cuda", others, recorded)
