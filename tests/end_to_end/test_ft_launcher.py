"""A job whose launcher is ft_launcher of nvidia-resiliency-ext: a rank that stands still, a warning, and its end."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from end_to_end.commands import ROOT, Command
from end_to_end.runs import SUPERVISED, TRAIN, decisions, logged, make_model, make_sums, metrics_of, wait_for
from parallel.ranks import free_port

pytest.importorskip("nvidia_resiliency_ext", reason="nvidia-resiliency-ext is not installed (extra: resiliency)")

SILENCE_SECONDS = 12
CHANGES: dict[str, Any] = {
    "steps": 100_000,
    "checkpoint": {"export_at_end": False, "save_interval": 10},
    # Signs of life every 4 s, and a watch of the run's own that is not what ends the first attempt.
    "retry": {"hang_seconds": 40},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ft_launcher")
    (folder / "sft.yaml").write_text(yaml.safe_dump(SUPERVISED | CHANGES))
    make_model(folder, layers=1)
    make_sums(folder, 160)
    return folder


@contextlib.contextmanager
def job(folder: Path, count: int, *keys: str, fault: str = "") -> Iterator[list[Command]]:
    """Run the ``count`` nodes of a job, each launch/slurm/node.sh as srun starts it, with one rank."""
    port = free_port()
    variables = [f"RLHF_MEGATRON_FAULT={fault}", f"TMPDIR={folder}", f"SLURM_JOB_ID={port}"]
    variables.append(f"SLURM_JOB_NUM_NODES={count}")
    node = ["bash", str(ROOT / "launch/slurm/node.sh"), "1", "3", "ft_launcher", str(SILENCE_SECONDS)]
    node += [f"127.0.0.1:{port}", "", "", sys.executable, str(ROOT / TRAIN), "sft.yaml", *keys]
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(Command(["env", *variables, f"SLURM_NODEID={number}", *node], folder, warm=False))
            for number in range(count)
        ]


@pytest.mark.grid  # torchrun's restarts are in every run of the tests
def test_a_rank_that_stands_still_is_killed_and_a_warning_of_the_job_has_the_run_saved(folder: Path) -> None:
    run = folder / "runs" / "whole"
    with job(folder, 2, fault="stop@update:15:1") as nodes:
        wait_for(nodes[0], lambda: any(line["what"] == "resume" for line in decisions(run)))
        records = logged(run)
        wait_for(nodes[0], lambda: logged(run) > records + 3)
        for process in [process for node in nodes for process in node.family()]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGUSR1)  # to all processes of all nodes, as Slurm does
        for node in nodes:
            node.finish().check()
    lines = [line for line in decisions(run) if line["what"] != "fault"]
    told = [(line["what"], line["step"]) for line in lines[:-1]]
    assert told == [("start", 0), ("restart", 14), ("resume", 10)] and lines[-1]["what"] == "stop"
    assert sorted(metrics_of(run)) == list(range(1, lines[-1]["step"] + 1))
    assert (run / "requeue").exists()

    steps = lines[-1]["step"] + 1
    for _ in ("to the end", "again, with nothing left to do"):
        with job(folder, 1, f"steps={steps}") as [node]:
            finished = node.finish().check()
        assert decisions(run)[-1]["what"] == "done" and not (run / "requeue").exists()
    assert f"all {steps} steps are done, and nothing is left" in finished.out
    assert sorted(metrics_of(run)) == list(range(1, steps + 1))
