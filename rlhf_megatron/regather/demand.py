"""Demands of the ranks of one host for what others hold: rectangles, in groups, each dealt as a whole."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from rlhf_megatron.models.rectangles import Block, Region, elements, intersect

_T = TypeVar("_T")
Shard = Any  # the name of a shard, whatever each side takes for it; hashable

Shards = tuple[Shard, ...]


class Item(NamedTuple):
    """A rectangle of a tensor, and the block of each shard that holds it, and of each that wants it."""

    tensor: str
    region: Region
    holders: Mapping[Shard, Block]
    wanted: dict[Shard, Block]


Groups = dict[tuple[Shards, Shards], list[Item]]  # by the shards that hold, and those that want


def wanted_items(
    wanted_by: Iterable[tuple[Shard, Sequence[Block]]],
    held: Callable[[str], Iterable[tuple[Region, Mapping[Shard, Block]]]],
    first: Shard | None = None,
) -> list[Item]:
    """Return the rectangles that shards of one host want, of those that ``held`` has of a tensor, each with who wants
    it.

    A shard that wants one twice has two. ``first``: the first of the shards; only what it wants counts.
    """
    by_part: dict[tuple[str, Region, int], Item] = {}
    for shard, blocks in wanted_by:
        adds = first in (None, shard)
        for block in blocks:
            for region, holders in held(block.tensor):
                common = intersect(region, block.region)
                if common is None:
                    continue
                number = 0
                while (item := by_part.get((block.tensor, common, number))) is not None and shard in item.wanted:
                    number += 1
                if item is not None:
                    item.wanted[shard] = block
                elif adds:
                    by_part[block.tensor, common, number] = Item(block.tensor, common, holders, {shard: block})
    return [item for item in by_part.values() if first is None or first in item.wanted]


def touching(wanted: Sequence[Block], blocks: Iterable[Block]) -> list[Block]:
    """Return those of ``blocks`` whose rows and columns are not all beside those of ``wanted``; quicker than to
    intersect."""
    bounds: dict[str, tuple[int, int, int, int]] = {}
    for block in wanted:
        (top, bottom), (left, right) = _ends(block.region)
        at = bounds.get(block.tensor)
        if at is not None:
            top, bottom, left, right = min(at[0], top), max(at[1], bottom), min(at[2], left), max(at[3], right)
        bounds[block.tensor] = top, bottom, left, right
    candidates = []
    for block in blocks:
        near = bounds.get(block.tensor)
        if near is not None:
            (top, bottom), (left, right) = _ends(block.region)
            if top < near[1] and bottom > near[0] and left < near[3] and right > near[2]:
                candidates.append(block)
    return candidates


def _ends(region: Region) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return rows and columns of a rectangle; a single number is in the first of each."""
    return (region[0], region[-1]) if region else ((0, 1), (0, 1))


def grouped(items: Iterable[Item]) -> Groups:
    """Return items by the shards that hold and want them, each group in an order that all ranks find."""
    groups: Groups = defaultdict(list)
    for item in items:
        groups[tuple(item.holders), tuple(sorted(item.wanted))].append(item)
    for group in groups.values():
        group.sort(key=operator.itemgetter(0, 1))
    return groups


def deal(items: Sequence[Item], takes: Sequence[tuple[_T, float]]) -> Iterator[tuple[_T, Item, Region]]:
    """Yield ``items`` end to end, cut between rows into the fractions of ``takes``: (whose it is, item, its part)."""
    if len(takes) == 1:
        yield from ((takes[0][0], item, item.region) for item in items)
        return
    total = sum(elements(item.region) for item in items)
    bounds = [(whose, until * total) for whose, until in takes]
    turn, position = 0, 0
    for item in items:
        if not item.region:  # a single number
            yield bounds[turn][0], item, ()
            position += 1
            continue
        (start, stop), *rest = item.region
        width = elements(item.region) // (stop - start)
        while start < stop:
            whose, until = bounds[turn]
            last = turn == len(bounds) - 1
            rows = stop - start if last else min(stop - start, round((until - position) / width))
            if rows <= 0:
                turn += 1
                continue
            yield whose, item, ((start, start + rows), *rest)
            start, position = start + rows, position + rows * width
