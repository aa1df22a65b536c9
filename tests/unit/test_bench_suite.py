"""Suites of benchmarks for one machine: jobs by GPUs and time, what becomes of each, and the files that are kept."""

from __future__ import annotations

import itertools
import json
import shlex
import time
from pathlib import Path

import psutil
import pytest
import yaml
from suite import Job, read_suite, run_jobs

from rlhf_megatron.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
SUITES = sorted((ROOT / "tools" / "bench" / "suites").glob("*.yaml"))


def verdicts(output: Path) -> dict[str, str]:
    return {each["name"]: each["verdict"] for each in json.loads((output / "suite.json").read_text())}


def values(words: list[str], option: str) -> list[str]:
    """Return the values behind an option, up to the next."""
    if option not in words:
        return []
    return list(itertools.takewhile(lambda word: not word.startswith("--"), words[words.index(option) + 1 :]))


def test_jobs_end_as_their_commands_do(tmp_path: Path) -> None:
    jobs = [
        Job(name="good", command="echo $OUTPUT", seconds=60, gpus=0),
        Job(name="bad", command="false; true", seconds=60, gpus=0),
        Job(name="long", command="sleep 4321 & sleep 4321", seconds=0.5, gpus=0),
        Job(name="wide", command="true", seconds=60, gpus=3),
        Job(name="late", command="true", seconds=9999, gpus=0),
    ]
    run_jobs(jobs, ["0", "1"], 300.0, tmp_path)
    found = verdicts(tmp_path)
    assert {name: found[name] for name in ("good", "bad", "long")} == {
        "good": "passed", "bad": "failed with status 1", "long": "not done in time",
    }  # fmt: skip
    assert found["wide"] == "skipped: needs 3 GPUs, there are 2"
    assert found["late"].startswith("skipped: ") and found["late"].endswith(" s are left")
    assert (tmp_path / "good.log").read_text() == f"{tmp_path}\n"
    left = [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == ["sleep", "4321"]]
    assert left == [], "a job that is ended leaves nothing behind"


def test_jobs_have_gpus_of_their_own(tmp_path: Path) -> None:
    waits = "echo $CUDA_VISIBLE_DEVICES; touch $OUTPUT/{0}; while [ ! -e $OUTPUT/{1} ]; do sleep 0.05; done"
    jobs = [
        Job(name="one", command=waits.format("a", "b"), seconds=60),
        Job(name="two", command=waits.format("b", "a"), seconds=60),  # each waits for the other: they run at once
        Job(name="both", command="echo $CUDA_VISIBLE_DEVICES", seconds=60, gpus=2),
    ]
    began = time.monotonic()
    run_jobs(jobs, ["4", "6"], 300.0, tmp_path)
    assert set(verdicts(tmp_path).values()) == {"passed"}, f"after {time.monotonic() - began:.0f} s"
    devices = [(tmp_path / f"{job.name}.log").read_text().strip() for job in jobs]
    assert sorted(devices[:2]) == ["4", "6"] and sorted(devices[2].split(",")) == ["4", "6"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("- {name: a, command: b}", "0.seconds: Field required"),
        ("- {name: a/b, command: b, seconds: 1}", "0.name: "),
        ("- &a {name: a, command: b, seconds: 1}\n- *a", "two jobs are named a"),
        ("- [", "while parsing"),
    ],
)
def test_a_suite_that_is_none_is_refused(text: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "suite.yaml").write_text(text)
    with pytest.raises(UserError, match="suite.yaml") as refusal:
        read_suite(tmp_path / "suite.yaml")
    assert complaint in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("path", SUITES, ids=lambda path: path.stem)
def test_suites_ask_for_what_there_is(path: Path) -> None:
    shapes = yaml.safe_load((ROOT / "tools" / "bench" / "step_shapes.yaml").read_text())
    known = {(shape["model"], shape["gpus"]) for shape in shapes}
    for job in read_suite(path):
        words = shlex.split(job.command)
        files = [word for word in words if word.startswith(("tools/", "tests/", "recipes/"))]
        assert files and all((ROOT / name).exists() for name in files), job
        if "tools/bench/step.py" in words:
            models, numbers = values(words, "--models"), values(words, "--gpus") or ["1"]
            assert {(model, int(number)) for model in models for number in numbers} <= known, job
            assert max(map(int, numbers)) == job.gpus
