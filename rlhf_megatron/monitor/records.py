"""The lines of metrics.jsonl: what a sound one is, and moving out of the way what a power cut has made of others."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from rlhf_megatron.durable import free_name, whole_file
from rlhf_megatron.errors import MonitorError
from rlhf_megatron.untrusted import opened, parse_json, reason_of

# A step has some hundreds of metrics; no line comes near this.
_MOST_BYTES_OF_A_LINE = 1 << 22
_LARGEST_STEP = 2**53


def lines_of(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield (number from 1, line with its end) of a file, blank ones left out; a line that is too long is cut."""
    number = 0
    while line := file.readline(_MOST_BYTES_OF_A_LINE):
        number += 1
        rest = line
        while len(rest) == _MOST_BYTES_OF_A_LINE and not rest.endswith(b"\n"):
            rest = file.readline(_MOST_BYTES_OF_A_LINE)
        if line.strip():
            yield number, line


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


def set_damaged_aside(path: Path, is_sound: Callable[[bytes], bool]) -> None:
    """Take the lines that are not sound out of a file, into NAME.damaged-K beside it, and tell it on stderr.

    A torn last line, as a killed run leaves it, is only cut off: the next record would otherwise continue it. Of a line
    that is too long the beginning is kept.
    Raises MonitorError where the file cannot be read or written.
    """
    with opened(path, MonitorError) as file:
        damaged = {number: line for number, line in lines_of(file) if not (_is_ended(line) and is_sound(line))}
    if not damaged:
        return
    try:
        last = damaged[max(damaged)]
        if not _is_ended(last):
            os.truncate(path, path.stat().st_size - len(last))
            del damaged[max(damaged)]
        if damaged:
            moved = free_name(path)
            _divide(path, damaged, moved)
            count = f"{len(damaged)} damaged lines, from {min(damaged)} on, were"
            told = count if len(damaged) > 1 else f"line {min(damaged)} is damaged and was"
            print(f"warning: {path}: {told} moved to {moved.name}", file=sys.stderr, flush=True)
    except OSError as error:
        raise MonitorError(f"{path}: damaged lines cannot be removed ({reason_of(error)}); make room") from error


def _divide(path: Path, damaged: Mapping[int, bytes], moved: Path) -> None:
    with opened(path, MonitorError) as source, whole_file(path) as partial, partial.open("wb") as sound:
        sound.writelines(line for number, line in lines_of(source) if number not in damaged)
        sound.flush()
        moved.write_bytes(b"".join(damaged.values()))


def _is_ended(line: bytes) -> bool:
    return line.endswith(b"\n") or len(line) == _MOST_BYTES_OF_A_LINE
