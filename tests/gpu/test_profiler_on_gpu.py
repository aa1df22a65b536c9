"""What the profiler records on a GPU."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from rlhf_megatron.monitor.profiler import Profiler
from rlhf_megatron.monitor.run_folder import RunFolder
from rlhf_megatron.recipe.operations import ProfileSection

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_kernels_of_the_gpu_are_in_the_trace_and_in_the_table(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, "run")
    profiler = Profiler(ProfileSection(steps=[1]), run, rank=0, world=1)
    matrix = torch.ones(512, 512, device="cuda")
    profiler.begin(1)
    with profiler.phase("update"), profiler.span("minibatch"):
        matrix @ matrix
        torch.cuda.synchronize()
    profiler.end()
    trace = run.profile_file(1, "update", 1, 0)
    with gzip.open(trace, "rt") as file:
        kernels = [event for event in json.load(file)["traceEvents"] if event.get("cat") == "kernel"]
    assert kernels
    table = (trace.parent / "step-1-update-rank-0.txt").read_text()
    assert "Self CUDA" in table and kernels[0]["name"][:40] in table


def test_marks_for_nsys_stand_around_phases_without_it_as_well(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, "run")
    profiler = Profiler(ProfileSection(steps=[1], tool="nsys"), run, rank=0, world=1)
    profiler.begin(1)
    with profiler.phase("generate"), profiler.span("wait"):
        torch.ones(2, device="cuda").sum().item()
    profiler.end()
    assert not run.path.exists(), "nsys writes, not we"
