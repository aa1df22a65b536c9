"""Dealing items of different cost into bins of equal cost, none over a size: which rows run together.

Dearest first to the emptiest bin (Graham's rule), then exchanges out of the dearest bin while they help. On lognormal
lengths this ends at least as near to the bound as the largest differencing method of Karmarkar and Karp.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence

import numpy
from numpy.typing import NDArray

# Exchanges are tried with so many of the cheapest bins, and so many are made at most for each bin.
_PARTNERS, _EXCHANGES_PER_BIN, _MOST_EXCHANGES = 4, 4, 256
# Of so many bins one part is filled at a time, the emptiest, where there are thousands.
_PARTS = 8
# Nor is more tried where the dearest bin is so near to the mean.
_NEAR_ENOUGH = 0.001


def deal(costs: Sequence[float], sizes: Sequence[int], bins: int, limit: int) -> list[list[int]] | None:
    """Return ``bins`` lists of item numbers with about the same sum of ``costs``, each with sizes of at most ``limit``
    in sum.

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
    for _ in range(min(_EXCHANGES_PER_BIN * bins, _MOST_EXCHANGES)):
        if max(totals) <= goal or not _exchange(dealt, totals, filled, costs, sizes, limit):
            break
    return [sorted(items) for items in dealt]


def spread(costs: NDArray[numpy.float64], bins: int) -> NDArray[numpy.int64]:
    """Map [n] -> [n]: the bin of each item, so that all have about the same sum of ``costs``, however many items they
    hold.

    As ``deal`` without a limit. Of more than a few bins an eighth gets an item each at a time, so that the work is
    that of sorting: half a million items over thousands of bins take a tenth of a second.
    """
    bin_of, totals = numpy.zeros(len(costs), dtype=numpy.int64), numpy.zeros(bins)
    order = numpy.argsort(-costs, kind="stable")
    together = max(1, bins // _PARTS)
    for first in range(0, len(order), together):
        items = order[first : first + together]
        emptiest = _lowest(totals, len(items))
        bin_of[items] = emptiest
        totals[emptiest] += costs[items]
    if len(costs) == 0 or totals.max() <= (1 + _NEAR_ENOUGH) * totals.mean():
        return bin_of
    return _exchanged(bin_of, costs, bins)


def _lowest(totals: NDArray[numpy.float64], count: int) -> NDArray[numpy.int64]:
    """Return the ``count`` bins with the lowest totals, rising; of equal ones those that come first."""
    if count == 1:
        return numpy.array([totals.argmin()])
    some = numpy.argpartition(totals, count - 1)[:count]
    some = numpy.flatnonzero(totals <= totals[some].max())
    return some[numpy.argsort(totals[some], kind="stable")][:count]


def _exchanged(bin_of: NDArray[numpy.int64], costs: NDArray[numpy.float64], bins: int) -> NDArray[numpy.int64]:
    """Return the same after exchanges out of the dearest bin, while they help."""
    by_bin = numpy.argsort(bin_of, kind="stable")
    ends = numpy.bincount(bin_of, minlength=bins).cumsum()
    dealt = [part.tolist() for part in numpy.split(by_bin, ends[:-1])]
    as_list = costs.tolist()
    totals = [sum(as_list[item] for item in items) for items in dealt]
    goal, nothing = (1 + _NEAR_ENOUGH) * sum(totals) / bins, [0] * len(as_list)
    for _ in range(min(_EXCHANGES_PER_BIN * bins, _MOST_EXCHANGES)):
        if max(totals) <= goal or not _exchange(dealt, totals, [0] * bins, as_list, nothing, 0):
            break
    exchanged = bin_of.copy()
    for index, items in enumerate(dealt):
        exchanged[items] = index
    return exchanged


def _exchange(
    dealt: list[list[int]],
    totals: list[float],
    filled: list[int],
    costs: Sequence[float],
    sizes: Sequence[int],
    limit: int,
) -> bool:
    """Make the dearest bin cheaper by the best exchange of an item for a cheaper one or none; return whether there is
    one."""
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
