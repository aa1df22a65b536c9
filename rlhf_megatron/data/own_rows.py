"""Rows of a user's own data set (data.dataset: path.py:Class), with the columns of parquet files (column_values.py).

The class is called with the list of files, and gives ``len(data)`` and ``data[i]``: a dictionary of plain Python
values, the same for the same i in every process. It runs on every rank.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from rlhf_megatron.data.column_values import column_value
from rlhf_megatron.data.media import media_of_row
from rlhf_megatron.data.parquet import VERL_COLUMNS, Columns, RowLocation
from rlhf_megatron.data.rows import Block, ParquetRows
from rlhf_megatron.errors import DataError
from rlhf_megatron.recipe import DataSection
from rlhf_megatron.untrusted import shown
from rlhf_megatron.user_files import run_file

_BLOCK_ROWS = 1024
# Rows that stand for all in the digest, and those whose size is measured.
_DIGEST_ROWS, _MEASURED_ROWS = 1000, 32


class OwnRows:
    """The rows of a user's class. Safe to share between threads: they take turns.

    Attributes are those of ``ParquetRows``; the digest is of the number of rows and of up to 1,000 rows.
    """

    def __init__(self, files: Sequence[str], specification: str, required: Columns) -> None:
        """Load the class, and make its data set.

        Raises:
            DataError: there is no such class, it fails, has no rows, or they lack a column.
        """
        self.files = [specification]
        self._required = required
        self._refuses_media = False
        self._lock = threading.RLock()
        made = load_class(specification)
        self._data: Any = self._called("called with the files", lambda: made(list(files)))
        length = self._called("asked for its len()", lambda: len(self._data))
        if not length:
            raise DataError(f"data.dataset: {shown(specification)} has no rows; check the files that it is given")
        self._length = int(length)
        sample = numpy.unique(numpy.linspace(0, self._length - 1, min(self._length, _DIGEST_ROWS)).astype(numpy.int64))
        texts = [json.dumps(self._row(row), sort_keys=True, default=str).encode() for row in sample.tolist()]
        self.digest = hashlib.blake2b(b"\n".join([str(self._length).encode(), *texts]), digest_size=16).hexdigest()
        self.row_bytes = float(max(map(len, texts[:_MEASURED_ROWS])))
        self.decoded_again = 0
        self.blocks = [
            Block(0, range(0), first, rows, int(rows * self.row_bytes))
            for first in range(0, self._length, _BLOCK_ROWS)
            if (rows := min(_BLOCK_ROWS, self._length - first))
        ]

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._length

    def location(self, row: int) -> RowLocation:
        """Return the class and the row."""
        return RowLocation(self.files[0], row)

    def read(self, row: int) -> dict[str, Any]:
        """See ``ParquetRows.read``."""
        return self.take([row])[0]

    def take(self, rows: Sequence[int] | NDArray[numpy.int64]) -> list[dict[str, Any]]:
        """See ``ParquetRows.take``; raises DataError where the class fails."""
        return [self._row(int(row)) for row in rows]

    def scan(
        self, columns: Sequence[str] | None = None, chunk: int = _BLOCK_ROWS
    ) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """See ``ParquetRows.scan``."""
        for first in range(0, self._length, chunk):
            rows = self.take(range(first, min(self._length, first + chunk)))
            yield first, [row if columns is None else {name: row.get(name) for name in columns} for row in rows]

    def heads(self, count: int) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """See ``ParquetRows.heads``."""
        yield 0, self.take(range(min(count, self._length)))

    def distinct(self, column: str) -> Iterator[tuple[int, Any]]:
        """Yield (row, value) of the different values of a column; reads all rows."""
        seen: set[str] = set()
        for first, rows in self.scan():
            for offset, row in enumerate(rows):
                if (key := repr(row.get(column))) not in seen:
                    seen.add(key)
                    yield first + offset, row.get(column)

    def numbers(self, column: str) -> NDArray[numpy.float64]:
        """See ``ParquetRows.numbers``."""
        values = numpy.empty(self._length)
        for first, rows in self.scan():
            for offset, row in enumerate(rows):
                value = column_value(row, column)
                if isinstance(value, bool) or not isinstance(value, int | float) or not numpy.isfinite(value):
                    raise self.location(first + offset).error(column, "no finite number; give one")
                values[first + offset] = value
        return values

    def block_of(self, rows: NDArray[numpy.int64]) -> NDArray[numpy.int64]:
        """See ``ParquetRows.block_of``."""
        return rows // _BLOCK_ROWS

    def refuse_media(self) -> None:
        """Raise DataError where a row has images, videos or sound: for the first at once, for others as they are read.

        See ``ParquetRows.refuse_media``.
        """
        self._refuses_media = True
        self._row(0)

    def _row(self, row: int) -> dict[str, Any]:
        values = self._called(f"asked for row {row}", lambda: self._data[row])
        if not isinstance(values, dict):
            raise DataError(
                f"{shown(self.files[0])}, row {row}: {type(values).__name__} instead of a dictionary of columns"
            )
        names = list(values)
        needed = self._required if isinstance(self._required, Sequence) else self._required(names)
        for column in needed:
            if column not in values:
                raise self.location(row).error(column, f"missing; the row has {shown(', '.join(map(str, names)))}")
        for column in media_of_row(values) if self._refuses_media else ():
            raise self.location(row).error(
                column, "only models of text are trained, which cannot see it; leave it out, or set data.images: drop"
            )
        return values

    def _called(self, when: str, call: Callable[[], Any]) -> Any:
        """Return what the user's code does; raises DataError where it fails."""
        try:
            with self._lock:
                return call()
        except Exception as error:
            why = f"{type(error).__name__}: {shown(str(error), 300)}"
            raise DataError(f"data.dataset: {shown(self.files[0])} raised {why} when it was {when}; fix it") from error


Rows = ParquetRows | OwnRows


def open_rows(
    files: Sequence[str | Path],
    section: DataSection,
    required: Columns,
    optional: Sequence[str] = (),
    forms: str = VERL_COLUMNS,
) -> Rows:
    """Return the rows of files: of the recipe's own data set where it has one, else of parquet files.

    Raises:
        DataError: see ``ParquetRows`` and ``OwnRows``.
    """
    if section.dataset is not None:
        return OwnRows([str(file) for file in files], section.dataset, required)
    return ParquetRows(files, required, optional, section.shuffle_window_mb, forms)


def load_class(specification: str) -> Callable[[list[str]], Any]:
    """Return the class of "path.py:Class".

    Raises:
        DataError: there is no such file or class, or the file cannot be imported.
    """
    path, separator, name = specification.rpartition(":")
    if not separator or not name.isidentifier():
        raise DataError(f"data.dataset: {shown(specification)} is not path/to/file.py:Class")
    if not os.path.isfile(path):
        raise DataError(f"data.dataset: there is no file {shown(path)}; set it to path/to/file.py:Class")
    try:
        module = run_file(Path(path), "data")
        row_class: Any = getattr(module, name, None)
    except Exception as error:
        why = f"{type(error).__name__}: {shown(str(error), 300)}"
        raise DataError(f"data.dataset: {shown(path)} cannot be imported ({why}); fix it") from error
    if module is None:
        raise DataError(f"data.dataset: {shown(path)} is not a Python file; set it to path/to/file.py:Class")
    if not callable(row_class):
        raise DataError(f"data.dataset: {shown(path)} has no class {name}")
    return row_class  # type: ignore[no-any-return]  # getattr of a module has no type
