"""Rows of parquet files with verl's columns: memory-mapped, found by row group, checked one by one.

Here: files, row groups and the meaning of columns. Not here: tokens, lengths and the order of training (prompts.py).

Columns: data_source (text), prompt (list of {role, content}), ability (not read), reward_model ({style, ground_truth}),
extra_info (any struct, optional).
"""

from __future__ import annotations

import json
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from rlhf_megatron.data.errors import DataError

# Decoded row groups that stay in memory. A batch reads its rows sorted by row group, so few are needed.
CACHED_ROW_GROUPS = 8


@dataclass(frozen=True)
class RowPlace:
    """Where a row lies: file, and index of the row in that file (from 0)."""

    file: str
    row: int

    def error(self, column: str, problem: str) -> DataError:
        """Return the error for this row: file, row, column, what is wrong and what to do."""
        return DataError(f"{self.file}, row {self.row}, column {column}: {problem}")


class ParquetRows:
    """Random access to the rows of several parquet files, without reading more than the row groups that are asked for.

    Only the named columns are decoded, so images or other payload beside them cost nothing. Safe to share between
    threads.
    """

    def __init__(self, files: Sequence[str | Path], required: Sequence[str], optional: Sequence[str] = ()) -> None:
        """Map the files and read their footers.

        Args:
            files: parquet files; rows are numbered through all of them in this order.
            required: top-level columns that every file must have.
            optional: top-level columns that are read where they exist.

        Raises:
            DataError: no file, a file that cannot be read, no rows, or a missing column.
        """
        if not files:
            raise DataError("no data files are given; set data.train_files (or data.validation_files)")
        self._files: list[pyarrow.parquet.ParquetFile] = []
        self._names: list[str] = []
        self._columns: list[list[str]] = []
        self._group_owner: list[tuple[int, int]] = []  # (file, row group) of each row group of all files
        self._group_starts: list[int] = []  # first row of each row group, numbered through all files
        self._file_starts: list[int] = []
        self._length = 0
        for file in files:
            self._add_file(Path(file), required, optional)
        if self._length == 0:
            raise DataError(f"{', '.join(self._names)}: no rows; check the step that wrote the data")
        self._cache: OrderedDict[int, pyarrow.Table] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of rows of all files."""
        return self._length

    def place(self, row: int) -> RowPlace:
        """Return file and row within it, for a row numbered through all files."""
        index = bisect_right(self._file_starts, row) - 1
        return RowPlace(self._names[index], row - self._file_starts[index])

    def read(self, row: int) -> dict[str, Any]:
        """Return one row as plain Python values, by column name."""
        group = bisect_right(self._group_starts, row) - 1
        table = self._group(group)
        rows: list[dict[str, Any]] = table.slice(row - self._group_starts[group], 1).to_pylist()
        return rows[0]

    def scan(self, columns: Sequence[str], chunk: int = 1024) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """Yield (first row, rows) of at most `chunk` rows at a time in file order, with only these columns decoded."""
        for group, (file, row_group) in enumerate(self._group_owner):
            wanted = [name for name in columns if name in self._columns[file]]
            with self._lock:
                table = self._files[file].read_row_group(row_group, columns=wanted, use_threads=False)
            for start in range(0, table.num_rows, chunk):
                yield self._group_starts[group] + start, table.slice(start, chunk).to_pylist()

    def _add_file(self, path: Path, required: Sequence[str], optional: Sequence[str]) -> None:
        try:
            file = pyarrow.parquet.ParquetFile(pyarrow.memory_map(str(path), "r"))
        except FileNotFoundError as error:
            raise DataError(f"{path}: there is no such file; make it with tools/prepare_data.py") from error
        except (OSError, pyarrow.ArrowException) as error:
            detail = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise DataError(f"{path}: not a readable parquet file ({detail})") from error
        names = list(file.schema_arrow.names)
        for column in required:
            if column not in names:
                raise DataError(
                    f"{path}, column {column}: missing; the file has {', '.join(names)}; the columns are verl's: "
                    "data_source, prompt, reward_model, extra_info (tools/prepare_data.py writes them)"
                )
        self._columns.append([name for name in (*required, *optional) if name in names])
        self._file_starts.append(self._length)
        for row_group in range(file.num_row_groups):
            self._group_owner.append((len(self._files), row_group))
            self._group_starts.append(self._length)
            self._length += file.metadata.row_group(row_group).num_rows
        self._files.append(file)
        self._names.append(str(path))

    def _group(self, group: int) -> pyarrow.Table:
        """Return a decoded row group from the cache or the file."""
        with self._lock:
            if group in self._cache:
                self._cache.move_to_end(group)
                return self._cache[group]
            file, row_group = self._group_owner[group]
            table = self._files[file].read_row_group(row_group, columns=self._columns[file], use_threads=False)
            self._cache[group] = table
            if len(self._cache) > CACHED_ROW_GROUPS:
                self._cache.popitem(last=False)
            return table


def parse_messages(value: Any, place: RowPlace) -> list[dict[str, Any]]:
    """Return a row's prompt as messages with `role` and `content`; fields that are null are left out.

    Raises:
        DataError: the prompt is empty, or not a list of {role, content} with text in both.
    """
    if value is None or (isinstance(value, (list, str)) and not value):
        raise place.error("prompt", "empty; give at least one message, or remove the row")
    if not isinstance(value, list):
        raise place.error(
            "prompt",
            f"{type(value).__name__} instead of a list of {{role, content}}; wrap the text as one user message",
        )
    messages = []
    for index, message in enumerate(value):
        if not isinstance(message, dict):
            raise place.error("prompt", f"message {index} is {type(message).__name__} instead of {{role, content}}")
        for field in ("role", "content"):
            if not isinstance(message.get(field), str):
                raise place.error(
                    "prompt",
                    f"message {index} has {field} of type {type(message.get(field)).__name__} instead of text; "
                    "write plain text messages",
                )
        messages.append({key: item for key, item in message.items() if item is not None})
    if not any(message["content"].strip() for message in messages):
        raise place.error("prompt", "every message is empty; give a question, or remove the row")
    return messages


def parse_data_source(value: Any, place: RowPlace) -> str:
    """Return a row's data_source, the name by which its reward function is chosen.

    Raises:
        DataError: it is not text, or empty.
    """
    if not isinstance(value, str) or not value:
        raise place.error("data_source", f"{value!r} instead of a name such as openai/gsm8k; name the reward to use")
    return value


def parse_ground_truth(value: Any, place: RowPlace) -> str:
    """Return reward_model.ground_truth as text; lists, structs and numbers become JSON text.

    Raises:
        DataError: reward_model is no struct, or has no ground_truth.
    """
    if not isinstance(value, dict):
        raise place.error("reward_model", f"{type(value).__name__} instead of a struct {{style, ground_truth}}")
    truth = value.get("ground_truth")
    if truth is None:
        raise place.error("reward_model", "ground_truth is missing; write the right answer there, or remove the row")
    return truth if isinstance(truth, str) else json.dumps(truth, ensure_ascii=False, default=str)


def parse_extra_info(value: Any, place: RowPlace) -> dict[str, Any]:
    """Return extra_info as a dictionary; null becomes an empty one.

    Raises:
        DataError: it is neither a struct nor a map.
    """
    if value is None:
        return {}
    if isinstance(value, list) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value):
        value = dict(value)  # pyarrow gives a map column as a list of pairs
    if not isinstance(value, dict):
        raise place.error("extra_info", f"{type(value).__name__} instead of a struct; use a struct or leave it out")
    return value


def parse_response(row: dict[str, Any], column: str, place: RowPlace) -> str:
    """Return the target text of a supervised row.

    Args:
        column: a top-level column, or a path into structs such as "extra_info.answer" or "reward_model.ground_truth".

    Raises:
        DataError: there is no such value, or it is not text, or it is empty.
    """
    value: Any = row
    if column in row:
        value = row[column]
    else:
        for part in column.split("."):
            value = value.get(part) if isinstance(value, dict) else None
    if not isinstance(value, str) or not value.strip():
        raise place.error(
            column, f"{value!r} instead of a response text; set data.response_column to the column that holds the text"
        )
    return value
