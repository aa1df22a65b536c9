"""One parquet file, written by others: opened with checks of its footer, and decoded within bounds of memory.

Here: what a file may claim and hold. Not here: many files as one (rows.py), the meaning of columns (column_values.py).

A footer says how many bytes a row group has, but two things make that a lie: a dictionary, of which each row may repeat
a large text for two bytes, and a forged number. So rows are decoded a few at a time, and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.compute
import pyarrow.parquet

from rlhf_megatron.data.media import media_of_schema
from rlhf_megatron.errors import DataError
from rlhf_megatron.untrusted import check_regular, reason_of, shown

# A row group is decoded as a whole, in every rank: so many bytes and rows it may have.
MOST_GROUP_BYTES = 2 * 2**30
MOST_GROUP_ROWS = 2**26
# Of one row, all columns together, and the messages of its prompt. Test cases of programs have tens of megabytes.
MOST_ROW_BYTES = 128 * 2**20
MOST_MESSAGES = 10_000
_MESSAGE_COLUMNS = ("prompt", "messages", "completion", "chosen", "rejected")
# Rows that are decoded before they are counted, and what these may have if all are the longest text of a dictionary.
_COUNTED_ROWS = 256
_COUNTED_BYTES = 512 * 2**20
# A name that rows may repeat without being counted.
_LONGEST_NAME = 1024
# Rows that are plain Python values at the same time.
_PIECE_BYTES = 64 * 2**20

# What pyarrow raises for damaged or odd files and values.
UNREADABLE = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    ArithmeticError,
    RecursionError,
    MemoryError,
    pyarrow.ArrowException,
)


# Top-level columns, or which ones a file needs that has these.
Columns = Sequence[str] | Callable[[Sequence[str]], Sequence[str]]


@dataclass(frozen=True)
class RowLocation:
    """The location of a row: file, and index of the row in that file (from 0)."""

    file: str
    row: int

    def error(self, column: str, problem: str) -> DataError:
        """Return the error for this row: file, row, column, what is wrong and what to do."""
        return DataError(f"{shown(self.file)}, row {self.row}, column {shown(column)}: {problem}")


class RowGroup(NamedTuple):
    """A row group as the footer describes it, of the columns that are read.

    Attributes:
        rows: how many it has.
        size: bytes, uncompressed.
        largest: bytes that a value may have which many rows repeat, about.
    """

    rows: int
    size: int
    largest: int


VERL_COLUMNS = (
    "the columns are verl's: data_source, prompt, reward_model, extra_info (tools/prepare_data.py writes them)"
)


class SourceFile:
    """A parquet file of which some columns are read.

    Attributes:
        name: its path.
        columns: top-level columns that are read.
        row_groups: all of them.
        footer: the bytes that describe all others.
        media: columns of images, videos or sound that are not null in all rows.
    """

    def __init__(self, path: Path, required: Columns, optional: Sequence[str], forms: str = VERL_COLUMNS) -> None:
        """Open the file and check its footer; ``forms`` says, where a column is missing, which ones are read.

        Raises:
            DataError: there is no such file, it is no parquet file, lacks a column or has one twice, or claims a row
                group that is too large.
        """
        self.name = str(path)
        try:
            check_regular(path, DataError)
        except DataError as error:
            raise DataError(f"{error}; make it with tools/prepare_data.py") from error
        try:
            # Not memory-mapped: what is cut off later is an error then, and does not kill the process.
            metadata = pyarrow.parquet.read_metadata(self.name)
            schema = metadata.schema.to_arrow_schema()
            names = list(schema.names)
            # As a dictionary, a name that all rows repeat takes four bytes in each.
            leaves = (metadata.schema.column(index).path for index in range(len(metadata.schema)))
            repeated = [path for path in leaves if path == "data_source"]
            self._file = pyarrow.parquet.ParquetFile(
                self.name, metadata=metadata, read_dictionary=repeated, page_checksum_verification=True
            )
            self.footer = _footer(path)
        except UNREADABLE as error:
            raise self._unreadable(error) from error
        needed = required if isinstance(required, Sequence) else required(names)
        missing = [column for column in needed if column not in names]
        if missing:
            which = f"column{'s' if missing[1:] else ''} {shown(', '.join(missing))}"
            raise DataError(f"{shown(path)}, {which}: missing; the file has {shown(', '.join(names))}; {forms}")
        self.columns = [name for name in dict.fromkeys((*needed, *optional)) if name in names]
        for column in self.columns:
            if names.count(column) > 1:
                raise DataError(f"{shown(path)}, column {shown(column)}: is there twice; leave one out")
        self._check_columns(metadata)
        try:
            self.row_groups = [
                self._row_group(index, metadata.row_group(index)) for index in range(metadata.num_row_groups)
            ]
        except UnicodeDecodeError as error:  # in the name of a column
            raise self._unreadable(error) from error
        self.media = [name for name in media_of_schema(schema) if _has_values(metadata, name)]
        if sum(group.rows for group in self.row_groups) != metadata.num_rows:
            raise DataError(f"{shown(path)}: its footer contradicts itself on the number of rows; make it again")

    @property
    def column_names(self) -> str:
        """All top-level columns of the file, for messages."""
        return shown(", ".join(self._file.schema_arrow.names))

    def decode(self, row_groups: Sequence[int], columns: Sequence[str]) -> pyarrow.Table:
        """Return some row groups.

        Raises:
            DataError: they are damaged, or hold more than the footer may claim.
        """
        if not any(self.row_groups[index].rows for index in row_groups):
            return self._file.read_row_groups(list(row_groups), columns=list(columns), use_threads=False)
        batches, size = [], 0
        for batch in self.batches(row_groups, columns, self._rows_at_once(row_groups)):
            batches.append(batch)
            size += batch.nbytes
            if size > MOST_GROUP_BYTES:
                raise self._too_large(row_groups[0], f"over {MOST_GROUP_BYTES:,} bytes when it is decoded")
        if sum(batch.num_rows for batch in batches) != sum(self.row_groups[index].rows for index in row_groups):
            raise DataError(f"{shown(self.name)}: row group {row_groups[0]} has other rows than its footer claims")
        return pyarrow.Table.from_batches(batches).combine_chunks()

    def batches(self, row_groups: Sequence[int], columns: Sequence[str], rows: int) -> Iterator[pyarrow.RecordBatch]:
        """Yield so many rows at a time, in order.

        Raises:
            DataError: they are damaged.
        """
        try:
            for batch in self._file.iter_batches(rows, list(row_groups), list(columns), use_threads=False):
                yield _counted(batch)
        except UNREADABLE as error:
            first, last = row_groups[0], row_groups[-1]
            where = f"row group {first}" if first == last else f"row groups {first} to {last}"
            raise DataError(
                f"{shown(self.name)}: {where} cannot be decoded ({reason_of(error)}); the file is damaged or was "
                "changed while it is read; make it again"
            ) from error

    def heads(self, count: int) -> list[dict[str, Any]]:
        """Return the first ``count`` rows, without decoding what is behind them. Raises like ``decode``."""
        everything = range(len(self.row_groups))
        rows: list[dict[str, Any]] = []
        batches = self.batches(everything, self.columns, min(count, self._rows_at_once(everything)))
        while len(rows) < count and (batch := next(batches, None)) is not None:
            first = len(rows)
            piece = pyarrow.Table.from_batches([batch]).slice(0, count - first)
            rows += python_rows(piece, lambda row, first=first: RowLocation(self.name, first + row))  # type: ignore[misc]
        return rows

    def _check_columns(self, metadata: Any) -> None:
        """Raise DataError where the footer's description of a column is damaged.

        pyarrow aborts the process when it is asked for such a one by ``RowGroupMetaData.column``; the ranges that it
        finds out before it reads are all checked.
        """
        try:
            with pyarrow.parquet.ParquetFile(self.name, metadata=metadata, pre_buffer=True) as file:
                next(file.iter_batches(1, columns=self.columns, use_threads=False), None)
        except UNREADABLE as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: BaseException) -> DataError:
        is_other = Path(self.name).suffix != ".parquet"
        advice = "convert it with tools/prepare_data.py import" if is_other else "make it again"
        return DataError(f"{shown(self.name)}: not a readable parquet file ({reason_of(error)}); {advice}")

    def _row_group(self, index: int, metadata: Any) -> RowGroup:
        """Check what the footer claims of a row group."""
        chunks = [metadata.column(number) for number in range(metadata.num_columns)]
        wanted = [chunk for chunk in chunks if chunk.path_in_schema.split(".")[0] in self.columns]
        sizes = [chunk.total_uncompressed_size for chunk in wanted]
        if metadata.num_rows < 0 or min(sizes, default=0) < 0:
            raise DataError(f"{shown(self.name)}: row group {index} has a negative size; make it again")
        if metadata.num_rows > MOST_GROUP_ROWS:
            raise self._too_large(index, f"{metadata.num_rows:,} rows")
        if sum(sizes) > MOST_GROUP_BYTES:
            raise self._too_large(index, f"{sum(sizes):,} bytes in the columns that are read")
        return RowGroup(metadata.num_rows, sum(sizes), max(map(_dictionary_bytes, wanted), default=0))

    def _too_large(self, index: int, size: str) -> DataError:
        return DataError(
            f"{shown(self.name)}: row group {index} has {size}; at most {MOST_GROUP_BYTES:,} bytes and "
            f"{MOST_GROUP_ROWS:,} rows are decoded at once; write the file with a smaller row_group_size"
        )

    def _rows_at_once(self, row_groups: Sequence[int]) -> int:
        """Return how many rows may be decoded before their bytes are counted."""
        largest = max((self.row_groups[index].largest for index in row_groups), default=0)
        return min(_COUNTED_ROWS, max(1, _COUNTED_BYTES // max(1, largest)))


def python_rows(table: pyarrow.Table, location_of: Callable[[int], RowLocation]) -> list[dict[str, Any]]:
    """Return rows as plain Python values, by column name.

    Args:
        table: rows.
        location_of: gives the location of a row of the table.

    Raises:
        DataError: a row is too large, or one of its values is damaged, such as text that is not UTF-8.
    """
    if table.nbytes <= MOST_ROW_BYTES and _messages(table) <= MOST_MESSAGES:
        try:
            return list(table.to_pylist())
        except UNREADABLE:
            pass  # the rows one by one say which it is
    return [_python_row(table.slice(row, 1), location_of(row)) for row in range(table.num_rows)]


def pieces(table: pyarrow.Table, rows: int) -> Iterator[tuple[int, pyarrow.Table]]:
    """Yield (first row, part) of at most so many rows each, and fewer where rows are large."""
    for start in range(0, table.num_rows, rows):
        part = table.slice(start, rows)
        if part.num_rows > 1 and part.nbytes > _PIECE_BYTES:
            yield from ((start + first, piece) for first, piece in pieces(part, (part.num_rows + 1) // 2))
        else:
            yield start, part


def _python_row(row: pyarrow.Table, location: RowLocation) -> dict[str, Any]:
    """Return the values of a table of one row."""
    largest = max(row.column_names, key=lambda name: row[name].nbytes)
    if row.nbytes > MOST_ROW_BYTES:
        raise location.error(
            largest, f"the row has {row.nbytes:,} bytes; at most {MOST_ROW_BYTES:,} are read; take it out"
        )
    if (messages := _messages(row)) > MOST_MESSAGES:
        column = max(
            (name for name in _MESSAGE_COLUMNS if name in row.column_names), key=lambda name: _most_items(row[name])
        )
        raise location.error(column, f"has {messages:,} messages; at most {MOST_MESSAGES:,} are read; take it out")
    values = {}
    for name in row.column_names:
        try:
            values[name] = row[name].to_pylist()[0]
        except UNREADABLE as error:
            raise location.error(
                name, f"cannot be read ({reason_of(error)}); write it again, or remove the row"
            ) from error
    return values


def _messages(table: pyarrow.Table) -> int:
    """Return the most messages of a row in one column."""
    return max((_most_items(table[name]) for name in _MESSAGE_COLUMNS if name in table.column_names), default=0)


def _most_items(column: pyarrow.ChunkedArray) -> int:
    """Return the length of the longest list of a column; 0 of one that has none."""
    kind = column.type
    if not (pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind)):
        return 0
    return pyarrow.compute.max(pyarrow.compute.list_value_length(column)).as_py() or 0


def _has_values(metadata: Any, name: str) -> bool:
    """Return whether a top-level column may hold anything but nulls and empty lists, by the footer's statistics."""
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    chunks = [group.column(number) for group in groups for number in range(group.num_columns)]
    for chunk in chunks:
        if chunk.path_in_schema.split(".")[0] == name:
            counts = chunk.statistics
            if counts is None or not counts.has_null_count or counts.num_values:
                return True
    return False


