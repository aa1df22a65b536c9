"""Cuts the transfers of two ranks into pieces and rounds that fit buffers; both ends find the same."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rlhf_megatron.regather.plan import Copy


def split_copy(copy: Copy, limit: int) -> list[Copy]:
    """Return ``copy`` in equal pieces of at most ``limit`` elements, cut between rows (a single row is never cut)."""
    if not copy.region:  # a single number
        return [copy]
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
    """Return the transfers of one pair of ranks, at most ``limit`` elements at a time; both ends find the same rounds.

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
