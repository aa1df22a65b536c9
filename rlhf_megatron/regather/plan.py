"""The plan of a regathering for one rank: which rectangles it sends, to whom, and which it receives, from whom.

Pure: it needs what ranks hold and want, and no process group. Every rank plans its own part, and the two ends of a
transfer find the same pieces in the same order without a word to each other.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from rlhf_megatron.garbage_collection import without_garbage_collection
from rlhf_megatron.models.rectangles import elements, intersect
from rlhf_megatron.models.weight_map import Block, Region
from rlhf_megatron.regather.demand import Item, Shard, Shards, deal, grouped, touching, wanted_items
from rlhf_megatron.regather.sources import Shares, share_demand


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

    Ranks with the same blocks (data-parallel ones, replicas of a rollout) form a shard, of which there are fewer than
    ranks. Its blocks are made once, when they are first asked for: a plan needs most of them more than once.
    """

    def __init__(self, shard_of: Mapping[int, Shard], blocks_of: Callable[[Shard], Sequence[Block]]) -> None:
        """Set up; ``shard_of`` names the shard of each rank, ``blocks_of`` gives a shard's blocks, always in one
        order."""
        self.shard_of, self.blocks_of = dict(shard_of), functools.cache(blocks_of)
        self.ranks: dict[Shard, list[int]] = defaultdict(list)
        for rank in sorted(self.shard_of):
            self.ranks[self.shard_of[rank]].append(rank)

    @classmethod
    def of(cls, blocks: Mapping[int, Sequence[Block]]) -> ShardSpec:
        """Make it from each rank's list of blocks."""
        return cls({rank: rank for rank in blocks}, lambda rank: blocks[rank])

    def blocks(self, rank: int) -> Sequence[Block]:
        """Return the blocks of ``rank``; none if it is not on this side."""
        return self.blocks_of(self.shard_of[rank]) if rank in self.shard_of else []


@dataclasses.dataclass(frozen=True)
class RankPlan:
    """The transfers of one rank in a regathering; each list is in an order that both ends of a transfer share.

    Attributes:
        sends: from this rank's source parameters to others' destination parameters.
        receives: the other way.
        local: within the rank.
        forwards: from this rank's destination parameters, where ``receives`` have filled them, to others of its host.
        forwarded: the other way.
    """

    rank: int
    sends: list[Copy]
    receives: list[Copy]
    local: list[Copy]
    forwards: list[Copy] = dataclasses.field(default_factory=list)
    forwarded: list[Copy] = dataclasses.field(default_factory=list)

    @property
    def arriving(self) -> list[Copy]:
        """All that reaches this rank from others."""
        return [*self.receives, *self.forwarded]

    @property
    def leaving(self) -> list[Copy]:
        """All that others get from this rank."""
        return [*self.sends, *self.forwards]

    @property
    def forwarding(self) -> RankPlan:
        """The second part as a plan of its own, from destination parameters to destination parameters."""
        return RankPlan(self.rank, self.forwards, self.forwarded, [])

    def without(self, ranks: Collection[int]) -> RankPlan:
        """Return the plan without what goes to or comes from the sources of these; what is forwarded stays."""
        sends = [copy for copy in self.sends if copy.destination not in ranks]
        receives = [copy for copy in self.receives if copy.source not in ranks]
        return dataclasses.replace(self, sends=sends, receives=receives)

    def split(self, apart: Callable[[str], bool]) -> tuple[RankPlan, RankPlan]:
        """Return the plan of all tensors but those that are to be kept ``apart``, by name, and the plan of these."""
        sides = (self.sends, self.receives, self.local, self.forwards, self.forwarded)
        usual, others = (
            RankPlan(self.rank, *([copy for copy in side if apart(copy.tensor) == wanted] for side in sides))
            for wanted in (False, True)
        )
        return usual, others

    def bytes_received(self, element_bytes: int) -> int:
        """Return bytes that reach this rank from others."""
        return sum(copy.elements for copy in self.arriving) * element_bytes

    def bytes_kept(self, element_bytes: int) -> int:
        """Return bytes of the destination's weights that this rank has in the end."""
        return self.bytes_received(element_bytes) + sum(copy.elements for copy in self.local) * element_bytes

    def bytes_sent(self, element_bytes: int) -> int:
        """Return bytes that others get from this rank."""
        return sum(copy.elements for copy in self.leaving) * element_bytes


