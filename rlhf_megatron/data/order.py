"""The order in which rows are trained on: a pure function of the seed and the position, cheap for data of any size.

Here: epochs in shuffled or file order (``WindowOrder``) or by a column (``CurriculumOrder``), and which part of a
mixture comes next (``Shares``). Every order is the same on all ranks, in every layout and in every version of NumPy:
random bits are the raw ones of PCG64, which NumPy promises never to change (NEP 19), and are sorted by a stable sort.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache

import numpy
from numpy.typing import NDArray

from rlhf_megatron.data.own_rows import Rows as DataRows
from rlhf_megatron.data.rows import Block
from rlhf_megatron.errors import DataError

Rows = NDArray[numpy.int64]

# Names of what is drawn with a seed beside the windows, which are numbered from 0.
_BLOCK_ORDER, _MIXTURE = 0xFFFFFFFF, 0xFFFFFFFE

# 2**64 divided by the golden ratio. Multiples of it, modulo 2**64, are spread as evenly as those of any number.
_GOLDEN = 0x9E3779B97F4A7C15

# Rows that follow each other in a curriculum, for the question whether their blocks fit into memory together.
_STRETCH = 1024


class Order(ABC):
    """Epoch after epoch of the rows 0 .. size - 1: each row once in an epoch."""

    def __init__(self, size: int) -> None:
        self.size = size

    def rows(self, position: int, count: int) -> Rows:
        """Return the rows at ``count`` positions from this one on, counted through all epochs; [count]."""
        pieces, stop = [], position + count
        while position < stop:
            epoch, first = divmod(position, self.size)
            last = min(first + stop - position, self.size)
            pieces.append(self._of_epoch(epoch, first, last))
            position += last - first
        return numpy.concatenate(pieces)

    @abstractmethod
    def _of_epoch(self, epoch: int, first: int, last: int) -> Rows:
        """Return the rows at the places first .. last - 1 of an epoch."""


class WindowOrder(Order):
    """The files' order, or one drawn from the seed that needs no more than a window of the data in memory.

    In each epoch the blocks are drawn in a new order and put into windows of up to ``memory_mb``; the rows of a window
    are shuffled as a whole. Data that fits into one window is shuffled perfectly.
    """

    def __init__(self, blocks: Sequence[Block], memory_mb: int, seed: int, part: int = 0, shuffle: bool = True) -> None:
        super().__init__(sum(block.rows for block in blocks))
        self._blocks, self._memory = blocks, memory_mb * 2**20
        self._seed, self._part, self._shuffle = seed, part, shuffle
        self._windows = lru_cache(maxsize=2)(self._draw_windows)
        self._permutation = lru_cache(maxsize=2)(self._draw_rows)

    def window_starts(self, epoch: int) -> list[int]:
        """Return the places in an epoch at which its windows start, and its length."""
        return self._windows(epoch)[1]

    def _of_epoch(self, epoch: int, first: int, last: int) -> Rows:
        if not self._shuffle:
            return numpy.arange(first, last, dtype=numpy.int64)
        windows, starts = self._windows(epoch)
        pieces = []
        while first < last:
            window = bisect_right(starts, first) - 1
            start, stop = starts[window], min(starts[window + 1], last)
            pieces.append(self._permutation(epoch, window, windows[window])[first - start : stop - start])
            first = stop
        return numpy.concatenate(pieces)

    def _draw_windows(self, epoch: int) -> tuple[list[tuple[int, ...]], list[int]]:
        """Return the blocks of each window of an epoch, and where in the epoch each window starts and the last ends."""
        order = list(range(len(self._blocks)))
        if sum(block.size for block in self._blocks) > self._memory:
            order = _shuffled(len(order), self._seed, epoch, _BLOCK_ORDER, self._part).tolist()
        windows: list[tuple[int, ...]] = []
        gathered: list[int] = []
        size = 0
        for index in order:
            if gathered and size + self._blocks[index].size > self._memory:
                windows.append(tuple(gathered))
                gathered, size = [], 0
            gathered.append(index)
            size += self._blocks[index].size
        windows.append(tuple(gathered))
        rows = (sum(self._blocks[index].rows for index in window) for window in windows)
        return windows, list(itertools.accumulate(rows, initial=0))

    def _draw_rows(self, epoch: int, window: int, indices: tuple[int, ...]) -> Rows:
        """Return the rows of a window in their order."""
        blocks = [self._blocks[index] for index in indices]
        rows = numpy.concatenate([numpy.arange(block.first, block.first + block.rows) for block in blocks])
        return rows[_shuffled(len(rows), self._seed, epoch, window, self._part)]


class CurriculumOrder(Order):
    """The rows of each epoch by a number of theirs, the lowest first; equal ones, or those of a band, shuffled."""

    def __init__(
        self, numbers: NDArray[numpy.float64], seed: int, part: int = 0, bands: int | None = None, shuffle: bool = True
    ) -> None:
        super().__init__(len(numbers))
        self._seed, self._part, self._shuffle = seed, part, shuffle
        self._keys: NDArray[numpy.generic] = numbers
        if bands is not None:
            ranks = numpy.empty(self.size, numpy.int64)
            ranks[numpy.argsort(numbers, kind="stable")] = numpy.arange(self.size)
            self._keys = ranks * bands // self.size
        self._epoch = lru_cache(maxsize=1)(self._draw_epoch)

    def _of_epoch(self, epoch: int, first: int, last: int) -> Rows:
        return self._epoch(epoch)[first:last]

    def _draw_epoch(self, epoch: int) -> Rows:
        rows = _shuffled(self.size, self._seed, epoch, 0, self._part) if self._shuffle else numpy.arange(self.size)
        return rows[numpy.argsort(self._keys[rows], kind="stable")]

    def needed_bytes(self, rows: DataRows) -> int:
        """Return the most that rows which follow each other need of decoded blocks, as ``Block.size`` counts."""
        sizes = numpy.array([block.size for block in rows.blocks])
        owners = rows.block_of(self._epoch(0))
        starts = range(0, self.size, _STRETCH)
        return max(int(sizes[numpy.unique(owners[start : start + _STRETCH])].sum()) for start in starts)


class Shares:
    """The part of a mixture that each prompt of the stream comes from.

    Prompt n belongs to the part in whose interval of [0, 1), as long as its weight, the fractional part of
    offset + n / golden ratio falls. This sequence is equally distributed over every stretch of the stream, up to a few
    prompts, and so is every second, third, ... of it, so that parts do not follow the beat in which replicas take
    prompts (H. Niederreiter, Random Number Generation and Quasi-Monte Carlo Methods, 1992, section 3.1).
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        ends = list(itertools.accumulate(weights))
        self._ends = [int(end / ends[-1] * 2.0**64) for end in ends[:-1]]
        self._offset = int(_bits(1, seed, 0, _MIXTURE)[0])

    def part(self, number: int) -> int:
        """Return the part of prompt ``number``, counted from 0 over the whole run."""
        return bisect_right(self._ends, (self._offset + number * _GOLDEN) % 2**64)


