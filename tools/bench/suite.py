"""Several commands on the GPUs of one machine within a limit of time, the most important first.

    python tools/bench/suite.py tools/bench/suites/two_gpus.yaml --seconds 1500 --output runs/two_gpus [--only NAME ...]

A suite lists jobs: ``name``, ``command`` (a line for bash, run at the top of the repository, in which ``$OUTPUT`` is
the output folder), ``gpus`` (1) and ``seconds``, after which the job and all that it started are killed. Jobs start in
the order of the file as GPUs become free, each with its own; one that needs more GPUs than are free holds up those
behind it. A job whose limit goes beyond the end of the suite is skipped, and so is one that needs more GPUs than there
are. suite.json and NAME.log in the output folder say what became of each. Exit status 1: a job did not succeed.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from rlhf_megatron.errors import UserError
from rlhf_megatron.runtime.command import ArgumentParser, command
from rlhf_megatron.untrusted import reason_of

ROOT = Path(__file__).resolve().parents[2]
POLL_SECONDS = 0.2


class Job(BaseModel):
    """One command of a suite."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[\w.-]+$")
    command: str
    seconds: float = Field(gt=0)
    gpus: int = Field(default=1, ge=0)


@dataclass
class Outcome:
    """The outcome of a job: "passed", "failed", "not done in time" or "skipped: ..."; seconds that it took."""

    name: str
    verdict: str
    seconds: float = 0.0


@dataclass
class Running:
    """A job that runs, with the GPUs it has and the moment it began (``time.monotonic``)."""

    job: Job
    process: subprocess.Popen[bytes]
    gpus: list[str]
    began: float

    def verdict(self) -> str | None:
        """Return its outcome; None while it runs. Kills it where its time is over."""
        status = self.process.poll()
        if status is None and time.monotonic() - self.began > self.job.seconds:
            kill_with_children(self.process.pid)
            self.process.wait()
            return "not done in time"
        return None if status is None else "passed" if status == 0 else f"failed with status {status}"


@command
def main() -> int:
    """Run the suite; the exit status."""
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("suite", type=Path, help="a YAML file, see tools/bench/suites/")
    parser.add_argument("--seconds", type=float, required=True, help="for all jobs together")
    parser.add_argument("--output", type=Path, required=True, help="folder for logs, results and suite.json")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="jobs to run; default: all")
    options = parser.parse_args()
    jobs = read_suite(options.suite)
    if unknown := set(options.only or ()) - {job.name for job in jobs}:
        raise UserError(f"--only: {options.suite} has no job {', '.join(sorted(unknown))}")
    chosen = [job for job in jobs if not options.only or job.name in options.only]
    outcomes = run_jobs(chosen, visible_gpus(), options.seconds, options.output)
    return int(any(outcome.verdict != "passed" for outcome in outcomes))


def read_suite(path: Path) -> list[Job]:
    """Return the jobs of a suite's file; raises UserError where it is none, or two jobs have one name."""
    try:
        jobs = TypeAdapter(list[Job]).validate_python(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"{path}: {reason_of(error)}") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    names = [job.name for job in jobs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"{path}: two jobs are named {twice[0]}; their logs would be one file")
    return jobs


def visible_gpus() -> list[str]:
    """Return the names of this machine's GPUs as CUDA_VISIBLE_DEVICES takes them; those of the variable where it is
    set."""
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return named or [str(index) for index in range(torch.cuda.device_count())]


def run_jobs(jobs: list[Job], gpus: list[str], seconds: float, output: Path) -> list[Outcome]:
    """Run jobs in order on ``gpus``; their outcomes, of those that ended first. suite.json follows each."""
    output.mkdir(parents=True, exist_ok=True)
    end, free = time.monotonic() + seconds, list(gpus)
    waiting, running, outcomes = list(jobs), list[Running](), list[Outcome]()

    def settle(outcome: Outcome) -> None:
        outcomes.append(outcome)
        print(f"{outcome.name}: {outcome.verdict} after {outcome.seconds:.0f} s", flush=True)
        (output / "suite.json").write_text(json.dumps([asdict(each) for each in outcomes], indent=1) + "\n")

    while waiting or running:
        for each in list(running):
            if verdict := each.verdict():
                running.remove(each)
                free += each.gpus
                settle(Outcome(each.job.name, verdict, time.monotonic() - each.began))
        while waiting and (waiting[0].gpus <= len(free) or waiting[0].gpus > len(gpus)):
            job = waiting.pop(0)
            if job.gpus > len(gpus):
                settle(Outcome(job.name, f"skipped: needs {job.gpus} GPUs, there are {len(gpus)}"))
            elif time.monotonic() + job.seconds > end:
                settle(Outcome(job.name, f"skipped: {max(0.0, end - time.monotonic()):.0f} s are left"))
            else:
                own, free = free[: job.gpus], free[job.gpus :]
                running.append(Running(job, start(job, own, output), own, time.monotonic()))
        time.sleep(POLL_SECONDS)
    return outcomes


def start(job: Job, gpus: list[str], output: Path) -> subprocess.Popen[bytes]:
    """Start a job, whose output goes to its log."""
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus), "OUTPUT": str(output.resolve())}
    with (output / f"{job.name}.log").open("wb") as log:
        return subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", job.command],
            cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip


def kill_with_children(process_id: int) -> None:
    """Kill a process and all that it started, which torchrun's ranks and vLLM's workers are, in sessions of their
    own."""
    root = psutil.Process(process_id)
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


if __name__ == "__main__":
    sys.exit(main())
