"""The part of a KV cache that paused requests use, on the host while the GPU is the trainer's.

vLLM copies all of its cache or none. At the end of a step that does not wait for its longest responses few blocks are
in use, and all may be most of the GPU's memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_CHUNK = 1 << 28  # bytes on the GPU at a time, beside the cache


class Rows(NamedTuple):
    """Memory [n, bytes] of which some rows are kept; all, without their numbers."""

    memory: Tensor
    kept: Tensor | None


class HostCopy:
    """Rows of memory on the host, pinned for a GPU's. What it has taken for them it keeps for the next ones."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._rows: list[Rows] = []

    @property
    def size(self) -> int:
        """Bytes that are kept now."""
        return sum(_size(rows) for rows in self._rows)

    def save(self, rows: Sequence[Rows]) -> None:
        """Copy rows to the host; they may be overwritten then."""
        self._rows = list(rows)
        if len(self._buffer) < self.size:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # else there would be two
            # torch takes a power of two of pinned memory, which takes seconds.
            room, pinned = 1 << (self.size - 1).bit_length(), any(each.memory.is_cuda for each in self._rows)
            self._buffer = torch.empty(room, dtype=torch.uint8, pin_memory=pinned)
        for memory, kept, host in self._chunks():
            host.copy_(memory if kept is None else memory.index_select(0, kept), non_blocking=True)
        self._wait()

    def restore(self) -> None:
        """Copy what was saved back to where it was, once."""
        for memory, kept, host in self._chunks():
            if kept is None:
                memory.copy_(host, non_blocking=True)
            else:
                memory.index_copy_(0, kept, host.to(memory.device, non_blocking=True))
        self._wait()
        self._rows = []

    def _chunks(self) -> Iterator[tuple[Tensor, Tensor | None, Tensor]]:
        """Yield (memory, the numbers of its rows that are kept, their place on the host), few rows at a time."""
        begin = 0
        for memory, kept in self._rows:
            width = memory.shape[1]
            for chunk in [None] if kept is None else kept.split(max(1, _CHUNK // width)):
                count = len(memory if chunk is None else chunk)
                yield memory, chunk, self._buffer[begin : begin + count * width].view(count, width)
                begin += count * width

    def _wait(self) -> None:
        if any(each.memory.is_cuda for each in self._rows):
            torch.cuda.synchronize()


def _size(rows: Rows) -> int:
    return len(rows.memory if rows.kept is None else rows.kept) * rows.memory.shape[1]


def cache_rows(
    allocations: Iterable[tuple[int, int]],
    caches: Iterable[Tensor],
    blocks: int,
    used: Sequence[int],
    device: torch.device,
) -> list[Rows]:
    """Return what of ``allocations`` (address, bytes), which are all of a cache, is to be kept.

    Of ``caches``, tensors in them that have a row for each of so many ``blocks``, these are the ``used`` ones; around
    them it is everything, such as block tables.
    """
    paged = {cache.untyped_storage().data_ptr(): cache for cache in caches if _is_paged(cache, blocks)}
    rows = []
    for begin, size in allocations:
        at, end = begin, begin + size
        for address in sorted(address for address in paged if begin <= address < end):
            storage = paged[address].untyped_storage()
            rows += _whole(at, address, device)
            pages = torch.empty(0, dtype=torch.uint8, device=device).set_(storage).view(blocks, -1)
            rows.append(Rows(pages, torch.tensor(used, device=device)))
            at = address + storage.nbytes()
        rows += _whole(at, end, device)
    return rows


def _is_paged(cache: Tensor, blocks: int) -> bool:
    """Say whether the storage of a tensor is made of a part for each block."""
    outermost = max(cache.stride()) == cache.stride(0)
    size = cache.stride(0) * cache.itemsize * len(cache)
    return outermost and len(cache) % blocks == 0 and size == cache.untyped_storage().nbytes()


def _whole(begin: int, end: int, device: torch.device) -> list[Rows]:
    """Return the memory between two addresses, unless that is none."""
    if begin == end:
        return []
    if device.type == "cpu":
        memory = torch.frombuffer((ctypes.c_uint8 * (end - begin)).from_address(begin), dtype=torch.uint8)
    else:
        memory = torch.as_tensor(_Memory(begin, end - begin), device=device)
    return [Rows(memory[None], None)]


class _Memory:
    """Bytes at an address of a GPU, as torch takes them from others (the CUDA array interface, version 3)."""

    def __init__(self, address: int, size: int) -> None:
        interface = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}
        self.__cuda_array_interface__ = interface


def used_blocks(pool: Any) -> list[int]:
    """Return the numbers of the blocks of vLLM's ``pool`` that requests have; prefixes in others are forgotten."""
    pool.evict_blocks({block.block_id for block in pool.blocks if not block.ref_cnt})
    return [block.block_id for block in pool.blocks if block.ref_cnt]


def tensors_of(caches: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors of a model runner's caches: one of a layer, or a list of them."""
    for cache in caches:
        if isinstance(cache, Tensor):
            yield cache
        else:
            yield from tensors_of(cache)
