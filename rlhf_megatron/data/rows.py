"""Rows of parquet files with verl's columns: found by row group, checked one by one.

Here: many files as one, and the meaning of columns. Not here: what one file may claim and hold (parquet.py), tokens and
lengths (prompts.py) and the order of training (order.py).

Columns: data_source (text), prompt (list of {role, content}), ability (not read), reward_model ({style, ground_truth}),
extra_info (any struct, optional).
"""

from __future__ import annotations

import hashlib
import json
import math
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
from rlhf_megatron.data.parquet import (
    MOST_MESSAGES,
    UNREADABLE,
    Columns,
    RowLocation,
    SourceFile,
    pieces,
    python_rows,
)
from rlhf_megatron.errors import DataError
from rlhf_megatron.untrusted import reason_of, shown

__all__ = ["Block", "Message", "ParquetRows", "RowLocation"]

Message = dict[str, Any]

# Row groups of a file that follow each other are decoded together up to this size, and up to this part of the memory:
# many small ones cost more time.
BLOCK_BYTES = 8 * 2**20
BLOCKS_IN_MEMORY = 16
DEFAULT_MEMORY_MB = 128
# Characters of a role or a data source.
MOST_NAME = 200
# Of a pair's margin, either way: scores of reward models are some units apart.
MOST_MARGIN = 1e6


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
    ) -> None:
        """Read the files' footers.

        Args:
            files: parquet files; rows are numbered through all of them in this order.
            required: top-level columns that every file must have, or a function of a file's columns that names them.
            optional: top-level columns that are read where they exist.
            memory_mb: how much of the decoded blocks is kept, at least one block.

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
            file = SourceFile(Path(path), required, optional)
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
        """Yield (first row, rows) of at most `chunk` rows at a time in file order; `columns` default to all named."""
        for block in self.blocks:
            names = self._files[block.file].columns
            table = self._decode(block, names if columns is None else [name for name in columns if name in names])
            for start, piece in pieces(table, chunk):
                first = block.first + start
                yield first, python_rows(piece, lambda row, first=first: self.location(first + row))  # type: ignore[misc]

    def heads(self, count: int) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """Yield (first row, rows) of the first `count` rows of each file, without decoding what is behind them."""
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
        """Number the rows of one more file, and put its row groups together."""
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


def parse_messages(value: Any, location: RowLocation) -> list[Message]:
    """Return a row's prompt as messages with `role` and `content`; fields that are null are left out.

    Parquet gives each tool call the arguments of all others as nulls, so these go at any depth.

    Raises:
        DataError: the prompt is empty, ends with an answer, or is no list of {role, content} with text in both.
    """
    messages = parse_turns(value, "prompt", location)
    if messages[-1]["role"] == "assistant":
        raise location.error("prompt", "the last message is the assistant's; its turn must come next, so take that out")
    if not any(message["content"].strip() for message in messages):
        raise location.error("prompt", "every message is empty; give a question, or remove the row")
    return messages


def parse_turns(value: Any, column: str, location: RowLocation) -> list[Message]:
    """Return the messages of any column, whoever has the last turn; see `parse_messages`.

    A message that calls tools may lack content.
    """
    if value is None or (isinstance(value, (list, str)) and not value):
        raise location.error(column, "empty; give at least one message, or remove the row")
    if not isinstance(value, list):
        raise location.error(
            column,
            f"{type(value).__name__} instead of a list of {{role, content}}; wrap the text as one user message",
        )
    if len(value) > MOST_MESSAGES:
        raise location.error(column, f"has {len(value):,} messages; at most {MOST_MESSAGES:,} are read; take it out")
    return [_message(message, index, column, location) for index, message in enumerate(value)]


def _message(message: Any, index: int, column: str, location: RowLocation) -> Message:
    """Return a message as a template takes it; raises DataError."""
    if not isinstance(message, dict):
        raise location.error(column, f"message {index} is {type(message).__name__} instead of {{role, content}}")
    message = _without_nulls(message)
    if message.get("tool_calls"):
        message.setdefault("content", "")
    for field in ("role", "content"):
        if not isinstance(message.get(field), str):
            raise location.error(
                column,
                f"message {index} has {field} of type {type(message.get(field)).__name__} instead of text; "
                "write plain text messages",
            )
    role = message["role"]
    if not role.strip() or not role.isprintable() or len(role) > MOST_NAME:
        raise location.error(column, f"message {index} has the role {shown(repr(role))}; write user, system or another")
    return message


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def with_system_prompt(messages: list[Message], text: str | None) -> list[Message]:
    """The messages with ``text`` as the system's before them, where there is a text and they have none of their own."""
    if text is None or any(message["role"] == "system" for message in messages):
        return messages
    return [{"role": "system", "content": text}, *messages]


