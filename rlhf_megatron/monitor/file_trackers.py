"""Trackers that write the run folder's own files, line by line: metrics.jsonl and metrics.csv.

A killed process loses no step, and what a torn or damaged file has left is moved out of the way and reported. Not
here: which trackers there are (trackers.py), and what lines may hold (records.py).
"""

from __future__ import annotations

import csv
import errno
import io
import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from rlhf_megatron.durable import move_aside, whole_file
from rlhf_megatron.monitor.records import MOST_BYTES, record_of, set_damaged_aside, set_huge_aside

_LONGEST_RECORD = 1 << 20  # bytes
_MOST_BYTES_OF_A_TABLE = 1 << 30  # all of it is in memory where it gets another column


class JsonlTracker:
    """metrics.jsonl: {"step": n, "name": number, ...} per line. JSON has no NaN: what is not finite is null."""

    is_local: ClassVar[bool] = True

    def __init__(self, path: Path) -> None:
        """Go on behind what is there; damaged lines are moved out of the way and reported."""
        set_huge_aside(path, MOST_BYTES)
        if path.exists():
            set_damaged_aside(path, lambda line: record_of(line) is not None)
        self._file = path.open("ab", buffering=0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line and hand it to the operating system, so that a killed process loses nothing.

        Raises OSError where there is no room, and then has written nothing.
        """
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        _append(self._file, json.dumps({"step": step, **finite}) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class CsvTracker:
    """metrics.csv: one row per call, one column per metric; a metric seen for the first time widens the table."""

    is_local: ClassVar[bool] = True

    def __init__(self, path: Path) -> None:
        self._path = path
        set_huge_aside(path, _MOST_BYTES_OF_A_TABLE)
        _drop_torn_line(path)
        if path.exists() and not _is_table(path):
            print(f"warning: {path}: is damaged; it is {move_aside(path).name} now and begun anew", file=sys.stderr)
        self._columns = ["step"]
        if path.exists():
            with path.open(newline="", encoding="utf-8") as file:
                self._columns = next(csv.reader(file), self._columns)
        self._file = path.open("ab", buffering=0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one row; cells of metrics that this step does not have stay empty. Raises as JsonlTracker does."""
        new_columns = [name for name in metrics if name not in self._columns]
        if new_columns or not self._path.stat().st_size:
            self._widen(new_columns)
        row = {"step": step, **metrics}
        line = io.StringIO(newline="")
        csv.writer(line).writerow([row.get(name, "") for name in self._columns])
        _append(self._file, line.getvalue())

    def _widen(self, new_columns: list[str]) -> None:
        """Rewrite the file with the new columns. Rare: most metrics are there at the first step."""
        with self._path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))[1:]
        columns = [*self._columns, *new_columns]
        with whole_file(self._path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(row + [""] * (len(columns) - len(row)) for row in rows)
            file.flush()
        self._file.close()
        self._columns = columns
        self._file = self._path.open("ab", buffering=0)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _append(file: io.FileIO, text: str) -> None:
    """Write a whole record to the end of an unbuffered file, or nothing of it; raises OSError then."""
    content, before = text.encode(), os.fstat(file.fileno()).st_size
    try:
        if file.write(content) != len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        file.truncate(before)
        raise


def _drop_torn_line(path: Path) -> None:
    """Cut off a last line without its end, as a killed run leaves it: the next record would otherwise continue it."""
    if not path.exists():
        return
    with path.open("rb") as file:
        begin = max(0, file.seek(0, os.SEEK_END) - _LONGEST_RECORD)
        file.seek(begin)
        content = file.read(_LONGEST_RECORD)
    complete = content.rfind(b"\n") + 1
    if complete < len(content):
        os.truncate(path, begin + complete)


def _is_table(path: Path) -> bool:
    """Return whether a file is a table of steps as this tracker writes it, to its end."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = csv.reader(file)
            header = next(rows, ["step"])
            width = len(header)
            return header[:1] == ["step"] and all(0 < len(row) <= width and "\0" not in row[0] for row in rows)
    except (UnicodeDecodeError, csv.Error):
        return False
