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

from rlhf_megatron.errors import UserError

# Set by launch/slurm/job.sbatch.j2: the folder, and the number of the job's first attempt in it.
FOLDER, FIRST_ATTEMPT = "RLHF_MEGATRON_LOGS", "RLHF_MEGATRON_ATTEMPT"


def next_log(folder: Path, first_attempt: int, rank: str) -> Path:
    """Makes the file for this start of a rank: in the first attempt's folder that has none of it yet.

    torchrun starts all ranks together, so they agree; its own count of restarts differs from node to node.
    """
    for attempt in itertools.count(first_attempt):
        path = folder / f"attempt-{attempt}" / f"rank-{rank}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.touch(exist_ok=False)
            return path
    raise AssertionError("there is always a next number")


def redirect_output(environment: Mapping[str, str]) -> None:
    """Sends stdout and stderr of this process, and of what it starts, to the rank's log; ``latest`` points there.

    Raises UserError where the log cannot be written.
    """
    if FOLDER not in environment or "RANK" not in environment:
        return
    rank = environment["RANK"]
    try:
        path = next_log(Path(environment[FOLDER]), int(environment.get(FIRST_ATTEMPT, "0")), rank)
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    except OSError as error:
        raise UserError(f"environment: {FOLDER}={environment[FOLDER]}: cannot be written ({error.strerror})") from error
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    if rank == "0":
        link = path.parent.parent / "latest"
        temporary = link.with_name(f"latest.{os.getpid()}")
        temporary.symlink_to(path.parent.name)
        os.replace(temporary, link)
