"""The plan of a regathering for one rank: which rectangles it sends, to whom, and which it receives, from whom.

Pure: it needs what ranks hold and want, and no process group. Every rank plans its own part, and the two ends of a
transfer find the same pieces in the same order without a word to each other.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rlhf_megatron.models.weight_map import Block, Region, layer_of
from rlhf_megatron.regather.sources import share_demand

Shard = Any  # the name of a shard, whatever each side takes for it; hashable


class PlanError(RuntimeError):
    """Sources that do not hold all that the destinations want: a bug of the weight map, never a user's error."""


class Copy(NamedTuple):
    """One rectangle of a Hugging Face tensor, from a window of one rank's parameter to a window of another's."""

    tensor: str
    region: Region
    source: int
    source_parameter: str
    source_offset: tuple[int, ...]
    destination: int
    destination_parameter: str
    destination_offset: tuple[int, ...]
    contiguous: bool  # on both ends, so that it can travel without a buffer

    @property
    def elements(self) -> int:
        """The number of elements that move."""
        return elements(self.region)


class ShardSpec:
    """One end of a regathering: which ranks have which blocks.

    Ranks with the same blocks (data-parallel ones, replicas of a rollout) form a shard. Its blocks are made when they
    are asked for: there are fewer shards than ranks, and a plan looks at one after the other.
    """

    def __init__(
        self,
        shard_of: Mapping[int, Shard],
        blocks_of: Callable[[Shard], Sequence[Block]],
        blocks_in: Callable[[Shard, set[int]], Sequence[Block]] | None = None,
    ) -> None:
        """``shard_of`` names the shard of each rank, ``blocks_of`` gives a shard's blocks, always in one order.

        ``blocks_in`` gives those of some decoder layers and of none, in the same order, where that is less work.
        """
        self.shard_of, self.blocks_of = dict(shard_of), blocks_of
        self.blocks_in = blocks_in or (lambda shard, layers: blocks_of(shard))
        self.ranks: dict[Shard, list[int]] = defaultdict(list)
        for rank in sorted(self.shard_of):
            self.ranks[self.shard_of[rank]].append(rank)

    @classmethod
    def of(cls, blocks: Mapping[int, Sequence[Block]]) -> ShardSpec:
        """From each rank's list of blocks."""
        return cls({rank: rank for rank in blocks}, lambda rank: blocks[rank])

    def blocks(self, rank: int) -> Sequence[Block]:
        """The blocks of ``rank``; none if it is not on this side."""
        return self.blocks_of(self.shard_of[rank]) if rank in self.shard_of else []


@dataclasses.dataclass(frozen=True)
class RankPlan:
    """The transfers of one rank in a regathering; each list is in an order that both ends of a transfer share."""

    rank: int
    sends: list[Copy]
    receives: list[Copy]
    local: list[Copy]

    def without(self, ranks: Collection[int]) -> RankPlan:
        """The plan without transfers to or from these."""
        sends = [copy for copy in self.sends if copy.destination not in ranks]
        receives = [copy for copy in self.receives if copy.source not in ranks]
        return RankPlan(self.rank, sends, receives, self.local)

    def split(self, apart: Callable[[str], bool]) -> tuple[RankPlan, RankPlan]:
        """The plan of all tensors but those that are to be kept ``apart``, by name, and the plan of these."""
        sides = (self.sends, self.receives, self.local)
        usual, others = (
            RankPlan(self.rank, *([copy for copy in side if apart(copy.tensor) == wanted] for side in sides))
            for wanted in (False, True)
        )
        return usual, others

    def bytes_received(self, element_bytes: int) -> int:
        """Bytes that reach this rank from others."""
        return sum(copy.elements for copy in self.receives) * element_bytes

    def bytes_kept(self, element_bytes: int) -> int:
        """Bytes of the destination's weights that this rank has in the end."""
        return self.bytes_received(element_bytes) + sum(copy.elements for copy in self.local) * element_bytes

    def bytes_sent(self, element_bytes: int) -> int:
        """Bytes that others get from this rank."""
        return sum(copy.elements for copy in self.sends) * element_bytes


class _Item(NamedTuple):
    """A rectangle that every rank of a shard wants, and the block of each shard that holds it."""

    region: Region
    holders: Mapping[Shard, Block]
    wanted: Block


