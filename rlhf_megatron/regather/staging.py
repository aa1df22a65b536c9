"""The buffers that weights travel through: few, bounded, and allocated once."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_megatron.regather.plan import Copy, RankPlan, rounds

STAGING_BYTES = 256 << 20
IN_FLIGHT = 2  # rounds: while one is on the wire, the next is packed and the one before unpacked
_LEAST_BYTES = 1 << 20
_ALIGNMENT = 16  # bytes; each piece begins at a multiple, for the widest accesses of a GPU


@dataclasses.dataclass(frozen=True)
class Half:
    """What one round sends, or receives: for each peer a flat buffer, and each piece with its place in it."""

    buffers: dict[int, Tensor]
    pieces: dict[int, list[tuple[Copy, Tensor]]]


@dataclasses.dataclass(frozen=True)
class Round:
    """One transfer of at most one buffer to and from each peer."""

    sends: Half
    receives: Half


def stage(plan: RankPlan, dtype: torch.dtype, device: torch.device | str, staging_bytes: int) -> list[Round]:
    """The rounds of ``plan``, with their buffers; collective over the world, which all rounds of all ranks fit.

    Where a rank has not enough memory all halve their buffers until all have, and the first rank says so. Raises the
    out-of-memory error where less than 1 MB is still too much.
    """
    peers = len({copy.destination for copy in plan.sends}) + len({copy.source for copy in plan.receives})
    share = max(1, _largest(peers)) * IN_FLIGHT * dtype.itemsize
    allowed = staging_bytes
    while True:
        made, failure = _try_rounds(plan, max(1, allowed // share), dtype, device)
        if not _largest(int(failure is not None)):
            break
        del made
        allowed //= 2
        if allowed < _LEAST_BYTES:
            raise failure or RuntimeError("regathering: another rank has no memory for its buffers")
    if allowed < staging_bytes and dist.get_rank() == 0:
        print(
            f"regathering: no memory for {staging_bytes / 2**20:g} MB of buffers on every rank; going on with "
            f"{allowed / 2**20:g} MB",
            file=sys.stderr,
            flush=True,
        )
    return made


def _try_rounds(
    plan: RankPlan, limit: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[list[Round], RuntimeError | None]:
    """The rounds of at most ``limit`` elements for each peer, or none and why there is no memory for them."""
    try:
        return _rounds(plan, limit, dtype, device), None
    except RuntimeError as error:  # torch.OutOfMemoryError on a GPU, no type of its own on a CPU
        if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
            return [], error
        raise


def _largest(value: int) -> int:
    """The largest of all ranks' values."""
    found = torch.tensor(value)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)


def _rounds(plan: RankPlan, limit: int, dtype: torch.dtype, device: torch.device | str) -> list[Round]:
    """Every round with its part of the buffers, which the rounds of one slot share."""
    of_sends, of_receives = _by_round(plan.sends, "destination", limit), _by_round(plan.receives, "source", limit)
    turns = list(itertools.zip_longest(of_sends, of_receives, fillvalue=dict[int, list[Copy]]()))
    made: list[Round] = []
    spaces: list[tuple[Tensor, ...]] = []
    for slot in range(min(IN_FLIGHT, len(turns))):
        most = [max(_size(turn[half], dtype) for turn in turns[slot::IN_FLIGHT]) for half in range(2)]
        spaces.append(tuple(torch.empty(size, dtype=dtype, device=device) for size in most))
    for number, (sends, receives) in enumerate(turns):
        for_sends, for_receives = spaces[number % IN_FLIGHT]
        made.append(Round(_place(sends, for_sends), _place(receives, for_receives)))
    return made


def _by_round(copies: Sequence[Copy], end: str, limit: int) -> list[dict[int, list[Copy]]]:
    """For each round the pieces that go to, or come from, each peer."""
    of_peer: dict[int, list[Copy]] = defaultdict(list)
    for copy in copies:
        of_peer[getattr(copy, end)].append(copy)
    by_round: list[dict[int, list[Copy]]] = []
    for peer, its_copies in of_peer.items():
        for number, pieces in enumerate(rounds(its_copies, limit)):
            if number == len(by_round):
                by_round.append({})
            by_round[number][peer] = pieces
    return by_round


def _padded(copy: Copy, dtype: torch.dtype) -> int:
    """Elements that a piece takes in a buffer."""
    multiple = _ALIGNMENT // dtype.itemsize
    return -(-copy.elements // multiple) * multiple


def _size(turn: dict[int, list[Copy]], dtype: torch.dtype) -> int:
    return sum(_padded(copy, dtype) for pieces in turn.values() for copy in pieces)


def _place(turn: dict[int, list[Copy]], space: Tensor) -> Half:
    """Where each piece of one round lies in ``space``: the peers one behind the other."""
    half = Half({}, defaultdict(list))
    position = 0
    for peer, pieces in turn.items():
        start = position
        for copy in pieces:
            end = position + copy.elements
            shape = [stop - first for first, stop in copy.region]
            half.pieces[peer].append((copy, space[position:end].view(shape)))
            position += _padded(copy, space.dtype)
        half.buffers[peer] = space[start:end]
    return half
