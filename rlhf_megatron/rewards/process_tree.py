"""Processes below a given one: who they are, what memory they have, and their end. Linux only: /proc and prctl.

A process can leave its group and its session, but not its ancestors: where its parent ends, it becomes a child of the
nearest ancestor that asked for that (``become_subreaper``).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

# Numbers of prctl, <linux/prctl.h>.
_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36
_KIBIBYTE = 1024
# A process that waits for a disk or a GPU dies when that is done.
SECONDS_TO_DIE = 5.0


def become_subreaper() -> None:
    """Make this process the parent of all descendants whose own parents end.

    Raises:
        OSError: the kernel refuses it.
    """
    _prctl(_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread ends that forked it; ``parent`` is that thread's process.

    Raises:
        OSError: the kernel refuses it.
    """
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def descendants(ancestor: int) -> list[int]:
    """Return the ids of the living processes below one, parents before their children."""
    children: dict[int, list[int]] = defaultdict(list)
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                state, parent, *_ = Path("/proc", name, "stat").read_bytes().rpartition(b")")[2].split()
                if state not in (b"Z", b"X"):
                    children[int(parent)].append(int(name))
    below = [ancestor]
    for process_id in below:  # which grows
        below.extend(children[process_id])
    return below[1:]


def own_descendants() -> list[int]:
    """Return the ids of the processes below this one, without a look at any other of the machine.

    One that ends meanwhile may hide another until the next look, so what must find all of them asks ``descendants``.

    Raises:
        OSError: this process may open no more files.
    """
    if not os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children"):  # not in every kernel
        return descendants(os.getpid())
    below = [os.getpid()]
    for process_id in below:  # which grows
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # and no other: nobody watches then
            for thread in os.listdir(f"/proc/{process_id}/task"):
                below.extend(map(int, Path("/proc", str(process_id), "task", thread, "children").read_bytes().split()))
    return below[1:]


def is_stopped(process_id: int) -> bool:
    """Return whether a process was stopped by a signal or a tracer, and will do nothing until it gets another."""
    with contextlib.suppress(OSError):
        return Path("/proc", str(process_id), "stat").read_bytes().rpartition(b") ")[2][:1] in (b"T", b"t")
    return False


def memory_bytes(process_ids: Collection[int], enough: float) -> int:
    """Return the memory of processes, without files; what several share counts once, where that decides.

    Args:
        process_ids: processes; one that has ended has no memory.
        enough: a quick sum, in which shared pages count several times, is returned where it is not above this.
    """
    quick = sum(_kibibytes(process_id, "status", ("VmRSS", "VmSwap")) for process_id in process_ids) * _KIBIBYTE
    if quick <= enough:
        return quick
    fields = ("Pss_Anon", "Pss_Shmem", "SwapPss")
    return sum(_kibibytes(process_id, "smaps_rollup", fields) for process_id in process_ids) * _KIBIBYTE


def _kibibytes(process_id: int, file: str, fields: Sequence[str]) -> int:
    total = 0
    with contextlib.suppress(OSError):
        # A process may have given itself a name of any bytes, which stands there too.
        for line in Path("/proc", str(process_id), file).read_bytes().decode(errors="replace").split("\n"):
            name, _, value = line.partition(":")
            if name in fields:
                total += int(value.split()[0])
    return total


def end_descendants(ancestor: int) -> None:
    """Kill all processes below one, which must be a subreaper or no descendant escapes; return when they are dead.

    They are stopped before they are killed, so that none can start others meanwhile.
    """
    deadline = time.monotonic() + SECONDS_TO_DIE
    while (living := descendants(ancestor)) and time.monotonic() < deadline:
        stopped: set[int] = set()
        while (new := set(living) - stopped) and time.monotonic() < deadline:
            _send(new, signal.SIGSTOP)
            stopped |= new
            living = descendants(ancestor)
        _send(stopped, signal.SIGKILL)
        time.sleep(0.002)


def _send(process_ids: Iterable[int], number: signal.Signals) -> None:
    for process_id in process_ids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process_id, number)
