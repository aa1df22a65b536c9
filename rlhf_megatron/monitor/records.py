"""The lines of metrics.jsonl: what a sound one is, and moving out of the way what a power cut has made of others."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from rlhf_megatron.durable import free_name, move_aside, whole_file
from rlhf_megatron.errors import MonitorError
from rlhf_megatron.untrusted import opened, parse_json, reason_of

# A step has some hundreds of metrics; no line comes near this.
_MOST_BYTES_OF_A_LINE = 1 << 22
_LARGEST_STEP = 2**53
# A hundred thousand steps of a thousand metrics have less.
MOST_BYTES = 1 << 32


def lines_of(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield (number from 1, line with its end) of a file, blank ones left out; a line that is too long is cut.

    A line without an end is the last one: a run may be writing the rest of it, which is no line of its own.
    """
    number = 0
    while line := file.readline(_MOST_BYTES_OF_A_LINE):
        number += 1
        rest = line
        while len(rest) == _MOST_BYTES_OF_A_LINE and not rest.endswith(b"\n"):
            rest = file.readline(_MOST_BYTES_OF_A_LINE)
        if line.strip():
            yield number, line
        if not rest.endswith(b"\n"):
            return


def record_of(line: bytes) -> dict[str, Any] | None:
    """Return a line's step and numbers, None for one that was not finite; None in all where it is damaged."""
    try:
        record = parse_json(line.decode("utf-8"), "", MonitorError)
        step = record.pop("step")
        if type(step) is not int or not 0 <= step <= _LARGEST_STEP:
            return None
        if any(type(value) not in (int, float, type(None)) for value in record.values()):
            return None
        return {name: None if value is None else float(value) for name, value in record.items()} | {"step": step}
    except (MonitorError, UnicodeDecodeError, KeyError, TypeError, AttributeError, OverflowError):
        return None


def set_huge_aside(path: Path, most_bytes: int) -> None:
    """Rename a file that no run has written, by its size, to NAME.damaged-K, and tell it on stderr.

    Raises OSError where that fails.
    """
    size = path.stat().st_size if path.is_file() else 0
    if size > most_bytes:
        note = f"has {size:,} bytes, beyond the {most_bytes:,} that are read; it is {move_aside(path).name} now"
        print(f"warning: {path}: {note} and begun anew", file=sys.stderr, flush=True)


def set_damaged_aside(path: Path, is_sound: Callable[[bytes], bool]) -> None:
    """Take the lines that are not sound out of a file, into NAME.damaged-K beside it, and tell it on stderr.

    A torn last line, as a killed run leaves it, is only cut off: the next record would otherwise continue it. Of a line
    that is too long the beginning is kept.
    Raises MonitorError where the file cannot be read or written.
    """
    with opened(path, MonitorError) as file:
        damaged, torn = [], 0
        for number, line in lines_of(file):
            if not _is_ended(line):
                torn = len(line)
            elif not is_sound(line):
                damaged.append(number)
    try:
        if torn:
            os.truncate(path, path.stat().st_size - torn)
        if damaged:
            moved = free_name(path)
            _divide(path, set(damaged), moved)
            count = f"{len(damaged)} damaged lines, from {damaged[0]} on, were"
            note = count if len(damaged) > 1 else f"line {damaged[0]} is damaged and was"
            print(f"warning: {path}: {note} moved to {moved.name}", file=sys.stderr, flush=True)
    except OSError as error:
        raise MonitorError(f"{path}: damaged lines cannot be removed ({reason_of(error)}); make room") from error


def _divide(path: Path, damaged: Collection[int], moved: Path) -> None:
    with opened(path, MonitorError) as source, whole_file(path) as partial, partial.open("wb") as sound:
        with moved.open("wb") as other:
            for number, line in lines_of(source):
                (other if number in damaged else sound).write(line)
        sound.flush()


def _is_ended(line: bytes) -> bool:
    return line.endswith(b"\n") or len(line) == _MOST_BYTES_OF_A_LINE
