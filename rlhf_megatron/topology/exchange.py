"""Bringing together what ranks hold apart: counts, texts and small objects. Rows are the matter of ``row_exchange``.

Every call is collective over ``group``; None: over the world.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from rlhf_megatron.errors import UserError, is_transient

_T = TypeVar("_T")
_Group = dist.ProcessGroup | None


def sum_over_ranks(values: Sequence[float], group: _Group = None) -> list[float]:
    """Return the element-wise sum of every rank's values, equal on every rank."""
    return _over_ranks(values, dist.ReduceOp.SUM, group)


def max_over_ranks(values: Sequence[float]) -> list[float]:
    """Return the element-wise largest of every rank's values, equal on every rank."""
    return _over_ranks(values, dist.ReduceOp.MAX, None)


def _over_ranks(values: Sequence[float], operation: Any, group: _Group) -> list[float]:
    reduced = torch.tensor(list(values), dtype=torch.float64)
    dist.all_reduce(reduced, operation, group)
    result: list[float] = reduced.tolist()
    return result


def gather_bytes(data: bytes) -> list[bytes]:
    """Return every rank's bytes in rank order on rank 0, an empty list elsewhere; over the world."""
    rank, world = dist.get_rank(), dist.get_world_size()
    lengths = torch.zeros(world, dtype=torch.int64)
    lengths[rank] = len(data)
    dist.all_reduce(lengths)
    if rank:
        if data:
            dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0)
        return []
    parts = [data]
    for source, length in enumerate(lengths.tolist()[1:], start=1):
        part = torch.empty(length, dtype=torch.uint8)
        if length:
            dist.recv(part, source)
        parts.append(part.numpy().tobytes())
    return parts


def from_rank(value: _T, rank: int = 0, group: _Group = None) -> _T:
    """Broadcast ``rank``'s value, a rank of the world, to every rank by way of pickle; what others pass is ignored."""
    box = [value]
    dist.broadcast_object_list(box, src=rank, group=group)
    return box[0]


def by_rank(rank: int, action: Callable[[], _T]) -> _T:
    """Have one rank act while the others wait; return to all what it returns.

    Raises on all ranks the OSError that it has, with its number.
    """
    outcome: tuple[_T | None, str | None] = None, None
    if dist.get_rank() == rank:
        try:
            outcome = action(), None
        except OSError as error:
            outcome = None, str(error)
    value, problem = from_rank(outcome, rank)
    if problem is not None:
        raise OSError(f"rank {rank}: {problem}")
    return cast(_T, value)


def gather_objects(value: Any, group: _Group = None) -> list[Any]:
    """Return every rank's value in rank order on every rank."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


@contextlib.contextmanager
def refused_by_all(group: _Group = None) -> Iterator[None]:
    """Have every rank raise the UserError that the first of them raises inside; collective as it ends.

    One that ``is_of_node`` is raised at once: torchrun ends the other ranks with those of the node.
    Nothing is to be exchanged inside after an error may have come: others would wait for the rank that it came on.
    """
    refusal = None
    try:
        yield
    except UserError as error:
        if error.is_of_node:
            raise
        refusal = error
        refusal.is_transient = is_transient(error)  # pickle leaves out the cause, which may be what says so
    first = next((each for each in gather_objects(refusal, group) if each is not None), None)
    if first is not None:
        raise first
