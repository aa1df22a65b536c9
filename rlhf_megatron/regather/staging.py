"""Rounds of a transfer: few of them, and what is not contiguous through buffers that are bounded and allocated once."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_megatron.regather.plan import Copy, RankPlan
from rlhf_megatron.regather.rounds import rounds

STAGING_BYTES = 256 << 20
# A piece of so many bytes that is contiguous on both ends travels from parameter to parameter. Of a smaller one the two
# copies take less time than a transfer takes to start.
DIRECT_BYTES = 8 << 20
_DIRECT_AT_A_TIME = 64  # pieces for each peer in one round
IN_FLIGHT = 2  # rounds: while one is on the wire, the next is packed and the one before unpacked
_LEAST_BYTES = 1 << 20
_ALIGNMENT = 16  # bytes; each piece begins at a multiple, for the widest accesses of a GPU


@dataclasses.dataclass(frozen=True)
class Half:
    """The sends, or the receives, of one round.

    Attributes:
        buffers: for each peer a flat buffer.
        pieces: for each peer, what goes through its buffer, with the place there.
        direct: for each peer, what goes without one.
    """

    buffers: dict[int, Tensor]
    pieces: dict[int, list[tuple[Copy, Tensor]]]
    direct: dict[int, list[Copy]]

    @property
    def peers(self) -> set[int]:
        """The ranks at the other end."""
        return {*self.buffers, *self.direct}


@dataclasses.dataclass(frozen=True)
class Round:
    """One transfer to and from each peer: at most one buffer, and any number of pieces without.

    ``forwards``: it sends what earlier rounds have brought, from destination parameters.
    """

    sends: Half
    receives: Half
    forwards: bool = False


class _Pieces(NamedTuple):
    """The pieces that one round moves between two ranks."""

    staged: list[Copy]
    direct: list[Copy]


def stage(
    plan: RankPlan, dtype: torch.dtype, device: torch.device | str, staging_bytes: int, direct_bytes: int | None
) -> list[Round]:
    """Return the rounds of ``plan``, with their buffers; collective over the world, which all rounds of all ranks fit.

    Contiguous pieces of ``direct_bytes`` or more go without a buffer, none where that is None. Where a rank has not
    enough memory all halve their buffers until all have, and the first rank says so. Raises the out-of-memory error
    where less than 1 MB is still too much.
    """
    peers = max(_peers(plan), _peers(plan.forwarding))
    share = max(1, _largest(peers)) * IN_FLIGHT * dtype.itemsize
    allowed = staging_bytes
    while True:
        made, failure = _try_rounds(plan, max(1, allowed // share), direct_bytes, dtype, device)
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


def _peers(plan: RankPlan) -> int:
    """Return the number of a rank's transfers in a round: to each that it sends to, from each that it receives from."""
    return len({copy.destination for copy in plan.sends}) + len({copy.source for copy in plan.receives})


def _try_rounds(
    plan: RankPlan, limit: int, direct_bytes: int | None, dtype: torch.dtype, device: torch.device | str
) -> tuple[list[Round], RuntimeError | None]:
    """Return the rounds of at most ``limit`` elements for each peer, or none and why there is no memory for them."""
    try:
        return _rounds(plan, limit, direct_bytes, dtype, device), None
    except RuntimeError as error:  # torch.OutOfMemoryError on a GPU, no type of its own on a CPU
        if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
            return [], error
        raise


def _largest(value: int) -> int:
    """Return the largest of all ranks' values."""
    largest = torch.tensor(value)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def _rounds(
    plan: RankPlan, limit: int, direct_bytes: int | None, dtype: torch.dtype, device: torch.device | str
) -> list[Round]:
    """Return every round with its part of the buffers, which the rounds of one slot share; what is forwarded comes
    last."""
    least = direct_bytes / dtype.itemsize if direct_bytes is not None else math.inf
    first = _turns(plan, limit, least)
    turns = first + _turns(plan.forwarding, limit, least)
    made: list[Round] = []
    spaces: list[tuple[Tensor, ...]] = []
    for slot in range(min(IN_FLIGHT, len(turns))):
        most = [max(_size(turn[half], dtype) for turn in turns[slot::IN_FLIGHT]) for half in range(2)]
        spaces.append(tuple(torch.empty(size, dtype=dtype, device=device) for size in most))
    for number, (sends, receives) in enumerate(turns):
        for_sends, for_receives = spaces[number % IN_FLIGHT]
        halves = _lay_out(sends, for_sends), _lay_out(receives, for_receives)
        made.append(Round(*halves, forwards=number >= len(first)))
    return made


def _turns(plan: RankPlan, limit: int, least: float) -> list[tuple[dict[int, _Pieces], dict[int, _Pieces]]]:
    """Return the pieces that each round sends, and those that it receives, by peer."""
    of_sends = _by_round(plan.sends, "destination", limit, least)
    of_receives = _by_round(plan.receives, "source", limit, least)
    return list(itertools.zip_longest(of_sends, of_receives, fillvalue=dict[int, _Pieces]()))


def _by_round(copies: Sequence[Copy], end: str, limit: int, least: float) -> list[dict[int, _Pieces]]:
    """Return each round's pieces to or from each peer; contiguous ones of ``least`` elements go directly."""
    of_peer: dict[int, list[Copy]] = defaultdict(list)
    for copy in copies:
        of_peer[getattr(copy, end)].append(copy)
    by_round: list[dict[int, _Pieces]] = []
    for peer, its_copies in of_peer.items():
        for number, pieces in enumerate(_rounds_of_pair(its_copies, limit, least)):
            if number == len(by_round):
                by_round.append({})
            by_round[number][peer] = pieces
    return by_round


def _rounds_of_pair(copies: Sequence[Copy], limit: int, least: float) -> list[_Pieces]:
    """Return the rounds of one pair of ranks, alike on both; what needs no buffer is spread evenly over those that
    do."""
    direct: list[Copy] = []
    through_buffers: list[Copy] = []
    for copy in copies:
        (direct if copy.contiguous and copy.elements >= least else through_buffers).append(copy)
    staged = rounds(through_buffers, limit)
    count = max(len(staged), -(-len(direct) // _DIRECT_AT_A_TIME))
    pieces = [_Pieces(staged[number] if number < len(staged) else [], []) for number in range(count)]
    total, before = sum(copy.elements for copy in direct), 0
    for copy in direct:
        pieces[before * count // total].direct.append(copy)
        before += copy.elements
    return pieces


def _padded(copy: Copy, dtype: torch.dtype) -> int:
    """Return elements that a piece takes in a buffer."""
    multiple = _ALIGNMENT // dtype.itemsize
    return -(-copy.elements // multiple) * multiple


def _size(turn: dict[int, _Pieces], dtype: torch.dtype) -> int:
    return sum(_padded(copy, dtype) for pieces in turn.values() for copy in pieces.staged)


def _lay_out(turn: dict[int, _Pieces], space: Tensor) -> Half:
    """Lay the staged pieces of one round out in ``space``, peer after peer."""
    half = Half({}, defaultdict(list), {peer: pieces.direct for peer, pieces in turn.items() if pieces.direct})
    position = 0
    for peer, pieces in turn.items():
        start = position
        for copy in pieces.staged:
            end = position + copy.elements
            shape = [stop - first for first, stop in copy.region]
            half.pieces[peer].append((copy, space[position:end].view(shape)))
            position += _padded(copy, space.dtype)
        if pieces.staged:
            half.buffers[peer] = space[start:end]
    return half