_Index = dict[str, dict[Region, dict[Shard, Block]]]
_Holders = tuple[Shard, ...]  # the shards whose ranks hold the same rectangle


def plan_regather(sources: ShardSpec, destinations: ShardSpec, rank: int, ranks_per_node: int = 8) -> RankPlan:
    """Plans what ``rank`` sends, receives and copies within itself, so that every destination gets each element once.

    A destination takes what it holds itself; of the rest it takes a rectangle that several ranks hold from its own
    node if one of them is there, and else from all of them in shares that even out what they send
    (``sources.share_demand``). Raises PlanError where an element that this rank wants is held by nobody.

    Time and memory grow with the model's tensors and the number of shards, hardly with the number of ranks.
    """
    own, wanted = sources.blocks(rank), destinations.blocks(rank)
    index = _index(sources, {block.tensor for block in (*own, *wanted)})
    shares = _Shares(sources, destinations, ranks_per_node)
    receives, local = _receives(index, shares, wanted, rank)
    sends = _sends(index, shares, own, rank)
    return RankPlan(rank, sorted(sends, key=_where_to), sorted(receives, key=_where_to), local)


def _where_to(copy: Copy) -> tuple[str, tuple[int, ...]]:
    return copy.destination_parameter, copy.destination_offset


def _index(sources: ShardSpec, tensors: set[str]) -> _Index:
    """Indexes the shards that hold each rectangle of ``tensors``."""
    index: _Index = defaultdict(dict)
    for shard in sources.ranks:
        for block in sources.blocks_of(shard):
            if block.tensor in tensors:
                index[block.tensor].setdefault(block.region, {}).setdefault(shard, block)
    return index


class _Shares:
    """Shares of sources in destinations, worked out once for all rectangles with the same holders and destinations."""

    def __init__(self, sources: ShardSpec, destinations: ShardSpec, ranks_per_node: int) -> None:
        self.sources, self.destinations, self._ranks_per_node = sources, destinations, ranks_per_node
        self._cache: dict[tuple[_Holders, Shard], dict[int, list[tuple[int, float]]]] = {}

    def of(self, holders: _Holders, shard: Shard) -> dict[int, list[tuple[int, float]]]:
        """Return, for each rank of the destinations' ``shard``, its sources and up to which fraction each serves it."""
        key = (holders, shard)
        if key not in self._cache:
            ranks = sorted(rank for holder in holders for rank in self.sources.ranks[holder])
            self._cache[key] = share_demand(ranks, self.destinations.ranks[shard], self._ranks_per_node)
        return self._cache[key]


def _receives(index: _Index, shares: _Shares, wanted: Sequence[Block], rank: int) -> tuple[list[Copy], list[Copy]]:
    """The copies that ``rank`` gets from others, and those within itself."""
    demand: dict[_Holders, list[_Item]] = defaultdict(list)
    for block in wanted:
        covered = 0
        for region, holders in index.get(block.tensor, {}).items():
            common = intersect(region, block.region)
            if common is not None:
                demand[tuple(holders)].append(_Item(common, holders, block))
                covered += elements(common)
        if covered != elements(block.region):
            raise PlanError(
                f"{block.tensor}{list(block.region)} for rank {rank}: {covered} of {elements(block.region)} elements "
                "have a source"
            )
    receives: list[Copy] = []
    local: list[Copy] = []
    for holders_key, items in demand.items():
        shard_of = shares.sources.shard_of
        if shard_of.get(rank) in holders_key:
            local += [_copy(item, item.holders[shard_of[rank]], item.region, rank, rank) for item in items]
            continue
        takes = shares.of(holders_key, shares.destinations.shard_of[rank])[rank]
        receives += [
            _copy(item, item.holders[shard_of[source]], region, source, rank)
            for source, item, region in _deal(items, takes)
        ]
    return receives, local