def curriculum_order(
    rows: DataRows,
    column: str,
    descending: bool,
    bands: int | None,
    seed: int,
    part: int,
    shuffle: bool,
    memory_mb: int,
) -> CurriculumOrder:
    """Return the order of rows by a column.

    Raises:
        DataError: a row has no number there, or the order jumps between more blocks than memory holds.
    """
    numbers = rows.numbers(column)
    order = CurriculumOrder(-numbers if descending else numbers, seed, part, bands, shuffle)
    if sum(block.size for block in rows.blocks) > memory_mb * 2**20:
        needed = -(-order.needed_bytes(rows) // 2**20)
        if needed > memory_mb:
            raise DataError(
                f"data.curriculum: rows that follow each other by {column} lie in {needed} MB of row groups, over "
                f"data.shuffle_window_mb={memory_mb}; raise it, or sort the rows of the files by {column}"
            )
    return order


def _bits(count: int, seed: int, epoch: int, what: int, part: int = 0) -> NDArray[numpy.uint64]:
    return numpy.random.PCG64(numpy.random.SeedSequence([seed, epoch, what, part])).random_raw(count)


def _shuffled(count: int, seed: int, epoch: int, what: int, part: int) -> Rows:
    """Return a permutation of 0 .. count - 1."""
    return numpy.argsort(_bits(count, seed, epoch, what, part), kind="stable").astype(numpy.int64)
