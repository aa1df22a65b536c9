"""Host memory that GPUs copy to and from at full speed."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 512  # of a buffer, so that it can be seen as any type
# Drivers keep a table for each registration, and one of 512 GiB needs a larger table than R580 can allocate.
_REGISTERED_AT_A_TIME = 64 << 30


def pinned_buffers(sizes: Sequence[int]) -> list[Tensor]:
    """uint8 buffers of so many bytes, page-locked where there is a GPU, as long as any of them lives.

    Not by ``pin_memory``: torch's cache rounds each to the next power of two, up to twice what is asked for.

    Raises RuntimeError where memory cannot be page-locked.
    """
    ends = list(itertools.accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes))
    whole = torch.empty(ends[-1] if ends else 0, dtype=torch.uint8)
    if torch.cuda.is_available() and len(whole):
        _page_lock(whole)
    starts = [0, *ends][: len(sizes)]
    return [whole[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def _page_lock(whole: Tensor) -> None:
    cuda = torch.cuda.cudart()
    storage = whole.untyped_storage()
    for start in range(0, storage.nbytes(), _REGISTERED_AT_A_TIME):
        address, size = storage.data_ptr() + start, min(_REGISTERED_AT_A_TIME, storage.nbytes() - start)
        error = cuda.cudaHostRegister(address, size, 0)
        if int(error):
            raise RuntimeError(f"{size / 2**30:.1f} GiB of host memory cannot be page-locked: {error}")
        weakref.finalize(storage, cuda.cudaHostUnregister, address)
