"""Page-locked host memory of exactly the size that was asked for."""

from __future__ import annotations

import psutil
import torch

from rlhf_megatron.roles.host_memory import pinned_buffers

SIZES = [3 * 2**28 + 5, 1, 0, 2**20]  # the first would be rounded up to 2**30


def test_buffers_are_page_locked_and_no_larger_than_asked_for() -> None:
    torch.empty(1, device="cuda")
    before = psutil.Process().memory_info().rss
    buffers = pinned_buffers(SIZES, at_a_time=2**20)  # the last does not fit beside the first two
    taken = psutil.Process().memory_info().rss - before
    assert [len(buffer) for buffer in buffers] == SIZES
    assert all(buffer.is_pinned() for buffer in buffers if len(buffer))
    assert taken < 1.05 * sum(SIZES)
    for number, buffer in enumerate(buffers):
        buffer.copy_(torch.full_like(buffer, number, device="cuda"), non_blocking=True)
    torch.cuda.synchronize()
    assert all((buffer == number).all() for number, buffer in enumerate(buffers))
    again = pinned_buffers(SIZES)  # beside the first
    del buffers, buffer
    assert again[0].is_pinned()
    del again
    assert psutil.Process().memory_info().rss - before < 0.1 * sum(SIZES), "given back"
