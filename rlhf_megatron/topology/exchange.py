"""Bringing together what ranks hold apart: the rows of one step, and counts.

Every call is collective over ``group``; None: over the world.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_megatron.data.rollout_batch import TOKEN_FIELDS, RolloutBatch, boundaries, in_order
from rlhf_megatron.errors import UserError, is_transient

_T = TypeVar("_T")
_Group = dist.ProcessGroup | None


def gather_tensors(tensor: Tensor, group: _Group = None) -> list[Tensor]:
    """Every rank's CPU tensor, of any length but otherwise one shape, on every rank, in rank order."""
    lengths = torch.zeros(dist.get_world_size(group), dtype=torch.int64)
    lengths[dist.get_rank(group)] = len(tensor)
    dist.all_reduce(lengths, group=group)
    missing = int(lengths.max()) - len(tensor)
    padded = torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor.contiguous()
    received = [torch.empty_like(padded) for _ in range(len(lengths))]
    dist.all_gather(received, padded, group)
    return [part[:length] for part, length in zip(received, lengths.tolist(), strict=True)]


def gather_batches(batch: RolloutBatch, group: _Group = None) -> RolloutBatch:
    """All ranks' rows as one batch in the order of ``row_id``, equal on every rank.

    A rank that has nothing to add (it repeats a row owner's work) passes a batch without rows.
    """
    of_ranks = gather_tensors(batch.lengths, group)
    lengths = [of_rank.tolist() for of_rank in of_ranks]
    row_ids = torch.cat(gather_tensors(batch.row_id, group))
    order = row_ids.argsort()
    rows = order.tolist()
    merged: dict[str, Any] = {"cu_seqlens": boundaries(torch.cat(of_ranks)[order]), "row_id": row_ids[order]}
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        if value is None or field.name in merged:
            continue
        # gloo moves neither booleans nor short integers
        as_bytes = value.dtype in (torch.bool, torch.int16)
        parts = gather_tensors(value.contiguous().view(torch.uint8) if as_bytes else value, group)
        joined = in_order(parts, lengths, rows) if field.name in TOKEN_FIELDS else torch.cat(parts)[order]
        merged[field.name] = joined.view(value.dtype) if as_bytes else joined
    return RolloutBatch(**merged)


def sum_over_ranks(values: Sequence[float], group: _Group = None) -> list[float]:
    """Element-wise sum of every rank's values, equal on every rank."""
    return _over_ranks(values, dist.ReduceOp.SUM, group)


def max_over_ranks(values: Sequence[float]) -> list[float]:
    """Element-wise largest of every rank's values, equal on every rank."""
    return _over_ranks(values, dist.ReduceOp.MAX, None)


def _over_ranks(values: Sequence[float], operation: Any, group: _Group) -> list[float]:
    reduced = torch.tensor(list(values), dtype=torch.float64)
    dist.all_reduce(reduced, operation, group)
    result: list[float] = reduced.tolist()
    return result


def gather_bytes(data: bytes) -> list[bytes]:
    """Every rank's bytes in rank order on rank 0, an empty list elsewhere; over the world."""
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


def gather_objects(value: Any, group: _Group = None) -> list[Any]:
    """Every rank's value in rank order on every rank."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


@contextlib.contextmanager
def refused_by_all(group: _Group = None) -> Iterator[None]:
    """Has every rank raise the UserError that the first of them raises inside; collective as it ends.

    Nothing is to be exchanged inside after an error may have come: others would wait for the rank that it came on.
    """
    refusal = None
    try:
        yield
    except UserError as error:
        refusal = error
        refusal.is_transient = is_transient(error)  # pickle leaves out the cause, which may be what says so
    first = next((each for each in gather_objects(refusal, group) if each is not None), None)
    if first is not None:
        raise first