def _counted(batch: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
    """Return rows whose bytes can be counted: without dictionaries, which a file may ask for, but of short names."""
    fields = [
        field if field.name == "data_source" and _longest(column) <= _LONGEST_NAME else _without_dictionaries(field)
        for field, column in zip(batch.schema, batch.columns, strict=True)
    ]
    schema = pyarrow.schema(fields)
    return batch if schema.equals(batch.schema) else batch.cast(schema)


def _longest(column: pyarrow.Array) -> int:
    """Return the length of the longest text of a column that is a dictionary; 0 of another."""
    if not pyarrow.types.is_dictionary(column.type) or not len(column.dictionary):
        return 0
    return pyarrow.compute.max(pyarrow.compute.binary_length(column.dictionary)).as_py() or 0


def _without_dictionaries(field: pyarrow.Field) -> pyarrow.Field:
    kind = field.type
    if pyarrow.types.is_dictionary(kind):
        kind = kind.value_type
    elif pyarrow.types.is_struct(kind):
        kind = pyarrow.struct(list(map(_without_dictionaries, kind)))
    elif pyarrow.types.is_list(kind):
        kind = pyarrow.list_(_without_dictionaries(kind.value_field))
    elif pyarrow.types.is_large_list(kind):
        kind = pyarrow.large_list(_without_dictionaries(kind.value_field))
    return field.with_type(kind)


def _dictionary_bytes(chunk: Any) -> int:
    """Return about how large the dictionary of a column chunk is, uncompressed."""
    if not chunk.has_dictionary_page:
        return 0
    stored = chunk.data_page_offset - (chunk.dictionary_page_offset or chunk.data_page_offset)
    return max(0, stored) * chunk.total_uncompressed_size // max(1, chunk.total_compressed_size)


def _footer(path: Path) -> bytes:
    """Return the footer of a parquet file: its length stands in four bytes before the format's name."""
    ending = 8
    with path.open("rb") as file:
        size = file.seek(-ending, 2) + ending
        length = int.from_bytes(file.read(4), "little")
        file.seek(size - ending - length)
        return file.read(length)
