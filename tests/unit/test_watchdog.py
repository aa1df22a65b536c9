"""Processes that get nowhere write their stacks, tell the others and end."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from rlhf_megatron.runtime.watchdog import HANG_STATUS

# The main thread waits in C for ever: with Python's lock given back as collectives do, or kept.
STUCK = """
import ctypes, sys, time
from pathlib import Path
from rlhf_megatron.recipe.slurm import RetrySection
from rlhf_megatron.runtime.watchdog import watchdog
rank, library, seconds = int(sys.argv[2]), getattr(ctypes, sys.argv[3]), float(sys.argv[4])
retry = RetrySection(hang_seconds=seconds, hang_seconds_at_start=0)
watchdog.watch(Path(sys.argv[1]), 1, rank, 2, retry)
watchdog.beat("update", 7)
def waits_for_ever():
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        library(None).pthread_mutex_lock(mutex)
for _ in range(int(sys.argv[5])):
    time.sleep(0.2)
    watchdog.beat()
waits_for_ever()
"""


def start(run: Path, rank: int, library: str, seconds: float, beats: int = 0, **more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-c", STUCK, str(run), str(rank), library, str(seconds), str(beats)]
    environment = {name: value for name, value in os.environ.items() if name != "SLURM_JOB_ID"} | more
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)


def test_ranks_that_are_stuck_report_together(tmp_path: Path) -> None:
    # The first notices by itself and tells the second, which would have waited longer.
    ranks = [start(tmp_path, 0, "CDLL", 2.0, beats=15), start(tmp_path, 1, "CDLL", 25.0)]
    errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [HANG_STATUS] * 2
    (line,) = [json.loads(text) for text in (tmp_path / "recovery.jsonl").read_text().splitlines()]
    assert line["what"] == "hang" and line["stacks"] == str(tmp_path / "logs" / "hang-7")
    assert line["why"].endswith(" s: ranks 0-1 in update of step 7")
    assert line["why"] in errors[0] and not errors[1]
    for rank in (0, 1):
        stacks = (tmp_path / "logs" / "hang-7" / f"rank-{rank}.txt").read_text()
        assert stacks.startswith(f"update of step 7\nrank {rank} of 2: no progress for ")
        assert "in waits_for_ever" in stacks


def test_a_call_that_keeps_pythons_lock_ends_too(tmp_path: Path) -> None:
    process = start(tmp_path, 0, "PyDLL", 1.0, beats=5)
    error = process.communicate(timeout=120)[1]
    assert process.returncode == 1
    assert "Timeout" in error and "in waits_for_ever" in error


def test_a_monitor_that_never_answers_holds_nothing_up(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as monitor:
        monitor.bind(str(tmp_path / "monitor"))
        monitor.listen()  # connections are made, and nobody reads what they bring
        names = {"FT_RANK_MONITOR_IPC_SOCKET": str(tmp_path / "monitor"), "RANK": "0", "LOCAL_RANK": "0"}
        process = start(tmp_path, 0, "CDLL", 6.0, 5, **names, WORLD_SIZE="1")
        error = process.communicate(timeout=120)[1]
        monitor.settimeout(0)
        monitor.accept()[0].close()
    assert process.returncode == HANG_STATUS, error


def test_a_rank_ends_with_the_process_that_has_started_it() -> None:
    child = "import time; from rlhf_megatron.child_python import end_with_parent; end_with_parent(); print('ready', "
    child += "flush=True); time.sleep(600)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-P', '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        parent.kill()
        assert parent.stdout.read() == "", "the child has closed its end: it is gone"
