"""Rows on their way: from the rank that holds them straight to those that compute them, once and without padding.

Every rank knows the numbers of all rows, and so what it sends to whom and what comes from whom, to the byte: nothing is
asked before. Messages are packed on the host, and go by NCCL between GPUs, by gloo between ranks without one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_megatron.data.rollout_batch import RolloutBatch, in_order
from rlhf_megatron.data.row_numbers import RowNumbers, SpreadRows, from_table, numbers_of

_Group = dist.ProcessGroup | None


class RowExchangeError(RuntimeError):
    """Another rank has sent other rows than it should."""


@dataclasses.dataclass(frozen=True)
class Moves:
    """Moves of rows from rank to rank, [M] int64 each, of those that one rank sends or gets; none goes to a rank
    twice."""

    rows: Tensor  # by their place in the numbers
    sources: Tensor
    targets: Tensor


def gather_rows(batch: RolloutBatch, group: _Group = None) -> SpreadRows:
    """Return all ranks' rows in the order of ``row_id``, of which each keeps the tokens of its own; collective over
    ``group``.

    A rank that has nothing to add (it repeats a row owner's work) passes a batch without rows.
    """
    rank = dist.get_rank()
    order = batch.row_id.argsort().tolist()
    own = numbers_of(batch.select(order), rank).table()
    counts = torch.zeros(dist.get_world_size(group), dtype=torch.int64)
    counts[dist.get_rank(group)] = len(own)
    dist.all_reduce(counts, group=group)
    first = int(counts[: dist.get_rank(group)].sum())
    # Summed and not gathered, which would pad every rank to the rows of the one that has the most.
    table = own.new_zeros(int(counts.sum()), own.shape[1])
    table[first : first + len(own)] = own
    dist.all_reduce(table, group=group)
    numbers = from_table(table)
    return SpreadRows(numbers.select(numbers.row_id.argsort()), batch.select(order), rank)


def exchange(
    fields: Mapping[str, Tensor], have: Tensor, moves: Moves, numbers: RowNumbers, rank: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Send rows of this ``rank`` and receive those that come to it; return (which came, their fields).

    ``fields`` are [T, ...] of the rows ``have``, rising places in the numbers; on a rank that has none their types
    and shapes still tell what comes. What comes is in the order of the numbers. Called by every rank that sends or
    receives; others need not. Raises RowExchangeError where what comes are not the rows that should.
    """
    names = sorted(fields, key=lambda name: -fields[name].element_size())  # so that each begins where its type may
    lengths = numbers.lengths[have].tolist()
    index_of = {row: index for index, row in enumerate(have.tolist())}
    pieces = {name: fields[name].split(lengths) for name in names}

    def packed(rows: Sequence[int]) -> Tensor:
        chosen = [index_of[row] for row in rows]
        label = torch.stack([numbers.row_id[rows], numbers.lengths[rows]], dim=1)
        parts = [label, *(torch.cat([pieces[name][index] for index in chosen]) for name in names)]
        return torch.cat([_bytes(part) for part in parts])

    out = _by_rank(moves.rows, moves.targets, (moves.sources == rank) & (moves.targets != rank))
    into = _by_rank(moves.rows, moves.sources, (moves.targets == rank) & (moves.sources != rank))
    token_bytes = sum(_bytes_per_token(fields[name]) for name in names)
    received = {
        peer: torch.empty(16 * len(rows) + token_bytes * int(numbers.lengths[rows].sum()), dtype=torch.uint8)
        for peer, rows in into.items()
    }
    _transfer({peer: packed(rows) for peer, rows in out.items()}, received)
    parts: list[dict[str, Tensor]] = []
    arrived: list[list[int]] = []
    for peer, rows in into.items():
        parts.append(_unpacked(received[peer], rows, numbers, {name: fields[name] for name in names}, peer))
        arrived.append(rows)
    stays = moves.rows[(moves.sources == rank) & (moves.targets == rank)].sort().values.tolist()
    if stays:
        parts.append({name: torch.cat([pieces[name][index_of[row]] for row in stays]) for name in names})
        arrived.append(stays)
    came = torch.tensor([row for rows in arrived for row in rows], dtype=torch.int64)
    order = came.argsort()
    of_parts = [numbers.lengths[rows].tolist() for rows in arrived]
    empty = {name: value[:0] for name, value in fields.items()}
    joined = {
        name: in_order([part[name] for part in parts], of_parts, order.tolist()) if parts else empty[name]
        for name in names
    }
    return came[order], joined


def broadcast_fields(fields: Mapping[str, Tensor], tokens: int, leader: int, group: _Group) -> dict[str, Tensor]:
    """Return the ``leader``'s fields of ``tokens`` tokens on every rank of ``group``; collective over it.

    What others pass tells types and shapes.
    """
    if group is None or group.size() == 1:
        return dict(fields)
    names = sorted(fields, key=lambda name: -fields[name].element_size())
    sizes = [_bytes_per_token(fields[name]) * tokens for name in names]
    if dist.get_rank() == leader:
        buffer = torch.cat([_bytes(fields[name]) for name in names])
    else:
        buffer = torch.empty(sum(sizes), dtype=torch.uint8)
    moved = buffer.to(_device())
    if len(buffer):
        dist.broadcast(moved, leader, group=group)
    parts = moved.cpu().split(sizes)
    return {name: _as(part, fields[name], tokens) for name, part in zip(names, parts, strict=True)}


def _transfer(sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> None:
    """Send and receive one message for each peer, by rank; between CPU tensors."""
    device = _device()
    arriving = {peer: message.to(device) for peer, message in received.items()}
    operations = [dist.P2POp(dist.isend, message.to(device), peer) for peer, message in sent.items()]
    operations += [dist.P2POp(dist.irecv, message, peer) for peer, message in arriving.items()]
    try:
        for request in dist.batch_isend_irecv(operations) if operations else ():
            request.wait()
    except RuntimeError as error:
        peers = sorted({*sent, *received})
        raise RowExchangeError(f"the exchange of rows with ranks {peers} broke off ({error})") from error
    for peer, message in arriving.items():
        received[peer].copy_(message)


def _unpacked(
    message: Tensor, rows: Sequence[int], numbers: RowNumbers, like: Mapping[str, Tensor], peer: int
) -> dict[str, Tensor]:
    """Return the fields of ``rows`` in a message of ``peer``; raises RowExchangeError where it is of others."""
    label = message[: 16 * len(rows)].view(torch.int64).view(-1, 2)
    wanted = torch.stack([numbers.row_id[rows], numbers.lengths[rows]], dim=1)
    for came, row in zip(label.tolist(), wanted.tolist(), strict=True):
        if came != row:
            raise RowExchangeError(
                f"row {row[0]} of {row[1]} tokens should come from rank {peer}, and row {came[0]} of {came[1]} came"
            )
    tokens, begin, fields = int(wanted[:, 1].sum()), 16 * len(rows), dict[str, Tensor]()
    for name, value in like.items():
        size = _bytes_per_token(value) * tokens
        fields[name] = _as(message[begin : begin + size], value, tokens)
        begin += size
    return fields


def _by_rank(rows: Tensor, ranks: Tensor, chosen: Tensor) -> dict[int, list[int]]:
    """Return the chosen rows of each rank, both rising."""
    of_rank: dict[int, list[int]] = {}
    for row, rank in sorted(zip(rows[chosen].tolist(), ranks[chosen].tolist(), strict=True)):
        of_rank.setdefault(rank, []).append(row)
    return dict(sorted(of_rank.items()))


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().reshape(-1).view(torch.uint8)


def _bytes_per_token(values: Tensor) -> int:
    return values.element_size() * math.prod(values.shape[1:])


def _as(part: Tensor, like: Tensor, tokens: int) -> Tensor:
    """Return the bytes of ``part`` as values like those."""
    return part.view(like.dtype).view(tokens, *like.shape[1:])


def _device() -> Any:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
