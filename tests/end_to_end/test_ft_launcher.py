"""A job whose launcher is ft_launcher of nvidia-resiliency-ext: a rank that stands still, and a warning."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from end_to_end.commands import ROOT
from end_to_end.runs import SUPERVISED, TRAIN, decisions, logged, make_model, make_sums, metrics_of
from nursery import cpu_environment

pytest.importorskip("nvidia_resiliency_ext", reason="nvidia-resiliency-ext is not installed (extra: resiliency)")

STEPS, SILENCE_SECONDS = 40, 12
CHANGES: dict[str, Any] = {
    "steps": STEPS,
    "checkpoint": {"export_at_end": False, "save_interval": 10},
    # Signs of life every 4 s, and a watch of the run's own that is not what ends the first attempt.
    "retry": {"hang_seconds": 40},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ft_launcher")
    (folder / "sft.yaml").write_text(yaml.safe_dump(SUPERVISED | CHANGES))
    make_model(folder, layers=1)
    make_sums(folder, STEPS * 4)
    return folder


class Job:
    """Two nodes of a job, each launch/slurm/node.sh as srun starts it, with one rank; leaves no process behind."""

    def __init__(self, folder: Path, name: str, *overrides: str, fault: str = "") -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = ["bash", str(ROOT / "launch/slurm/node.sh"), "1", "3", "ft_launcher", str(SILENCE_SECONDS)]
        command += [f"127.0.0.1:{port}", "", "", sys.executable, str(ROOT / TRAIN), "sft.yaml", f"name={name}"]
        environment = cpu_environment() | {"RLHF_MEGATRON_FAULT": fault, "TMPDIR": str(folder)}
        environment |= {"SLURM_JOB_ID": str(port), "SLURM_JOB_NUM_NODES": "2"}
        self.run, self._log = folder / "runs" / name, folder / f"{name}.log"
        with self._log.open("wb") as log:
            self._nodes = [
                psutil.Popen(
                    [*command, *overrides], cwd=folder, env=environment | {"SLURM_NODEID": node}, stdout=log, stderr=log
                )
                for node in ("0", "1")
            ]

    def signal(self, number: signal.Signals) -> None:
        """Sends it to all processes of all nodes, as Slurm does."""
        for node in self._nodes:
            if node.poll() is None:
                for process in (*node.children(recursive=True), node):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.send_signal(number)

    def succeed(self) -> None:
        """Waits for its end; raises AssertionError with the log where that is no success."""
        statuses = [node.wait(200) for node in self._nodes]
        assert statuses == [0, 0], self._log.read_text()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.signal(signal.SIGKILL)


def test_a_rank_that_stands_still_is_killed_and_the_run_goes_on(folder: Path) -> None:
    with Job(folder, "stopped", fault="stop@update:15:1") as job:
        job.succeed()
    told = [(line["what"], line["step"]) for line in decisions(job.run) if line["what"] != "fault"]
    assert told == [("start", 0), ("restart", 14), ("resume", 10), ("done", STEPS)]
    assert sorted(metrics_of(job.run)) == list(range(1, STEPS + 1))


def test_a_warning_of_the_job_has_the_run_saved(folder: Path) -> None:
    with Job(folder, "warned", "steps=100000") as job:
        deadline = time.time() + 100
        while logged(job.run) < 3 and time.time() < deadline:
            time.sleep(0.05)
        job.signal(signal.SIGUSR1)
        job.succeed()
    assert [line["what"] for line in decisions(job.run)] == ["start", "stop"]
    assert (job.run / "requeue").exists()