Index = dict[str, dict[Region, dict[Shard, Block]]]


@without_garbage_collection()
def plan_regather(sources: ShardSpec, destinations: ShardSpec, rank: int, hosts: Sequence[int] | int = 8) -> RankPlan:
    """Plan what ``rank`` sends, receives and copies within itself, so that every destination gets each element once.

    ``hosts``: the host of each rank, or how many ranks each has. A destination takes what it holds itself, and the rest
    from ranks of its host where one holds it. What none there holds reaches a host once: of a rectangle that k of its
    ranks want, each receives 1/k from all ranks that hold it, in shares that even out what they send
    (``sources.share_demand``), and forwards it to the others. Raises PlanError where an element that this rank wants is
    held by nobody.

    Time and memory grow with the model's tensors and the number of shards, hardly with the number of ranks.
    """
    own, wanted = sources.blocks(rank), destinations.blocks(rank)
    index = index_sources(sources, {block.tensor for block in (*own, *wanted)})
    shares = HostShares(sources, destinations, hosts)
    sides = (_sends(index, shares, own, rank), *_receives(index, shares, wanted, rank))
    sends, receives, local, forwards, forwarded = (sorted(side, key=_where_to) for side in sides)
    return RankPlan(rank, sends, receives, local, forwards, forwarded)


def _where_to(copy: Copy) -> tuple[str, tuple[int, ...]]:
    return copy.destination_parameter, copy.destination_offset


def index_sources(sources: ShardSpec, tensors: set[str]) -> Index:
    """Index the shards that hold each rectangle of ``tensors``."""
    index: Index = defaultdict(dict)
    for shard in sources.ranks:
        for block in sources.blocks_of(shard):
            if block.tensor in tensors:
                index[block.tensor].setdefault(block.region, {}).setdefault(shard, block)
    return index


