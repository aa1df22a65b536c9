"""The elements that a regathering moves between hosts and within them, for all ranks at once, without their plans."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

from rlhf_megatron.models.rectangles import elements
from rlhf_megatron.regather.demand import grouped, wanted_items
from rlhf_megatron.regather.plan import HostShares, ShardSpec, index_sources
from rlhf_megatron.regather.sources import Leg


def _by_rank() -> defaultdict[int, float]:
    return defaultdict(float)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Elements by rank, as the plans of all ranks have them but for cuts between rows.

    Attributes:
        to_hosts, from_hosts: what a rank sends to other hosts, and receives from them.
        to_mates, from_mates: the same within its host: held there, or forwarded.
        peers: the ranks that each receives from.
        unshared: what a rank would receive from other hosts, were nothing forwarded.
    """

    to_hosts: dict[int, float] = dataclasses.field(default_factory=_by_rank)
    from_hosts: dict[int, float] = dataclasses.field(default_factory=_by_rank)
    to_mates: dict[int, float] = dataclasses.field(default_factory=_by_rank)
    from_mates: dict[int, float] = dataclasses.field(default_factory=_by_rank)
    peers: dict[int, set[int]] = dataclasses.field(default_factory=lambda: defaultdict(set))
    unshared: dict[int, float] = dataclasses.field(default_factory=_by_rank)

    @property
    def between_hosts(self) -> float:
        """Elements that cross from one host to another, of all ranks together."""
        return sum(self.from_hosts.values())

    @property
    def most_received(self) -> float:
        """Elements that reach the rank that receives the most, from wherever."""
        ranks = self.from_hosts.keys() | self.from_mates.keys()
        return max((self.from_hosts.get(rank, 0.0) + self.from_mates.get(rank, 0.0) for rank in ranks), default=0.0)

    @property
    def most_sent(self) -> float:
        """Elements that leave the rank that sends the most, to wherever."""
        ranks = self.to_hosts.keys() | self.to_mates.keys()
        return max((self.to_hosts.get(rank, 0.0) + self.to_mates.get(rank, 0.0) for rank in ranks), default=0.0)

    @property
    def most_between_hosts(self) -> float:
        """Elements that the busiest rank sends to other hosts, or receives from them."""
        return max([0.0, *self.to_hosts.values(), *self.from_hosts.values()])


def host_traffic(sources: ShardSpec, destinations: ShardSpec, hosts: Sequence[int] | int) -> Traffic:
    """Reckon what the plans of all ranks (``plan_regather``) move, in about the time of one plan for each host of a
    replica."""
    shares = HostShares(sources, destinations, hosts)
    tensors = {block.tensor for shard in destinations.ranks for block in destinations.blocks_of(shard)}
    index, traffic = index_sources(sources, tensors), Traffic()
    for mix in shares.mixes:
        wanted = ((shard, destinations.blocks_of(shard)) for shard in mix)
        for (holders, wanting), group in grouped(wanted_items(wanted, lambda tensor: index[tensor].items())).items():
            total = sum(elements(item.region) for item in group)
            near, far = shares.of(holders, wanting, mix)
            for legs in near.values():
                for (source, receiver), amount in _amounts(legs, total):
                    _note(traffic.to_mates, traffic.from_mates, traffic, source, receiver, amount)
            for legs in far.values():
                _forward(traffic, legs, total)
    return traffic


def _amounts(legs: Sequence[tuple[Leg, float]], total: float) -> list[tuple[Leg, float]]:
    befores = [0.0, *(until for _, until in legs)]
    return [(leg, (until - before) * total) for (leg, until), before in zip(legs, befores, strict=False)]


def _forward(traffic: Traffic, legs: Sequence[tuple[Leg, float]], total: float) -> None:
    """Note what reaches a host by ``legs`` and is forwarded there."""
    receivers = {leg.receiver for leg, _ in legs}
    for receiver in receivers:
        traffic.unshared[receiver] += total
    for (source, receiver), amount in _amounts(legs, total):
        _note(traffic.to_hosts, traffic.from_hosts, traffic, source, receiver, amount)
        for mate in receivers - {receiver}:
            _note(traffic.to_mates, traffic.from_mates, traffic, receiver, mate, amount)


def _note(
    sent: dict[int, float], received: dict[int, float], traffic: Traffic, source: int, receiver: int, amount: float
) -> None:
    sent[source] += amount
    received[receiver] += amount
    traffic.peers[receiver].add(source)
