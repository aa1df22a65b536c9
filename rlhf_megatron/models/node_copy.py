"""Tensors of model files in the memory of a node, read there once: each of its ranks reads another part.

Ranks of a node that map the same files share the pages of the system's cache, so a disk is read once as it is, page
after page as they are touched. Where a file system has no such cache, or is slow at small reads, this is the other way:
long reads in order, of parts that no two ranks share, into memory without a name that all of them map.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from rlhf_megatron.models.architecture import ModelError
from rlhf_megatron.runtime.watchdog import watchdog
from rlhf_megatron.topology.exchange import from_rank, gather_objects, refused_by_all
from rlhf_megatron.untrusted import parse_json, reason_of

_PIECE_BYTES = 8 << 20  # of one read
_LENGTH_BYTES = 8  # that tell the length of a file's header, at its beginning

_Wanted = Mapping[Path, Collection[str]]  # file -> tensors


class Extent(NamedTuple):
    """Bytes ``start`` to ``stop`` of a file."""

    path: str
    start: int
    stop: int


class NodeCopy:
    """A node's copy of what its ranks want of some files; a context manager that gives the memory back.

    Attributes:
        bytes_read: by this rank, of the files; with those of the other ranks the node reads each byte once.
    """

    def __init__(self, wanted: _Wanted, group: dist.ProcessGroup) -> None:
        """Read the tensors that any rank of ``group``, the node's, has ``wanted``. Collective over it.

        Raises ModelError on all its ranks where the node has not the memory, or a file cannot be read.
        """
        self.bytes_read = 0
        self._open = contextlib.ExitStack()
        ranks, rank = dist.get_process_group_ranks(group), dist.get_rank()
        plan: tuple[list[Extent], dict[str, str]] | None = None
        union = _union(gather_objects({str(path): list(names) for path, names in wanted.items()}, group))
        with contextlib.ExitStack() as made:
            with refused_by_all(group):
                if rank == ranks[0]:
                    plan = _make_memory(union, made)
            plan = from_rank(plan, ranks[0], group)
            assert plan is not None
            extents, memory_paths = plan
            with refused_by_all(group):
                for extent in share_of(extents, ranks.index(rank), len(ranks)):
                    self.bytes_read += _copy(extent, memory_paths[extent.path])
            self._files: dict[str, Any] = {}
            with refused_by_all(group):
                for path, memory_path in memory_paths.items():
                    self._files[path] = self._open.enter_context(_mapped(path, memory_path))
        self._names = {path: frozenset(names) for path, names in union.items()}

    def reader(self, path: Path, tensor: str) -> Any | None:
        """Return the copy of a file, as safetensors opens it, where it has this tensor; else None."""
        return self._files[str(path)] if tensor in self._names.get(str(path), ()) else None

    def __enter__(self) -> NodeCopy:
        return self

    def __exit__(self, *details: object) -> None:
        self._open.close()


def _union(of_ranks: Sequence[Mapping[str, Sequence[str]]]) -> dict[str, set[str]]:
    union: dict[str, set[str]] = defaultdict(set)
    for wanted in of_ranks:
        for path, names in wanted.items():
            union[path].update(names)
    return {path: union[path] for path in sorted(union)}


def _make_memory(
    wanted: Mapping[str, Collection[str]], made: contextlib.ExitStack
) -> tuple[list[Extent], dict[str, str]]:
    """Return (what is to be read, by file the path of memory of its size, where what is not written takes nothing).

    The memory goes as ``made`` closes and nobody maps it any more, also where processes are killed.
    """
    extents = [extent for path, names in wanted.items() for extent in _extents(path, names)]
    needed, free = sum(each.stop - each.start for each in extents), psutil.virtual_memory().available
    if needed > free:
        raise ModelError(
            f"model.read_once: the node's part of the model takes {needed / 2**30:.1f} GB of its memory, of which "
            f"{free / 2**30:.1f} are free; set it to false"
        )
    memory_paths = {}
    for path in wanted:
        descriptor = os.memfd_create("rlhf_megatron")
        made.callback(os.close, descriptor)
        os.ftruncate(descriptor, os.stat(path).st_size)
        memory_paths[path] = f"/proc/{os.getpid()}/fd/{descriptor}"
    return extents, memory_paths


def _extents(path: str, names: Collection[str]) -> Iterator[Extent]:
    """Yield the header of a file and the tensors of these names, in their order, without seams."""
    try:
        with open(path, "rb", buffering=0) as file:
            begin = _LENGTH_BYTES + int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header = parse_json(os.pread(file.fileno(), begin - _LENGTH_BYTES, _LENGTH_BYTES), path, ModelError)
        offsets = sorted(header[name]["data_offsets"] for name in names)
    except (OSError, KeyError, TypeError) as error:
        raise ModelError(f"{path}: cannot be read as safetensors ({reason_of(error)}); download it again") from error
    start, stop = 0, begin
    for first, last in offsets:
        if begin + first != stop:
            yield Extent(path, start, stop)
            start = begin + first
        stop = begin + last
    yield Extent(path, start, stop)


def share_of(extents: Sequence[Extent], position: int, count: int) -> Iterator[Extent]:
    """Yield the part of ``extents`` that the rank at a ``position`` of ``count`` reads: as many bytes as the others."""
    total = sum(extent.stop - extent.start for extent in extents)
    first, last = total * position // count, total * (position + 1) // count
    before = 0
    for path, start, stop in extents:
        low, high = max(start, start + first - before), min(stop, start + last - before)
        if low < high:
            yield Extent(path, low, high)
        before += stop - start


def _copy(extent: Extent, memory_path: str) -> int:
    """Copy an extent to the same bytes of ``memory_path``; return how many were read."""
    buffer = memoryview(bytearray(min(_PIECE_BYTES, extent.stop - extent.start)))
    at = extent.start
    try:
        with open(extent.path, "rb", buffering=0) as source, open(memory_path, "r+b", buffering=0) as copy:
            os.posix_fadvise(source.fileno(), extent.start, extent.stop - extent.start, os.POSIX_FADV_SEQUENTIAL)
            while at < extent.stop:
                watchdog.beat()
                got = os.preadv(source.fileno(), [buffer[: extent.stop - at]], at)
                if not got:
                    raise ModelError(f"{extent.path}: ends within a tensor; download the model again")
                written = 0
                while written < got:
                    written += os.pwrite(copy.fileno(), buffer[written:got], at + written)
                at += got
    except OSError as error:
        raise ModelError(
            f"{extent.path}: cannot be copied to the node's memory ({reason_of(error)}); set model.read_once to false"
        ) from error
    return at - extent.start


def _mapped(path: str, memory_path: str) -> Any:
    try:
        return safe_open(memory_path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: its copy in memory cannot be mapped ({reason_of(error)})") from error
