"""Files and folders that appear whole or not at all: after a power cut there is the old one or the new one.

NAME.partial     being written; goes when writing fails, or at the next start
NAME.replaced    an older folder NAME while the new one takes its name; comes back if that did not happen
NAME.damaged-K   what could not be used and was in the way, for a person to look at
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

_PARTIAL, _REPLACED = ".partial", ".replaced"


def partial_of(path: Path) -> Path:
    """Return where a file or folder is written until all of it is there."""
    return path.with_name(path.name + _PARTIAL)


def sync(path: Path) -> None:
    """Have a file's content or a folder's names on disk, not only in the system's memory; raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # where a file server says that it has no room
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Delete a file, a link or a whole folder, if it is there; raises OSError where that fails."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give the path to write a file at, which takes its name, in place of an older one, as the block ends well.

    Raises OSError where the disk fails; the older file is still there then.
    """
    partial = partial_of(path)
    remove(partial)
    try:
        yield partial
        sync(partial)
        os.replace(partial, path)
        sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a file in UTF-8, whole or not at all; raises OSError where the disk fails."""
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Give an empty folder to write into, which takes its name, in place of an older one, as the block ends well.

    All files are on disk by then. Raises OSError where that fails; the older folder is still there then.
    """
    partial = begin_folder(folder)
    try:
        yield partial
        finish_folder(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # what a failure has left takes room


def begin_folder(folder: Path) -> Path:
    """Make and return the empty folder where ``folder`` is written until all of it is there; raises OSError."""
    partial = partial_of(folder)
    remove(partial)
    partial.mkdir(parents=True)
    return partial


def finish_folder(folder: Path) -> None:
    """Have what has been written since ``begin_folder`` on disk, and then under its name; raises OSError."""
    partial = partial_of(folder)
    for path in [*partial.rglob("*"), partial]:
        sync(path)
    take_name(partial, folder)


def take_name(written: Path, folder: Path) -> None:
    """Rename a finished folder whose files are on disk; an older one of that name goes when the new one has it.

    Raises OSError where the disk fails; the older folder is still there then.
    """
    replaced = folder.with_name(folder.name + _REPLACED)
    remove(replaced)
    is_new = not os.path.lexists(folder)
    if not is_new:
        os.rename(folder, replaced)
    try:
        os.rename(written, folder)
    except OSError:
        if not is_new:
            os.rename(replaced, folder)
        raise
    sync(folder.parent)
    remove(replaced)


def tidy(folder: Path) -> None:
    """Clear up in a folder after a process that was killed; only while nothing else writes there.

    What is half-written goes. A folder that was just being replaced comes back, unless the new one has its name.
    Raises OSError where that fails.
    """
    for left in sorted(folder.iterdir()) if folder.is_dir() else []:
        if _PARTIAL in left.suffixes:
            remove(left)
        elif left.suffix == _REPLACED:
            name = left.with_suffix("")
            if left.is_dir() and not left.is_symlink() and not os.path.lexists(name):
                os.rename(left, name)
            else:
                remove(left)


def free_name(path: Path) -> Path:
    """Return the first name NAME.damaged-K beside a path that nothing has."""
    number = 1
    while os.path.lexists(free := path.with_name(f"{path.stem}.damaged-{number}{path.suffix}")):
        number += 1
    return free


def move_aside(path: Path) -> Path:
    """Rename what is damaged to a free name NAME.damaged-K and return that; raises OSError."""
    moved = free_name(path)
    os.rename(path, moved)
    return moved
