"""A file for what each rank prints, in a folder for each attempt, where a job's script asks for it.

logs/attempt-3/rank-0.log, rank-1.log, ...    logs/latest -> attempt-3
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from rlhf_megatron.untrusted import reason_of

# Set by launch/slurm/job.sbatch.j2: the folder, and the number of the job's first attempt in it.
FOLDER, FIRST_ATTEMPT = "RLHF_MEGATRON_LOGS", "RLHF_MEGATRON_ATTEMPT"


def next_log(folder: Path, first_attempt: int, rank: str) -> Path:
    """Make the file for this start of a rank: in the first attempt's folder that has none of it yet.

    torchrun starts all ranks together, so they agree; its own count of restarts differs from node to node.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for attempt in itertools.count(first_attempt):
        path = folder / f"attempt-{attempt}" / f"rank-{rank}.log"
        with contextlib.suppress(FileExistsError):  # also of a file where the folder would be
            path.parent.mkdir(exist_ok=True)
            path.touch(exist_ok=False)
            return path
    raise AssertionError("there is always a next number")


def redirect_output(environment: Mapping[str, str]) -> None:
    """Send stdout and stderr of this process, and of what it starts, to the rank's log; ``latest`` points there.

    Where no log can be made, that is reported and they stay where they are.
    """
    if FOLDER not in environment or "RANK" not in environment:
        return
    try:
        _redirect(Path(environment[FOLDER]), int(environment.get(FIRST_ATTEMPT, "0")), environment["RANK"])
    except (OSError, ValueError) as error:
        what = f"{environment[FOLDER]}: no log of rank {environment['RANK']} can be made there"
        print(f"warning: {what} ({reason_of(error)}); its output stays here", file=sys.stderr, flush=True)


def _redirect(folder: Path, first_attempt: int, rank: str) -> None:
    path = next_log(folder, first_attempt, rank)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    if rank == "0":
        link = path.parent.parent / "latest"
        temporary = link.with_name(f"latest.{os.getpid()}")
        temporary.unlink(missing_ok=True)  # of a process of the same number
        temporary.symlink_to(path.parent.name)
        os.replace(temporary, link)
