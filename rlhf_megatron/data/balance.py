"""Dealing items of different cost into bins of equal cost, none over a size: which rows run together.

Dearest first to the emptiest bin (Graham's rule), then exchanges out of the dearest bin while they help. On lognormal
lengths this ends at least as near to the bound as the largest differencing method of Karmarkar and Karp.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence

# Exchanges are tried with so many of the cheapest bins, and so many are made at most for each bin.
_PARTNERS, _EXCHANGES_PER_BIN = 4, 4
# Nor is more tried where the dearest bin is so near to the mean.
_NEAR_ENOUGH = 0.001


def deal(costs: Sequence[float], sizes: Sequence[int], bins: int, limit: int) -> list[list[int]] | None:
    """``bins`` lists of item numbers with about the same sum of ``costs``, each with sizes of at most ``limit`` in sum.

    An item larger than ``limit`` goes alone. None where the items do not fit so. The same input gives the same output.
    """
    dealt: list[list[int]] = [[] for _ in range(bins)]
    filled = [0] * bins
    heap = [(0.0, index) for index in range(bins)]
    for item in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        cost, index = heapq.heappop(heap)
        if dealt[index] and filled[index] + sizes[item] > limit:
            return None
        dealt[index].append(item)
        filled[index] += sizes[item]
        heapq.heappush(heap, (cost + costs[item], index))
    totals = [sum(costs[item] for item in items) for items in dealt]
    goal = (1 + _NEAR_ENOUGH) * sum(totals) / bins
    for _ in range(_EXCHANGES_PER_BIN * bins):
        if max(totals) <= goal or not _exchange(dealt, totals, filled, costs, sizes, limit):
            break
    return [sorted(items) for items in dealt]


def _exchange(
    dealt: list[list[int]],
    totals: list[float],
    filled: list[int],
    costs: Sequence[float],
    sizes: Sequence[int],
    limit: int,
) -> bool:
    """Makes the dearest bin cheaper by the best exchange of an item for a cheaper one or none; whether there is one."""
    high = max(range(len(dealt)), key=totals.__getitem__)
    best, chosen = totals[high] * (1 - 1e-9), None
    for low in heapq.nsmallest(_PARTNERS, range(len(dealt)), key=totals.__getitem__):
        ordered = sorted(dealt[low], key=costs.__getitem__)
        ladder, half = [costs[item] for item in ordered], (totals[high] - totals[low]) / 2
        for given in dealt[high]:
            near = bisect.bisect(ladder, costs[given] - half)  # what would make both bins equal is about there
            for taken in (*ordered[max(0, near - 1) : near + 1], None):
                cost, size = (costs[taken], sizes[taken]) if taken is not None else (0.0, 0)
                moved, grown = costs[given] - cost, sizes[given] - size
                dearer = max(totals[high] - moved, totals[low] + moved)
                fits = filled[high] - grown <= limit and filled[low] + grown <= limit
                if moved > 0 and dearer < best and fits:
                    best, chosen = dearer, (low, given, taken, moved, grown)
    if chosen is None:
        return False
    low, given, taken, moved, grown = chosen
    for index, gone, come, sign in ((high, given, taken, -1), (low, taken, given, 1)):
        if gone is not None:
            dealt[index].remove(gone)
        if come is not None:
            dealt[index].append(come)
        totals[index] += sign * moved
        filled[index] += sign * grown
    return True
