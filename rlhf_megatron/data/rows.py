"""Rows of parquet files: many files as one, found by row group.

Not here: what one file may claim and hold (parquet.py), the meaning of columns (column_values.py), tokens and lengths
(prompts.py) and the order of training (order.py).
"""

from __future__ import annotations

import hashlib
import os
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.compute
from numpy.typing import NDArray

from rlhf_megatron.data.decoded_blocks import DecodedBlocks
from rlhf_megatron.data.parquet import UNREADABLE, VERL_COLUMNS, Columns, RowLocation, SourceFile, pieces, python_rows
from rlhf_megatron.errors import DataError
from rlhf_megatron.untrusted import reason_of, shown

# Row groups of a file that follow each other are decoded together up to this size, and up to this part of the memory:
# many small ones cost more time.
BLOCK_BYTES = 8 * 2**20
BLOCKS_IN_MEMORY = 16
DEFAULT_MEMORY_MB = 128


@dataclass(frozen=True)
class Block:
    """Row groups that are decoded together.

    Attributes:
        file: index of their file.
        row_groups: their numbers within it.
        first: their first row, numbered through all files.
        rows: how many they hold.
        size: bytes of the columns that are read, uncompressed, by the file's footer.
    """

    file: int
    row_groups: range
    first: int
    rows: int
    size: int


