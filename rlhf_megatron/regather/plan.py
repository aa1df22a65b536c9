"""The plan of a regathering: which rectangle goes from which rank's parameter to which rank's parameter.

Pure: it needs the blocks that each rank holds and wants, and no process group. Every rank computes the same plan.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence

from rlhf_megatron.models.weight_map import Block, Region


class PlanError(RuntimeError):
    """Sources that do not hold all that the destinations want: a fault of the weight map, never of a user."""


@dataclasses.dataclass(frozen=True)
class Copy:
    """One rectangle of a Hugging Face tensor, from a window of one rank's parameter to a window of another's."""

    tensor: str
    region: Region
    source: int
    source_parameter: str
    source_offset: tuple[int, ...]
    destination: int
    destination_parameter: str
    destination_offset: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many numbers move."""
        return elements(self.region)


def elements(region: Region) -> int:
    """The number of elements in a rectangle."""
    count = 1
    for start, stop in region:
        count *= stop - start
    return count


def intersect(one: Region, other: Region) -> Region | None:
    """The common rectangle of two, or None."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def plan_regather(
    sources: Mapping[int, Sequence[Block]], destinations: Mapping[int, Sequence[Block]], ranks_per_node: int = 8
) -> list[Copy]:
    """Covers every element that each destination rank wants exactly once.

    ``sources`` and ``destinations`` map ranks to what they hold and want. Where several ranks hold the same rectangle,
    the destination takes its own, else one on its node, else one of them by turns. Raises PlanError where an element is
    held by nobody. The order is by destination, then as its blocks are listed, so both ends of a transfer agree on it.
    """
    holders: dict[str, dict[Region, dict[int, Block]]] = defaultdict(lambda: defaultdict(dict))
    for rank, blocks in sources.items():
        for block in blocks:
            holders[block.tensor][block.region].setdefault(rank, block)
    copies = []
    for destination, wanted_blocks in destinations.items():
        for wanted in wanted_blocks:
            covered = 0
            for region, by_rank in holders[wanted.tensor].items():
                common = intersect(region, wanted.region)
                if common is None:
                    continue
                source = _choose(list(by_rank), destination, ranks_per_node)
                copies.append(_copy(common, by_rank[source], source, wanted, destination))
                covered += elements(common)
            if covered != elements(wanted.region):
                raise PlanError(
                    f"{wanted.tensor}{list(wanted.region)} for rank {destination}: {covered} of "
                    f"{elements(wanted.region)} elements have a source"
                )
    return copies


def _choose(ranks: list[int], destination: int, ranks_per_node: int) -> int:
    if destination in ranks:
        return destination
    near = [rank for rank in ranks if rank // ranks_per_node == destination // ranks_per_node]
    candidates = near or ranks
    return candidates[destination % len(candidates)]


def _copy(region: Region, held: Block, source: int, wanted: Block, destination: int) -> Copy:
    def offset(block: Block) -> tuple[int, ...]:
        return tuple(
            begin + start - block_start
            for begin, (start, _), (block_start, _) in zip(block.offset, region, block.region, strict=True)
        )

    return Copy(
        wanted.tensor,
        region,
        source,
        held.parameter,
        offset(held),
        destination,
        wanted.parameter,
        offset(wanted),
    )


def split_copy(copy: Copy, limit: int) -> list[Copy]:
    """``copy`` in pieces of at most ``limit`` elements, cut along its first dimension (a single row is never cut)."""
    (start, stop), *rest = copy.region
    rows = max(1, limit // max(1, copy.elements // (stop - start)))
    pieces = []
    for first in range(start, stop, rows):
        shift = first - start
        pieces.append(
            dataclasses.replace(
                copy,
                region=((first, min(first + rows, stop)), *rest),
                source_offset=(copy.source_offset[0] + shift, *copy.source_offset[1:]),
                destination_offset=(copy.destination_offset[0] + shift, *copy.destination_offset[1:]),
            )
        )
    return pieces


def rounds(copies: Sequence[Copy], limit: int) -> list[list[Copy]]:
    """The transfers between ranks in rounds, so that no pair of ranks moves over ``limit`` elements in one.

    Copies within a rank need no round and are left out. Both ends see the same rounds.
    """
    filled: dict[tuple[int, int], tuple[int, int]] = {}  # pair -> (its current round, elements in it)
    result: list[list[Copy]] = []
    remote = (copy for copy in copies if copy.source != copy.destination)
    for piece in itertools.chain.from_iterable(split_copy(copy, limit) for copy in remote):
        pair = (piece.source, piece.destination)
        number, load = filled.get(pair, (0, 0))
        if load and load + piece.elements > limit:
            number, load = number + 1, 0
        filled[pair] = (number, load + piece.elements)
        while len(result) <= number:
            result.append([])
        result[number].append(piece)
    return result


def bytes_received(copies: Sequence[Copy], element_bytes: int) -> dict[int, int]:
    """For each rank the bytes that reach it from others."""
    received: dict[int, int] = defaultdict(int)
    for copy in copies:
        received[copy.destination] += copy.elements * element_bytes * (copy.source != copy.destination)
    return dict(received)
