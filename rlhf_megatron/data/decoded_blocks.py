"""Decoded blocks of rows that stay in memory, counted as the windows of the shuffle count them.

Not here: which rows a block has (rows.py), and the windows (order.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import pyarrow

# Decoded, rows may have so many times what their file's footer says of them: more is a dictionary of which many rows
# repeat the texts, and could be any number.
MOST_EXPANSION = 8


class DecodedBlocks:
    """The blocks that were used last, within a bound of memory.

    A window of the shuffle is chosen by what the footers say, before anything is decoded, and every batch reads from
    all its blocks. So its blocks are kept by the same count: by their decoded size, a window that is a little over the
    bound would be decoded again for every batch.

    Attributes:
        decoded_again: blocks that were decoded once more since a window is far larger than its footers say.
    """

    def __init__(self, memory: int) -> None:
        """Keep at most ``memory`` bytes as footers count, ``MOST_EXPANSION`` times as many decoded, or one block."""
        self._memory = memory
        self._tables: OrderedDict[int, tuple[pyarrow.Table, int]] = OrderedDict()
        self._given_up: set[int] = set()  # for their decoded size
        self.decoded_again = 0

    def get(self, index: int, size: int, decode: Callable[[], pyarrow.Table]) -> pyarrow.Table:
        """Return block ``index``, of ``size`` bytes by the footer; those not used for longest make room for it."""
        if index in self._tables:
            self._tables.move_to_end(index)
            return self._tables[index][0]
        self.decoded_again += index in self._given_up
        self._tables[index] = decode(), size
        while len(self._tables) > 1 and self.stored_bytes > self._memory:
            self._given_up.discard(self._tables.popitem(last=False)[0])
        while len(self._tables) > 1 and self.decoded_bytes > self._memory * MOST_EXPANSION:
            self._given_up.add(self._tables.popitem(last=False)[0])
        return self._tables[index][0]

    @property
    def stored_bytes(self) -> int:
        """Bytes of the blocks in memory, as footers count."""
        return sum(size for _, size in self._tables.values())

    @property
    def decoded_bytes(self) -> int:
        """Bytes that they take."""
        return sum(table.nbytes for table, _ in self._tables.values())