def _sends(index: _Index, shares: _Shares, own: Sequence[Block], rank: int) -> Iterator[Copy]:
    """The copies that others get from ``rank``: for each shard of the destinations, the shares that fall to it."""
    mine: dict[str, list[Block]] = defaultdict(list)
    for block in own:
        mine[block.tensor].append(block)
    layers = {layer for tensor in mine if (layer := layer_of(tensor)) is not None}
    for shard in shares.destinations.ranks:
        demand: dict[_Holders, list[_Item]] = defaultdict(list)
        for wanted in shares.destinations.blocks_in(shard, layers):
            for held in mine.get(wanted.tensor, ()):
                common = intersect(held.region, wanted.region)
                if common is not None:
                    holders = index[held.tensor][held.region]
                    demand[tuple(holders)].append(_Item(common, holders, wanted))
        for holders_key, items in demand.items():
            for destination, takes in shares.of(holders_key, shard).items():
                if all(source != rank for source, _ in takes):
                    continue
                for source, item, region in _deal(items, takes):
                    if source == rank:
                        held = item.holders[shares.sources.shard_of[rank]]
                        yield _copy(item, held, region, rank, destination)


def _deal(items: Sequence[_Item], takes: Sequence[tuple[int, float]]) -> Iterator[tuple[int, _Item, Region]]:
    """``items`` end to end, cut between rows into the fractions of ``takes``: (source, item, its part)."""
    if len(takes) == 1:
        yield from ((takes[0][0], item, item.region) for item in items)
        return
    total = sum(elements(item.region) for item in items)
    bounds = [(source, until * total) for source, until in takes]
    turn, position = 0, 0
    for item in items:
        (start, stop), *rest = item.region
        width = elements(item.region) // (stop - start)
        while start < stop:
            source, until = bounds[turn]
            last = turn == len(bounds) - 1
            rows = stop - start if last else min(stop - start, round((until - position) / width))
            if rows <= 0:
                turn += 1
                continue
            yield source, item, ((start, start + rows), *rest)
            start, position = start + rows, position + rows * width


def _copy(item: _Item, held: Block, region: Region, source: int, destination: int) -> Copy:
    wanted = item.wanted
    return Copy(
        wanted.tensor,
        region,
        source,
        held.parameter,
        _offset(held, region),
        destination,
        wanted.parameter,
        _offset(wanted, region),
        # Every block spans the columns of its parameter: parameters are put together from rows alone.
        held.region[1:] == region[1:] == wanted.region[1:],
    )


def _offset(block: Block, region: Region) -> tuple[int, ...]:
    """The offset of ``region`` in the parameter of ``block``."""
    if region == block.region:
        return block.offset
    zipped = zip(block.offset, region, block.region, strict=True)
    return tuple([begin + start - whole_start for begin, (start, _), (whole_start, _) in zipped])


def elements(region: Region) -> int:
    """The number of elements in a rectangle."""
    count = 1
    for start, stop in region:
        count *= stop - start
    return count


def intersect(one: Region, other: Region) -> Region | None:
    """The common rectangle of two, or None."""
    if one == other:
        return one
    common = []
    for (a, b), (c, d) in zip(one, other, strict=True):
        start, stop = a if a > c else c, b if b < d else d
        if start >= stop:
            return None
        common.append((start, stop))
    return tuple(common)


def split_copy(copy: Copy, limit: int) -> list[Copy]:
    """``copy`` in equal pieces of at most ``limit`` elements, cut between rows (a single row is never cut)."""
    (start, stop), *rest = copy.region
    most = max(1, limit // max(1, copy.elements // (stop - start)))  # rows of a piece
    rows = -(-(stop - start) // -(-(stop - start) // most))
    return [
        copy._replace(
            region=((first, min(first + rows, stop)), *rest),
            source_offset=(copy.source_offset[0] + first - start, *copy.source_offset[1:]),
            destination_offset=(copy.destination_offset[0] + first - start, *copy.destination_offset[1:]),
        )
        for first in range(start, stop, rows)
    ]


def rounds(copies: Sequence[Copy], limit: int) -> list[list[Copy]]:
    """The transfers of one pair of ranks, at most ``limit`` elements at a time; both ends find the same rounds.

    A piece above half of ``limit`` goes alone: where it is contiguous it then needs no buffer.
    """
    alone: list[list[Copy]] = []
    together: list[list[Copy]] = []
    load = limit
    for piece in itertools.chain.from_iterable(split_copy(copy, limit) for copy in copies):
        if 2 * piece.elements > limit:
            alone.append([piece])
            continue
        if load + piece.elements > limit:
            together.append([])
            load = 0
        together[-1].append(piece)
        load += piece.elements
    return alone + together
