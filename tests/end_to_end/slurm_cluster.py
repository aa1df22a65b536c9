"""A real Slurm with two nodes on this machine, for tests: Debian's daemons, started in a folder and ended with it.

Import it as ``from end_to_end.slurm_cluster import ...``. No test lives here.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
SBIN = ":/usr/local/sbin:/usr/sbin:/sbin"

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
FirstJobId={first_job}
MpiDefault=none
SwitchType=switch/none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/slurmd-%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=100
PartitionName=urgent Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=2
"""


def what_is_missing() -> str | None:
    """Return why no cluster can be made here, or None."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=os.environ["PATH"] + SBIN) is None]
    if absent:
        return f"Slurm is not installed here ({', '.join(absent)}); on Debian: apt-get install slurm-wlm munge"
    return None if os.getuid() == 0 else "slurmd runs jobs of several users only as root"


class Cluster:
    """Two idle nodes, and what one asks of Slurm."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment = folder, environment

    def run(self, *command: str) -> str:
        """Return the output of a command of Slurm's."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """Return what Slurm knows of a job, such as JobState and Restarts."""
        shown = self.run("scontrol", "--oneliner", "show", "job", number)
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def wait(self, what: str, until: Callable[[], bool], seconds: float = 300.0) -> None:
        """Return when ``until`` is true; raises AssertionError with the daemons' logs after ``seconds``."""
        deadline = time.monotonic() + seconds
        while not until():
            if time.monotonic() > deadline:
                logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in self.folder.glob("*.log"))
                raise AssertionError(f"no {what} after {seconds:g} s\n{logs}")
            time.sleep(0.1)


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Run a cluster with its files in ``folder``, whose path must be short: a socket lies in it."""
    path = os.environ["PATH"] + SBIN
    environment = {**os.environ, "PATH": path, "SLURM_CONF": str(folder / "slurm.conf")}
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    (folder / "state").mkdir()
    for node in ("n1", "n2"):
        (folder / f"slurmd-{node}").mkdir()
    # Jobs take their port from their number.
    first_job = 1 + secrets.randbelow(9000)
    values = {"host": socket.gethostname(), "folder": folder, "ports": _free_ports(3), "first_job": first_job}
    (folder / "slurm.conf").write_text(CONFIGURATION.format(**values))
    files = {"key-file": key, "socket": folder / "munge.socket", "pid-file": folder / "munged.pid"}
    files |= {"log-file": folder / "munged.log", "seed-file": folder / "munge.seed"}
    daemons = [
        ["munged", "--foreground", "--force", *(f"--{name}={path}" for name, path in files.items())],
        ["slurmctld", "-D", "-i"],
        ["slurmd", "-D", "-N", "n1"],
        ["slurmd", "-D", "-N", "n2"],
    ]
    started = []
    try:
        for number, daemon in enumerate(daemons):
            log = (folder / f"{number}-{daemon[0]}.log").open("wb")
            program = [shutil.which(daemon[0], path=path) or daemon[0], *daemon[1:]]
            with log:
                started.append(subprocess.Popen(program, env=environment, stdout=log, stderr=log, cwd=folder))
            if daemon[0] == "munged":
                _wait_for(folder / "munge.socket")
        made = Cluster(folder, environment)
        made.wait("two idle nodes", lambda: _states(environment) == ["idle", "idle"], 60.0)
        yield made
    finally:
        _kill_what_jobs_left(environment["SLURM_CONF"])
        for process in reversed(started):
            process.terminate()
        for process in started:
            try:
                process.wait(20.0)
            except subprocess.TimeoutExpired:
                process.kill()


def _kill_what_jobs_left(configuration: str) -> None:
    """Kill what jobs left: Slurm's steps outlive its daemons."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            step = process.name().startswith("slurmstepd") or "SLURM_JOB_ID" in process.environ()
            if step and process.environ().get("SLURM_CONF") == configuration:
                process.kill()


def _states(environment: dict[str, str]) -> list[str]:
    command = ["sinfo", "--noheader", "--Node", "--partition=main", "--format=%T"]
    return subprocess.run(command, env=environment, capture_output=True, text=True).stdout.split()


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20.0
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.05)


def _free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in held]
    for server in held:
        server.close()
    return ports
