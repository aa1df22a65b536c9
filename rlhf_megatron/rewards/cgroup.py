"""A control group (version 2) for a worker and all that it starts, where this process may make one.

Nothing leaves it by ending its parents, and the kernel kills all of it at once. It limits no memory: the memory
controller can be had only where no process is in the parent group, and the rank is there. Most clusters and containers
allow no groups; there, processes.py does the same by the family tree.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from rlhf_megatron.rewards.process_tree import SECONDS_TO_DIE


def enclose(process_id: int) -> Path | None:
    """Move a process into a new group below that of this process; return the group's folder, None where not allowed."""
    own = _own_folder()
    if own is None:
        return None
    folder = own / f"rlhf_megatron-worker-{process_id}"
    try:
        folder.mkdir()
    except OSError:
        return None
    try:
        if (folder / "cgroup.kill").exists():  # from Linux 5.14 on
            (folder / "cgroup.procs").write_text(str(process_id))
            return folder
    except OSError:
        pass  # a group may be made, and not be entered, where others own the groups above it
    _remove(folder)
    return None


def end(folder: Path) -> None:
    """Kill all processes of a group, and remove it; nothing happens if that has been done."""
    with contextlib.suppress(OSError):
        (folder / "cgroup.kill").write_text("1")
    deadline = time.monotonic() + SECONDS_TO_DIE
    while not _remove(folder) and time.monotonic() < deadline:
        time.sleep(0.002)


def _remove(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        folder.rmdir()
    return not folder.exists()


def _own_folder() -> Path | None:
    try:
        groups, mounts = Path("/proc/self/cgroup").read_text(), Path("/proc/self/mounts").read_text()
    except OSError:
        return None
    own = [line.removeprefix("0::/") for line in groups.splitlines() if line.startswith("0::/")]
    roots = [line.split()[1] for line in mounts.splitlines() if line.split()[2] == "cgroup2"]
    if not own or not roots or ".." in own[0].split("/"):
        return None
    folder = Path(roots[0], own[0])
    return folder if os.access(folder, os.W_OK) else None