def parse_data_source(value: Any, location: RowLocation) -> str:
    """Return a row's data_source, the name by which its reward function is chosen.

    Raises:
        DataError: it is not text, empty, long, or holds control characters.
    """
    if not isinstance(value, str) or not value.strip():
        shown_value = shown(repr(value))
        raise location.error(
            "data_source", f"{shown_value} instead of a name such as openai/gsm8k; name the reward to use"
        )
    if not value.isprintable() or len(value) > MOST_NAME:  # it names metrics
        raise location.error(
            "data_source", f"{shown(value)!r}: more than {MOST_NAME} characters, or one of control; shorten the name"
        )
    return value


def parse_ground_truth(value: Any, location: RowLocation) -> str:
    """Return reward_model.ground_truth as text; lists, structs and numbers become JSON text.

    Raises:
        DataError: reward_model is no struct, or has no ground_truth.
    """
    if not isinstance(value, dict):
        raise location.error("reward_model", f"{type(value).__name__} instead of a struct {{style, ground_truth}}")
    truth = value.get("ground_truth")
    if truth is None:
        raise location.error("reward_model", "ground_truth is missing; write the right answer there, or remove the row")
    if isinstance(truth, float) and not math.isfinite(truth):  # as pandas writes what is missing
        raise location.error(
            "reward_model", f"ground_truth is {truth}; write the right answer there, or remove the row"
        )
    return truth if isinstance(truth, str) else json.dumps(truth, ensure_ascii=False, default=str)


def parse_extra_info(value: Any, location: RowLocation) -> dict[str, Any]:
    """Return extra_info as a dictionary; null becomes an empty one.

    Raises:
        DataError: it is neither a struct nor a map.
    """
    if value is None:
        return {}
    if isinstance(value, list) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value):
        pairs, value = value, {}  # pyarrow gives a map column as a list of pairs
        for key, item in pairs:
            if not isinstance(key, str):
                raise location.error("extra_info", "a map whose keys are no text; use a struct or leave it out")
            if key in value:
                raise location.error("extra_info", f"a map with the key {shown(repr(key))} twice; leave one out")
            value[key] = item
    if not isinstance(value, dict):
        raise location.error("extra_info", f"{type(value).__name__} instead of a struct; use a struct or leave it out")
    return value


def parse_margin(value: Any, location: RowLocation) -> float:
    """Return a pair's margin: by how much the chosen response is to be ahead; null or no column is 0.

    Raises:
        DataError: it is no finite number.
    """
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise location.error("margin", f"{shown(repr(value))} instead of a finite number; write a number or null")
    if abs(value) > MOST_MARGIN:
        raise location.error("margin", f"{value:g} is beyond {MOST_MARGIN:g}; write a smaller number or null")
    return float(value)


def parse_response(row: dict[str, Any], column: str, location: RowLocation) -> str:
    """Return the target text of a supervised row.

    Args:
        column: a top-level column, or a path into structs such as "extra_info.answer" or "reward_model.ground_truth".

    Raises:
        DataError: there is no such value, or it is not text, or it is empty.
    """
    value = column_value(row, column)
    if not isinstance(value, str) or not value.strip():
        raise location.error(
            column,
            f"{shown(repr(value))} instead of a response text; write one (for sft, data.response_column names the "
            "column that holds the text)",
        )
    return value


def column_value(row: dict[str, Any], column: str) -> Any:
    """Return a row's value of a column, or of a path into structs; None where there is none."""
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
