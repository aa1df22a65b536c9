"""Identities of processes, across machines and reboots, and whether a process is still there (Linux)."""

from __future__ import annotations

import os
import socket
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
# Fields of /proc/PID/stat behind the program's name, which may have spaces in it: the state, and when it began.
_STATE, _BEGAN = 0, 19


def this_machine() -> str:
    """Return one word for this host as it was last booted; a container is a machine of its own."""
    boot = _BOOT.read_text(encoding="ascii")[:8]
    processes = os.stat("/proc/self/ns/pid").st_ino
    return f"{socket.gethostname()}/{boot}-{processes}"


def identity(process: int) -> str:
    """Return MACHINE PROCESS TIME, three words that no other process ever has; raises ProcessLookupError where it is
    gone.

    The time is in clock ticks since the machine was booted, which no correction of its clock changes.
    """
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except FileNotFoundError:
        raise ProcessLookupError(f"there is no process {process}") from None
    if fields[_STATE] in "ZX":  # it has ended, and nobody has asked how
        raise ProcessLookupError(f"process {process} has ended")
    return f"{this_machine()} {process} {fields[_BEGAN]}"


def lives(name: str) -> bool | None:
    """Return whether the process of an ``identity`` is still there; None where it is one of another machine."""
    machine, process, _ = name.split()
    if machine != this_machine():
        return None
    try:
        return identity(int(process)) == name
    except ProcessLookupError:
        return False
