"""Reading files and JSON that others wrote: bounded in size and depth, and never from a device, a pipe or a folder.

A model folder, a data file, a checkpoint and the answer of a service may be damaged or hostile. Whoever reads one names
the error class of its room, and gets one line of text instead of a full memory, a reader that waits forever, or a
traceback of the parser.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from rlhf_megatron.errors import UserError

# Far beyond any configuration, template, manifest or index that is written by a program on purpose.
MOST_BYTES = 64 * 2**20
# The deepest objects that are met in practice, JSON schemas of tools, have about twenty levels.
MOST_LEVELS = 100


@contextlib.contextmanager
def opened(path: str | Path, error_class: type[UserError]) -> Iterator[BinaryIO]:
    """Open a regular file for reading; what goes wrong with it inside the block is reported in the same way.

    Args:
        path: the file; links are followed.
        error_class: what is raised, with one line that begins with the path.

    Raises:
        error_class: there is no such file, it cannot be read, or is no regular file.
    """
    try:
        # Without waiting: the opening of a pipe that nobody writes to would never return.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise error_class(f"{shown(path)}: there is no such file") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        raise error_class(f"{shown(path)}: cannot be read ({reason_of(error)})") from error
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise error_class(f"{shown(path)}: is not a regular file ({kind_of(mode)})")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            yield file
    except OSError as error:
        raise error_class(f"{shown(path)}: cannot be read ({reason_of(error)})") from error
    finally:
        os.close(descriptor)


def read_bytes(path: str | Path, error_class: type[UserError], most_bytes: int = MOST_BYTES) -> bytes:
    """Return the content of a regular file; see ``opened``.

    Raises:
        error_class: as ``opened`` does, and where the file is larger than ``most_bytes``.
    """
    with opened(path, error_class) as file:
        # A file of /proc has a size of 0, and some have nothing to read yet.
        content = file.read(most_bytes + 1) or b""
        if len(content) > most_bytes:
            size = max(os.fstat(file.fileno()).st_size, len(content))
            raise error_class(f"{shown(path)}: has {size:,} bytes; at most {most_bytes:,} are read")
    return content


def check_regular(path: str | Path, error_class: type[UserError], most_bytes: int | None = None) -> None:
    """Check that a path is a regular file, for a library that is to open it by its name.

    Raises:
        error_class: see ``read_bytes``.
    """
    try:
        status = os.stat(path)
    except FileNotFoundError as error:
        raise error_class(f"{shown(path)}: there is no such file") from error
    except (OSError, ValueError) as error:
        raise error_class(f"{shown(path)}: cannot be read ({reason_of(error)})") from error
    if not stat.S_ISREG(status.st_mode):
        raise error_class(f"{shown(path)}: is not a regular file ({kind_of(status.st_mode)})")
    if most_bytes is not None and status.st_size > most_bytes:
        raise error_class(f"{shown(path)}: has {status.st_size:,} bytes; at most {most_bytes:,} are read")


def read_text(path: str | Path, error_class: type[UserError], most_bytes: int = MOST_BYTES) -> str:
    """Return the text of a regular file in UTF-8; see ``read_bytes``."""
    try:
        return read_bytes(path, error_class, most_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise error_class(f"{shown(path)}: is not text in UTF-8 (byte {error.start})") from error


def read_json(path: str | Path, error_class: type[UserError], most_bytes: int = MOST_BYTES) -> Any:
    """Return the JSON value in a regular file; see ``read_bytes`` and ``parse_json``."""
    return parse_json(read_text(path, error_class, most_bytes), str(path), error_class)


def parse_json(
    text: str | bytes,
    where: str,
    error_class: type[UserError],
    most_levels: int = MOST_LEVELS,
    *,
    finite: bool = True,
    unique_keys: bool = False,
) -> Any:
    """Return the value of a JSON text (RFC 8259), whose numbers are finite and whose nesting is bounded.

    Args:
        text: str, or bytes in UTF-8.
        where: what the error's line begins with, such as the file's name.
        error_class: what is raised.
        most_levels: lists and objects within each other.
        finite: False lets NaN, infinities and numbers beyond float64 pass, for a caller that looks at each.
        unique_keys: True refuses an object with the same key twice, of which the last would count.

    Raises:
        error_class: it is no JSON, holds NaN, an infinity or a number beyond float64, or is nested too deeply.
    """
    try:
        numbers: dict[str, Any] = {"parse_constant": _refuse_constant, "parse_float": _finite} if finite else {}
        value = json.loads(text, object_pairs_hook=_unique if unique_keys else None, **numbers)
    except RecursionError as error:
        raise error_class(f"{shown(where)}: is nested too deeply; at most {most_levels} levels are read") from error
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, and whole numbers of too many digits
        raise error_class(f"{shown(where)}: not valid JSON ({reason_of(error)})") from error
    if not is_within_levels(value, most_levels):
        raise error_class(f"{shown(where)}: is nested too deeply; at most {most_levels} levels are read")
    return value


def is_within_levels(value: Any, most_levels: int = MOST_LEVELS) -> bool:
    """Return whether lists and dicts lie at most so many levels within each other; a value may hold itself."""
    level = _inner([value])
    for _ in range(most_levels):
        level = _inner(item for outer in level for item in (outer.values() if isinstance(outer, dict) else outer))
    return not level


def _inner(items: Iterable[Any]) -> list[Any]:
    """Return the lists and dicts among items, each object once: aliases of YAML can double at each level."""
    return list({id(item): item for item in items if isinstance(item, (dict, list))}.values())


def shown(text: object, most: int = 200) -> str:
    """Return a stranger's text for one line of an error: control characters escaped, cut after ``most`` characters."""
    whole = str(text)
    cut = whole if len(whole) <= most else f"{whole[:most]}... ({len(whole):,} characters)"
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in cut)


def reason_of(error: BaseException) -> str:
    """Return an error's reason in one short line."""
    text = getattr(error, "strerror", None) or str(error)
    lines = str(text).strip().splitlines()
    return shown(lines[0]) if lines else type(error).__name__


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("an object has the same key twice")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is beyond the numbers of a computer")
    return value


def kind_of(mode: int) -> str:
    """Return what a file of this ``st_mode`` is, in words, where it is no regular one."""
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFLNK: "a link"}
    return kinds.get(stat.S_IFMT(mode), "a device")
