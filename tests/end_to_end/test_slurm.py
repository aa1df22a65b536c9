"""A job of launch/submit.py on a real Slurm with two nodes: told to save, preempted, a rank killed, and yet the numbers
of a run that nobody disturbed; a sweep side by side; a cancelled job that stays cancelled."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from end_to_end.commands import python, torchrun
from end_to_end.runs import SUPERVISED, TRAIN, decisions, logged, make_model, make_sums, metrics_of
from end_to_end.slurm_cluster import Cluster, cluster, what_is_missing

pytestmark = pytest.mark.skipif(what_is_missing() is not None, reason=str(what_is_missing()))

STEPS = 600
JOB = {
    "steps": STEPS,
    "cluster": {"gpus_per_node": 1},
    "slurm": {
        "partition": "main",
        "request_gpus": False,
        "rendezvous_host": "127.0.0.1",  # the nodes' names do not resolve
        "time_limit_hours": 1,
        "signal_seconds": 300,
    },
}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Return two nodes; the commands of this process find them."""
    with cluster(tmp_path_factory.mktemp("slurm")) as made, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", made.environment["SLURM_CONF"])
        patch.setenv("PATH", made.environment["PATH"])
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with random weights, data, and the recipe of a job."""
    path = tmp_path_factory.mktemp("jobs")
    (path / "sft.yaml").write_text(yaml.safe_dump(SUPERVISED | JOB))
    make_model(path, layers=1)
    make_sums(path, 60)
    return path


def submit(folder: Path, *arguments: str) -> str:
    """Return the number of a new job."""
    done = python("launch/submit.py", "sft.yaml", *arguments, folder=folder).check()
    return done.out.splitlines()[0].removeprefix("job ")


def start_again(slurm: Cluster, number: str, restarts: int) -> None:
    """Wait until a job is back in the queue, where Slurm would hold it for two minutes, and let it start.

    Not within two seconds: a node takes a job that was killed in the same second for one that is dead already.
    """
    slurm.wait(f"requeue {restarts}", lambda: slurm.job(number)["Restarts"] == str(restarts))
    slurm.wait("requeued job", lambda: slurm.job(number)["JobState"] == "PENDING")
    time.sleep(2.0)
    slurm.run("scontrol", "update", f"JobId={number}", "StartTime=now")


def rank_process(run: Path, rank: int) -> psutil.Process:
    """Return the process of a rank of a job, on whichever node."""
    for process in psutil.process_iter():
        try:
            environment = process.environ()
        except psutil.Error:
            continue
        if environment.get("RLHF_MEGATRON_LOGS") == str(run / "logs") and environment.get("RANK") == str(rank):
            return process
    raise LookupError(f"no rank {rank} is running")


def test_a_job_that_is_warned_preempted_and_loses_a_rank_ends_as_if_nothing_had_been(
    folder: Path, slurm: Cluster
) -> None:
    with torchrun(2, TRAIN, "sft.yaml", folder=folder) as command:
        command.finish().check()
    run = folder / "runs" / "job"
    number = submit(folder, "name=job", "checkpoint.save_interval=50", "--nodes=2")

    slurm.wait("steps", lambda: logged(run) > 3)
    slurm.run("scancel", "--signal=USR1", "--batch", number)  # as Slurm does before the limit
    start_again(slurm, number, 1)
    assert decisions(run)[-1]["why"] == "SIGUSR1 came"

    first = decisions(run)[-1]["step"]
    slurm.wait("steps after the requeue", lambda: logged(run) > first + 3)
    slurm.run("sbatch", "--partition=urgent", "--nodes=2", "--output=/dev/null", "--wrap", "true")
    start_again(slurm, number, 2)
    assert decisions(run)[-1]["why"] == "SIGTERM came"

    second = decisions(run)[-1]["step"]
    slurm.wait("steps after the preemption", lambda: logged(run) > second + 3)
    rank_process(run, 1).kill()
    slurm.wait("end", lambda: decisions(run)[-1]["what"] == "done")
    slurm.wait("completed job", lambda: slurm.job(number)["JobState"] == "COMPLETED")
    told = [line["what"] for line in decisions(run) if line["what"] != "fault"]
    assert told == ["start", "stop", "restart", "resume", "stop", "restart", "resume", "restart", "resume", "done"]
    assert {line["launch"] for line in decisions(run)} == {f"job {number}"}
    assert metrics_of(run) == metrics_of(folder / "runs" / "whole") and logged(run) >= STEPS

    logs = run / "logs"
    attempts = [f"attempt-{count}" for count in range(4)]
    assert sorted(path.name for path in logs.iterdir()) == [*attempts, "latest", f"slurm-{number}.log"]
    for name in attempts:
        assert sorted(path.name for path in (logs / name).iterdir()) == ["rank-0.log", "rank-1.log"]
    assert (logs / "latest").resolve() == logs / "attempt-3"
    assert "resuming from runs/job/checkpoints/" in (logs / "latest" / "rank-0.log").read_text()


def test_the_runs_of_a_sweep_share_the_machine_and_are_cancelled_for_good(folder: Path, slurm: Cluster) -> None:
    (folder / "sweep.txt").write_text("seed=1\nseed=2\n")
    number = submit(folder, "steps=100000", "--array=sweep.txt")
    runs = [folder / "runs" / f"whole-{task}" for task in range(2)]
    slurm.wait("steps of both runs", lambda: all(logged(run) > 3 for run in runs))
    slurm.run("scancel", number)
    slurm.wait("end of the job", lambda: slurm.run("squeue", "--noheader", "--jobs", number) == "")
    for task, run in enumerate(runs):
        assert slurm.job(f"{number}_{task}")["JobState"] == "CANCELLED"
        assert decisions(run)[-1]["why"] == "SIGTERM came", "what was done is saved all the same"
        assert yaml.safe_load((run / "recipe.yaml").read_text())["seed"] == task + 1
