"""Which files a profile leaves, and what is refused."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_megatron.errors import MonitorError
from rlhf_megatron.monitor.profiler import Profiler
from rlhf_megatron.monitor.run_folder import RunFolder
from rlhf_megatron.recipe.operations import ProfileSection


def test_a_phase_that_comes_twice_in_a_step_is_profiled_twice_and_one_within_another_with_that(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, "run")
    profiler = Profiler(ProfileSection(steps=[3], phases=["generate", "evaluate"]), run, rank=0, world=1)
    for step in (2, 3):
        profiler.begin(step)
        for name in ("generate", "score", "generate"):
            with profiler.phase(name):
                torch.ones(2).add(1)
        with profiler.phase("evaluate"), profiler.phase("generate"):
            torch.ones(2).add(1)
        profiler.end()
    with profiler.phase("evaluate"):
        pass
    names = ("generate-rank-0", "generate-2-rank-0", "evaluate-rank-0")
    expected = {f"step-3-{name}.{end}" for name in names for end in ("json.gz", "txt")}
    assert {path.name for path in (run.path / "profile").iterdir()} == expected


def test_a_profile_ends_after_its_duration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(tmp_path, "run")
    for seconds, expected in ((60.0, 4), (1e-6, 0)):
        section = ProfileSection(steps=[1], phases=["update", "regather"], duration_seconds=seconds)
        profiler = Profiler(section, run, rank=0, world=1)
        profiler.begin(1)
        for name in ("update", "regather"):
            with profiler.phase(name):
                torch.ones(2).add(1)
        profiler.end()
        found = list((run.path / "profile").iterdir()) if expected else []
        assert len(found) == expected
        for path in found:
            path.unlink()
    assert not list((run.path / "profile").iterdir())


def test_nsys_stops_within_a_phase_and_once_more_at_the_end_of_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The marks alone, where there is no GPU: CUDA's own calls stand in for themselves in tests/gpu."""
    marks, stopped = list[str](), threading.Event()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: marks.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: (marks.append("stop"), stopped.set()))
    section = ProfileSection(steps=[1, 2], tool="nsys", duration_seconds=0.01)
    profiler = Profiler(section, RunFolder(tmp_path, "run"), rank=0, world=1)
    profiler.begin(1)
    assert stopped.wait(30)
    profiler.end()
    assert marks == ["start", "stop", "stop"]


@pytest.mark.parametrize(
    "section, message",
    [
        ({"steps": [1], "ranks": [0, 2]}, "monitor.profile.ranks: there is no rank 2 of 2"),
        pytest.param(
            {"steps": [1], "tool": "nsys"},
            "monitor.profile.tool: nsys records GPUs, and there is none; set it to torch",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_a_profile_that_cannot_be_taken_is_refused_in_one_line(
    tmp_path: Path, section: dict[str, Any], message: str
) -> None:
    with pytest.raises(MonitorError, match=re.escape(message)):
        Profiler(ProfileSection(**section), RunFolder(tmp_path, "run"), rank=0, world=2)