class ParquetRows:
    """Random access to the rows of several parquet files; opening reads nothing but their footers.

    Only the named columns are decoded, so images or other payload beside them cost nothing. Decoded blocks stay in
    memory as long as there is room. Safe to share between threads.

    Attributes:
        blocks: what is decoded at once, in the order of the rows.
        digest: of all footers, which tell sizes and extremes of every column: other data has another one.
        row_bytes: of a row, on average of the block with the largest ones, as far as blocks have been decoded.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        required: Columns,
        optional: Sequence[str] = (),
        memory_mb: int = DEFAULT_MEMORY_MB,
        forms: str = VERL_COLUMNS,
    ) -> None:
        """Read the files' footers.

        Args:
            files: parquet files; rows are numbered through all of them in this order.
            required: top-level columns that every file must have, or a function of a file's columns that names them.
            optional: top-level columns that are read where they exist.
            memory_mb: how much of the decoded blocks is kept, at least one block.
            forms: says, where a column is missing, which ones are read.

        Raises:
            DataError: no file, a file that cannot be read or is named twice, no rows, or a missing column.
        """
        if not files:
            raise DataError("no data files are given; set data.train_files (or data.validation_files)")
        self._files: list[SourceFile] = []
        self._file_starts: list[int] = []
        self._length = 0
        self.blocks: list[Block] = []
        self._memory = memory_mb * 2**20
        digest = hashlib.blake2b(digest_size=16)
        named: dict[tuple[int, int], str | Path] = {}
        for path in files:
            file = SourceFile(Path(path), required, optional, forms)
            status = os.stat(path)
            same = named.setdefault((status.st_dev, status.st_ino), path)
            if len(named) == len(self._files):
                twice = "twice" if same == path else f"twice, also as {shown(same)}"
                raise DataError(f"{shown(path)}: is named {twice}; name it once (data.mixture gives files a weight)")
            self._file_starts.append(self._length)
            self._add_blocks(file)
            self._files.append(file)
            digest.update(file.footer)
        self.digest = digest.hexdigest()
        if self._length == 0:
            raise DataError(f"{shown(', '.join(self.files))}: no rows; check the step that wrote the data")
        self.row_bytes = max(block.size / max(1, block.rows) for block in self.blocks)
        self._block_starts = numpy.array([block.first for block in self.blocks], numpy.int64)
        self._decoded = DecodedBlocks(self._memory)
        self._lock = threading.RLock()

    def __len__(self) -> int:
        """Return the number of rows of all files."""
        return self._length

    def refuse_media(self) -> None:
        """Raise DataError where a file has images, videos or sound: a model of text would be asked about them."""
        for file in self._files:
            if file.media:
                raise DataError(
                    f"{shown(file.name)}, column {file.media[0]}: only models of text are trained, which "
                    "cannot see it; give data without it, or set data.images: drop to learn from the text alone"
                )

    @property
    def decoded_again(self) -> int:
        """Blocks that were decoded once more, since a window takes far more memory than its footers say."""
        return self._decoded.decoded_again

    @property
    def files(self) -> list[str]:
        """The files' names."""
        return [file.name for file in self._files]

    def location(self, row: int) -> RowLocation:
        """Return file and row within it, for a row numbered through all files."""
        index = bisect_right(self._file_starts, row) - 1
        return RowLocation(self._files[index].name, row - self._file_starts[index])

    def read(self, row: int) -> dict[str, Any]:
        """Return one row as plain Python values, by column name."""
        return self.take([row])[0]

    def take(self, rows: Sequence[int] | NDArray[numpy.int64]) -> list[dict[str, Any]]:
        """Return rows, in this order, as plain Python values by column name; each block is decoded once."""
        wanted = numpy.asarray(rows, numpy.int64)
        owners = self.block_of(wanted)
        results: list[dict[str, Any]] = [{}] * len(wanted)
        for index in numpy.unique(owners).tolist():
            where = numpy.flatnonzero(owners == index)
            part = self._block(index).take(pyarrow.array(wanted[where] - self.blocks[index].first))
            numbers = wanted[where]
            values = python_rows(part, lambda row, numbers=numbers: self.location(int(numbers[row])))  # type: ignore[misc]
            for position, row in zip(where.tolist(), values, strict=True):
                results[position] = row
        return results

    def block_of(self, rows: NDArray[numpy.int64]) -> NDArray[numpy.int64]:
        """Return the index of the block that each row lies in."""
        return numpy.searchsorted(self._block_starts, rows, side="right") - 1

    def scan(
        self, columns: Sequence[str] | None = None, chunk: int = 1024
    ) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """Yield (first row, rows) of at most ``chunk`` rows at a time in file order; ``columns`` default to all
        named."""
        for block in self.blocks:
            names = self._files[block.file].columns
            table = self._decode(block, names if columns is None else [name for name in columns if name in names])
            for start, piece in pieces(table, chunk):
                first = block.first + start
                yield first, python_rows(piece, lambda row, first=first: self.location(first + row))  # type: ignore[misc]

    def heads(self, count: int) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """Yield (first row, rows) of the first ``count`` rows of each file, without decoding what is behind them."""
        for file, first in zip(self._files, self._file_starts, strict=True):
            with self._lock:
                rows = file.heads(count)
            yield first, rows

    def distinct(self, column: str) -> Iterator[tuple[int, Any]]:
        """Yield (a row of its block, value) of the different values of a top-level column in each block."""
        for block in self.blocks:
            if column in self._files[block.file].columns:
                values = self._decode(block, [column])[column]
                try:
                    different = values.unique().to_pylist()
                except UNREADABLE as error:
                    raise self.location(block.first).error(column, f"cannot be read ({reason_of(error)})") from error
                yield from ((block.first, value) for value in different)

    def numbers(self, column: str) -> NDArray[numpy.float64]:
        """Return a column of numbers, or a field of a struct (a dotted path), of all rows.

        Raises:
            DataError: a file has no such column, it holds no numbers, or a row has none or no finite one.
        """
        parts = [self._numbers_of(block, column) for block in self.blocks]
        values = numpy.concatenate(parts)
        bad = numpy.flatnonzero(~numpy.isfinite(values))
        if len(bad):
            raise self.location(int(bad[0])).error(
                column, f"no finite number, and {len(bad)} rows in all have none; write one, or remove them"
            )
        return values

    def _numbers_of(self, block: Block, column: str) -> NDArray[numpy.float64]:
        file = self._files[block.file]
        where = f"{shown(file.name)}, column {shown(column)}"
        try:
            values: Any = self._decode(block, [column])
            top, *inner = [column] if column in values.column_names else column.split(".")
            values = values[top]
            for name in inner:
                values = pyarrow.compute.struct_field(values, name)
        except (KeyError, pyarrow.ArrowException) as error:
            raise DataError(f"{where}: missing; the file has {file.column_names}") from error
        kind = values.type
        if not (pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind) or pyarrow.types.is_decimal(kind)):
            raise DataError(f"{where}: {kind} instead of numbers; name a column of numbers")
        # Null becomes NaN, and a whole number beyond 2^53 its neighbour.
        floats: NDArray[numpy.float64] = values.cast(pyarrow.float64(), safe=False).to_numpy()
        return floats

    def _add_blocks(self, file: SourceFile) -> None:
        """Index the rows of one more file, and put its row groups together."""
        enough = min(BLOCK_BYTES, self._memory // BLOCKS_IN_MEMORY)
        start, rows, size = 0, 0, 0
        for index, group in enumerate(file.row_groups):
            rows += group.rows
            size += group.size
            if size >= enough or index == len(file.row_groups) - 1:
                self.blocks.append(Block(len(self._files), range(start, index + 1), self._length, rows, size))
                self._length += rows
                start, rows, size = index + 1, 0, 0

    def _block(self, index: int) -> pyarrow.Table:
        """Return a decoded block from memory or the file."""
        block = self.blocks[index]
        with self._lock:
            return self._decoded.get(index, block.size, lambda: self._decode(block, self._files[block.file].columns))

    def _decode(self, block: Block, columns: Sequence[str]) -> pyarrow.Table:
        with self._lock:
            table = self._files[block.file].decode(block.row_groups, columns)
            self.row_bytes = max(self.row_bytes, table.nbytes / max(1, table.num_rows))
            return table
