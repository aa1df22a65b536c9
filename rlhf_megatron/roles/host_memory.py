"""Host memory that GPUs copy to and from at full speed."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

_ALIGNMENT = 512  # of a buffer, so that it can be seen as any type
_TOUCHED_AT_A_TIME = 256 << 20
_THREADS = 16
# Drivers keep a table for each registration, and one of 512 GiB needs a larger table than R580 can allocate.
_REGISTERED_AT_A_TIME = 64 << 30


def pinned_buffers(sizes: Sequence[int], at_a_time: int = _REGISTERED_AT_A_TIME) -> list[Tensor]:
    """Return uint8 buffers of so many bytes, zeroed, and page-locked where there is a GPU, as long as any of them
    lives.

    Not by ``pin_memory``: torch's cache rounds each to the next power of two, up to twice what is asked for.
    Neighbours are locked together, up to ``at_a_time`` bytes; none is cut, since CUDA refuses a copy that goes from
    one locked range into another.

    Raises RuntimeError where memory cannot be page-locked.
    """
    rounded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    groups: list[list[int]] = []
    for size in rounded:
        if not groups or sum(groups[-1]) + size > at_a_time:
            groups.append([])
        groups[-1].append(size)
    buffers = [buffer for group in groups for buffer in _region(sum(group)).split(group)]
    return [buffer[:size] for buffer, size in zip(buffers, sizes, strict=True)]


def _region(length: int) -> Tensor:
    """Return memory of its own, page-locked where there is a GPU."""
    if not length:
        return torch.empty(0, dtype=torch.uint8)
    pages = _Pages(-1, length, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A child process would get a copy of each locked page; large pages are a matter of speed alone.
    for advice in (mmap.MADV_DONTFORK, mmap.MADV_HUGEPAGE):
        with contextlib.suppress(OSError):
            pages.madvise(advice)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    if torch.cuda.is_available():
        _touch(memory)
        pages.lock(memory.data_ptr())
    return memory


def _touch(memory: Tensor) -> None:
    """Give pages their memory: several threads write zeros. Page-locking does it with one: 25 s for 27 GB."""

    def write(start: int) -> None:
        ctypes.memset(memory.data_ptr() + start, 0, min(_TOUCHED_AT_A_TIME, len(memory) - start))

    # Ranks of one machine do this at the same time.
    threads = min(_THREADS, max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(write, range(0, len(memory), _TOUCHED_AT_A_TIME)))


class _Pages(mmap.mmap):
    """Whole pages, which are unlocked before they are given back to the system."""

    locked_at: int | None = None

    def lock(self, address: int) -> None:
        error = torch.cuda.cudart().cudaHostRegister(address, len(self), 0)
        if int(error):
            raise RuntimeError(f"{len(self) / 2**30:.1f} GiB of host memory cannot be page-locked: {error}")
        self.locked_at = address

    def __del__(self) -> None:
        if self.locked_at is not None and not sys.is_finalizing():
            torch.cuda.cudart().cudaHostUnregister(self.locked_at)
