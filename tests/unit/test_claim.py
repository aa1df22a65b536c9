"""Who may train in a run's folder."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from rlhf_megatron.runtime import claim as claims
from rlhf_megatron.runtime.claim import Claim, FolderInUse
from rlhf_megatron.runtime.processes import identity, lives

HOLDS = """
import sys
from pathlib import Path
from rlhf_megatron.runtime import claim
claim._SECONDS_BETWEEN_SIGNS = 0.1
try:
    mine = claim.Claim(Path(sys.argv[1]), 0.5)
except claim.FolderInUse as error:
    sys.exit(f"refused: {error}")
print("held", flush=True)
sys.stdin.readline()
mine.release()
"""


def holder(run: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-c", HOLDS, str(run)]
    return subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_the_folder_is_one_jobs_until_it_ends(tmp_path: Path) -> None:
    with holder(tmp_path) as first:
        assert first.stdout is not None and first.stdout.readline() == "held\n"
        with pytest.raises(FolderInUse, match=rf"{tmp_path}: process {first.pid} of .* trains in this folder"):
            Claim(tmp_path)
        first.communicate("end\n", timeout=60)
    assert not list(tmp_path.iterdir())
    with holder(tmp_path) as killed:
        assert killed.stdout is not None and killed.stdout.readline() == "held\n"
        killed.kill()
        psutil.wait_procs([psutil.Process(killed.pid)], 1)  # it is a zombie now, which holds nothing
        Claim(tmp_path).release()
    assert not list(tmp_path.iterdir())


def test_of_many_that_come_together_one_gets_the_folder(tmp_path: Path) -> None:
    (tmp_path / "claim").write_text("another/machine 1 5\n000000000007\n")  # which says nothing any more
    started = [holder(tmp_path) for _ in range(4)]
    try:
        deadline = time.monotonic() + 60
        while sum(process.poll() is not None for process in started) < 3 and time.monotonic() < deadline:
            time.sleep(0.1)
        ends = [process.poll() for process in started]
        assert sorted(ends, key=str) == [1, 1, 1, None]
        assert (tmp_path / "claim").read_text().split()[1] == str(started[ends.index(None)].pid)
    finally:
        for process in started:
            process.kill()
            process.communicate()


def test_a_holder_on_another_machine_is_known_by_its_signs_of_life(tmp_path: Path) -> None:
    path, ended = tmp_path / "claim", threading.Event()

    def live() -> None:
        for count in range(10**6):
            with path.open("r+b") as file:
                file.write(f"another/machine 1 5\n{count:012d}\n".encode())
            if ended.wait(0.2):
                return

    path.touch()
    elsewhere = threading.Thread(target=live)
    elsewhere.start()
    try:
        with pytest.raises(FolderInUse, match="process 1 of another trains in this folder"):
            Claim(tmp_path, seconds_of_silence=20.0)
    finally:
        ended.set()
        elsewhere.join()
    claim = Claim(tmp_path, seconds_of_silence=0.5)
    assert path.read_text().startswith(identity(os.getpid()))
    claim.release()


def test_a_process_that_has_lost_the_folder_ends(tmp_path: Path) -> None:
    with holder(tmp_path) as slow:
        assert slow.stdout is not None and slow.stdout.readline() == "held\n"
        (tmp_path / "claim").unlink()  # by a person: it is made again
        deadline, again = time.monotonic() + 30, ""
        while not again and time.monotonic() < deadline:  # for a moment it is there and nothing is in it
            time.sleep(0.05)
            with contextlib.suppress(FileNotFoundError):
                again = (tmp_path / "claim").read_text()
        assert again.split()[1] == str(slow.pid)
        (tmp_path / "claim").write_text("another/machine 1 5\n000000000000\n")
        assert slow.wait(30) == claims._ENDED_STATUS
        assert slow.stderr is not None and "another job has taken this folder" in slow.stderr.read()
    assert (tmp_path / "claim").read_text().startswith("another/machine")


def test_a_process_is_told_from_all_others() -> None:
    with subprocess.Popen([sys.executable, "-P", "-c", "input()"], stdin=subprocess.PIPE) as process:
        name = identity(process.pid)
        assert lives(name) and identity(os.getpid()) != name
        machine, number, began = name.split()
        assert not lives(f"{machine} {number} {int(began) - 1}"), "an earlier process of this number"
        assert lives(f"elsewhere/0 {number} {began}") is None
        process.communicate(b"\n")
    assert not lives(name)
