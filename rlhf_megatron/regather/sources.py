"""Balances sources where several ranks hold what others want, and the ranks of a host that receive. Arithmetic only."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

_SLIVER = 1e-6  # of one demand: a share below it is an error of rounding


class Leg(NamedTuple):
    """A way from a rank that holds to one that receives, for all of its host where that is another."""

    source: int
    receiver: int


class Shares(NamedTuple):
    """The ways in which one demand is met, each with the fraction up to which it serves; the last fraction is 1.0.

    Attributes:
        near: for each rank with a holder on its host, the legs from there.
        far: for each other host, the legs by which its ranks together get one copy.
    """

    near: dict[int, list[tuple[Leg, float]]]
    far: dict[int, list[tuple[Leg, float]]]


def share_demand(holders: Sequence[int], demanders: Sequence[int], host_of: Callable[[int], int]) -> Shares:
    """Return who serves each of ``demanders`` that is no holder; all want the same, which all ``holders`` have.

    Those with holders on their host are served by these alone, in equal parts. A host without one gets it once, its
    demanders equal parts of it; sources are all holders, in shares that make what they send as even as it can be, like
    water that is poured upon what the near ones take already. Both lists in rising order.
    """
    own = set(holders)
    holders_on: dict[int, list[int]] = defaultdict(list)
    for rank in holders:
        holders_on[host_of(rank)].append(rank)
    near: dict[int, list[int]] = defaultdict(list)
    far: dict[int, list[int]] = defaultdict(list)
    for rank in demanders:
        host = host_of(rank)
        if rank not in own:
            (near if host in holders_on else far)[host].append(rank)
    shares = Shares({}, {})
    load = dict.fromkeys(holders, 0.0)
    for host, ranks in near.items():
        each = len(ranks) / len(holders_on[host])
        laid_out = _lay_out(ranks, [(rank, each) for rank in holders_on[host]])
        shares.near.update({rank: _legs(takes, [rank]) for rank, takes in laid_out.items()})
        load |= dict.fromkeys(holders_on[host], each)
    if far:
        level = _water_level(sorted(load.values()), len(far))
        laid_out = _lay_out(list(far), [(rank, level - load[rank]) for rank in holders if load[rank] < level])
        shares.far.update({host: _legs(takes, far[host]) for host, takes in laid_out.items()})
    return shares


def _legs(takes: Sequence[tuple[int, float]], receivers: Sequence[int]) -> list[tuple[Leg, float]]:
    """Return one host's demand, which sources serve up to these fractions, in equal parts for its ``receivers``."""
    legs: list[tuple[Leg, float]] = []
    before = 0.0
    for number, receiver in enumerate(receivers, start=1):
        end = number / len(receivers)
        for source, until in takes:
            if until > before + _SLIVER and before < end - _SLIVER:
                before = end if until > end - _SLIVER else until
                legs.append((Leg(source, receiver), before))
    return legs


def _water_level(loads: Sequence[float], amount: float) -> float:
    """Return the level to which ``amount`` fills vessels that stand at ``loads``, in rising order."""
    below = 0.0
    for count, load in enumerate(loads, start=1):
        below += load
        level = (amount + below) / count
        if count == len(loads) or level <= loads[count]:
            break
    return level


def _lay_out(demanders: Sequence[int], capacities: Sequence[tuple[int, float]]) -> dict[int, list[tuple[int, float]]]:
    """Lay out demands of 1 each, end to end on a line, cut where the capacities (with the same sum) end."""
    ends = list(itertools.accumulate(capacity for _, capacity in capacities))
    shares: dict[int, list[tuple[int, float]]] = {}
    turn = 0
    for number, demander in enumerate(demanders):
        shares[demander] = []
        while turn < len(ends) - 1 and ends[turn] < number + 1 - _SLIVER:
            if ends[turn] > number + _SLIVER:
                shares[demander].append((capacities[turn][0], ends[turn] - number))
            turn += 1
        shares[demander].append((capacities[turn][0], 1.0))
    return shares