def host_function(hosts: Sequence[int] | int) -> Callable[[int], int]:
    """Return the host of a rank, from that of each or from how many ranks each host has."""
    return (lambda rank: rank // hosts) if isinstance(hosts, int) else hosts.__getitem__


class HostShares:
    """Shares of sources in destinations, worked out once for all rectangles that the same shards hold and want."""

    def __init__(self, sources: ShardSpec, destinations: ShardSpec, hosts: Sequence[int] | int) -> None:
        self.sources, self.destinations = sources, destinations
        self.host_of = host_function(hosts)
        self.ranks_on: dict[int, list[int]] = defaultdict(list)
        for rank in sorted(destinations.shard_of):
            self.ranks_on[self.host_of(rank)].append(rank)
        self._hosts_with: dict[Shards, list[int]] = defaultdict(list)
        for host in self.ranks_on:
            self._hosts_with[self.shards_on(host)].append(host)
        self._cache: dict[tuple[Shards, Shards, Shards], Shares] = {}

    @property
    def mixes(self) -> list[Shards]:
        """The sets of the destinations' shards that hosts have."""
        return list(self._hosts_with)

    def shards_on(self, host: int) -> Shards:
        """Return the destinations' shards that a host has."""
        return tuple(sorted({self.destinations.shard_of[rank] for rank in self.ranks_on[host]}))

    def of(self, holders: Shards, wanting: Shards, mix: Shards) -> Shares:
        """Return who serves the ranks of the shards ``wanting`` on all hosts that have the shards ``mix``."""
        key = (holders, wanting, mix)
        if key not in self._cache:
            ranks = sorted(rank for holder in holders for rank in self.sources.ranks[holder])
            hosts = set(self._hosts_with[mix])
            demanders = [rank for shard in wanting for rank in self.destinations.ranks[shard]]
            here = sorted(rank for rank in demanders if self.host_of(rank) in hosts)
            self._cache[key] = share_demand(ranks, here, self.host_of)
        return self._cache[key]


def _receives(
    index: Index, shares: HostShares, wanted: Sequence[Block], rank: int
) -> tuple[list[Copy], list[Copy], list[Copy], list[Copy]]:
    """Return the copies that ``rank`` receives, makes within itself, forwards and is forwarded."""
    receives: list[Copy] = []
    local: list[Copy] = []
    forwards: list[Copy] = []
    forwarded: list[Copy] = []
    if not wanted:
        return receives, local, forwards, forwarded
    _check_sources(index, wanted, rank)
    held_by, wanted_by = shares.sources.shard_of, shares.destinations.shard_of
    own, host = wanted_by[rank], shares.host_of(rank)
    mix = shares.shards_on(host)
    of_mates = ((shard, touching(wanted, shares.destinations.blocks_of(shard))) for shard in mix if shard != own)
    items = wanted_items(itertools.chain([(own, wanted)], of_mates), lambda tensor: index.get(tensor, {}).items(), own)
    for (holders, wanting), group in grouped(items).items():
        if held_by.get(rank) in holders:
            local += [
                _copy(item, item.region, rank, item.holders[held_by[rank]], rank, item.wanted[own]) for item in group
            ]
            continue
        near, far = shares.of(holders, wanting, mix)
        legs = near[rank] if rank in near else far[host]
        mates = sorted({leg.receiver for leg, _ in legs} - {rank})
        for (source, receiver), item, region in deal(group, legs):
            at_receiver = item.wanted[wanted_by[receiver]]
            if receiver != rank:
                forwarded.append(_copy(item, region, receiver, at_receiver, rank, item.wanted[own]))
                continue
            receives.append(_copy(item, region, source, item.holders[held_by[source]], rank, at_receiver))
            forwards += [_copy(item, region, rank, at_receiver, mate, item.wanted[wanted_by[mate]]) for mate in mates]
    return receives, local, forwards, forwarded


def _check_sources(index: Index, wanted: Sequence[Block], rank: int) -> None:
    """Raise PlanError where an element of ``wanted`` is held by nobody."""
    for block in wanted:
        covered = 0
        for region in index.get(block.tensor, ()):
            common = intersect(region, block.region)
            if common is not None:
                covered += elements(common)
        if covered != elements(block.region):
            raise PlanError(
                f"{block.tensor}{list(block.region)} for rank {rank}: {covered} of {elements(block.region)} elements "
                "have a source"
            )


def _sends(index: Index, shares: HostShares, own: Sequence[Block], rank: int) -> Iterator[Copy]:
    """Yield the copies that others get from ``rank``: for each set of shards on a host, the shares that fall to it."""
    mine: dict[str, list[Block]] = defaultdict(list)
    for block in own:
        mine[block.tensor].append(block)
    held_by, wanted_by = shares.sources.shard_of, shares.destinations.shard_of

    def held(tensor: str) -> list[tuple[Region, Mapping[Shard, Block]]]:
        return [(block.region, index[tensor][block.region]) for block in mine.get(tensor, ())]

    for mix in shares.mixes:
        wanted = ((shard, shares.destinations.blocks_of(shard)) for shard in mix)
        for (holders, wanting), group in grouped(wanted_items(wanted, held)).items():
            near, far = shares.of(holders, wanting, mix)
            for legs in (*near.values(), *far.values()):
                if all(leg.source != rank for leg, _ in legs):
                    continue
                for (source, receiver), item, region in deal(group, legs):
                    if source == rank:
                        at_receiver = item.wanted[wanted_by[receiver]]
                        yield _copy(item, region, rank, item.holders[held_by[rank]], receiver, at_receiver)


def _copy(item: Item, region: Region, source: int, held: Block, destination: int, wanted: Block) -> Copy:
    return Copy(
        item.tensor,
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
    """Return the offset of ``region`` in the parameter of ``block``."""
    if region == block.region:
        return block.offset
    zipped = zip(block.offset, region, block.region, strict=True)
    return tuple([begin + start - whole_start for begin, (start, _), (whole_start, _) in zipped])
