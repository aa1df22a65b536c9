"""A barrier of ranks that write into each other's memory: each tells the others how often it has come, and waits.

``barrier_reference`` is the reference, and what CPUs use. On GPUs it is a Triton kernel (``triton_peer_barrier``) that
counts by itself, so that a CUDA graph may contain it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

_WARP = 32  # threads, each of which looks after another rank: more than a host has GPUs


def barrier_reference(numbers: Tensor, rank: int, others: Mapping[int, Tensor]) -> None:
    """Do once what ``peer_barrier`` returns."""
    numbers[rank] += 1
    for place in others.values():
        place[0] = numbers[rank]
    while any(numbers[other] < numbers[rank] for other in others):
        time.sleep(0)


def peer_barrier(
    numbers: Tensor, rank: int, others: Mapping[int, Tensor], use_triton: bool | None = None
) -> Callable[[], None]:
    """Return a barrier of this rank and ``others``, on the current stream; it allocates nothing.

    ``numbers`` [world] int32 has how often each rank has come, zero at first. This rank counts in its own element, and
    each of ``others`` has a tensor, by rank, that begins at the place of that number in its memory. What a rank has
    written before the barrier is there for those who are behind it. ``use_triton``: whether the kernel or the reference
    does it; by default the kernel where there is a GPU.
    """
    if not (numbers.is_cuda if use_triton is None else use_triton):
        return functools.partial(barrier_reference, numbers, rank, others)
    from rlhf_megatron.kernels.triton_peer_barrier import launch

    return launch(numbers[rank:], _words(numbers, rank, others))


def _words(numbers: Tensor, rank: int, others: Mapping[int, Tensor]) -> Tensor:
    """Return [2, lanes] int64: addresses to write this rank's number to, and of the numbers that are waited for.

    Lanes that are left over write this rank's number where it is, and wait for that.
    """
    lanes = 1 << max(_WARP - 1, len(others) - 1).bit_length()
    own = [numbers[rank:].data_ptr()] * (lanes - len(others))
    written = [place.data_ptr() for place in others.values()]
    awaited = [numbers[other:].data_ptr() for other in others]
    return torch.tensor([written + own, awaited + own], dtype=torch.int64, device=numbers.device)
