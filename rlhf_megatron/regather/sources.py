"""Balances sources where several ranks hold what others want. Arithmetic only."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

_SLIVER = 1e-6  # of one rank's demand: a share below it is an error of rounding


def share_demand(
    holders: Sequence[int], demanders: Sequence[int], ranks_per_node: int
) -> dict[int, list[tuple[int, float]]]:
    """Return, for each of ``demanders`` that is no holder, (source, up to which fraction of its demand); the last 1.0.

    All demanders want the same amount of what all ``holders`` have. Those with holders on their node are served by
    these alone, in equal parts. The rest is spread over all holders so that what they send becomes as even as it can,
    like water that is poured upon what the near ones take already. Both lists in rising order.
    """
    own = set(holders)
    holders_on: dict[int, list[int]] = defaultdict(list)
    for rank in holders:
        holders_on[rank // ranks_per_node].append(rank)
    near: dict[int, list[int]] = defaultdict(list)
    far: list[int] = []
    for rank in demanders:
        node = rank // ranks_per_node
        if rank not in own:
            (near[node] if node in holders_on else far).append(rank)
    shares: dict[int, list[tuple[int, float]]] = {}
    load = dict.fromkeys(holders, 0.0)
    for node, ranks in near.items():
        each = len(ranks) / len(holders_on[node])
        shares |= _lay_out(ranks, [(rank, each) for rank in holders_on[node]])
        load |= dict.fromkeys(holders_on[node], each)
    if far:
        level = _water_level(sorted(load.values()), len(far))
        shares |= _lay_out(far, [(rank, level - load[rank]) for rank in holders if load[rank] < level])
    return shares


def _water_level(loads: Sequence[float], amount: float) -> float:
    """The level to which ``amount`` fills vessels that stand at ``loads``, in rising order."""
    below = 0.0
    for count, load in enumerate(loads, start=1):
        below += load
        level = (amount + below) / count
        if count == len(loads) or level <= loads[count]:
            break
    return level


def _lay_out(demanders: Sequence[int], capacities: Sequence[tuple[int, float]]) -> dict[int, list[tuple[int, float]]]:
    """Demands of 1 each, end to end on a line, cut where the capacities (with the same sum) end."""
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
