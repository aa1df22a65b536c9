"""The sweep of the raw engines: both alone, in processes of their own, and our step beside the best of each."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import raw_megatron
import raw_sweep

from end_to_end.commands import ROOT, Command
from rlhf_megatron.rollout.vllm.process_environment import has_gpu

SECONDS_OF_OURS = {"generate": 4.0, "update": 3.0}


@pytest.mark.grid
@pytest.mark.skipif(has_gpu(), reason="the toy is for machines without a GPU")
def test_engines_are_swept_and_our_step_is_measured_beside_them(tmp_path: Path) -> None:
    output = tmp_path / "sweep.json"
    options = ["--models", "toy", "--steps", "2", "--repeats", "2", "--vllm", "first"]
    folders = [f"--output={output}", f"--work={tmp_path / 'work'}"]
    script = str(ROOT / "tools" / "bench" / "raw_sweep.py")
    with Command([sys.executable, script, *options, *folders], tmp_path, warm=False) as command:
        command.finish().check()
    [row] = json.loads(output.read_text())["rows"]
    assert [(way["name"], len(way["seconds"])) for way in row["vllm"]] == [("first", 1), ("first", 2)]
    ways = {way["loss"]: way for way in row["megatron"]}
    assert ways.keys() == set(raw_sweep.LOSSES) and "failed" in ways.pop("te"), "Transformer Engine needs a GPU"
    by_megatron = ways["plain"]["loss_of_a_token"]
    assert 0.5 < by_megatron / math.log(512) < 2
    for way in ways.values():
        assert way["loss_of_a_token"] == pytest.approx(by_megatron, rel=1e-5)
    assert sorted(len(way["seconds"]) for way in ways.values()) == [1, 1, 2]
    assert row["of_ceiling"] > 0 and row["ceiling"].keys() == {"generate", "update"}


def test_rows_are_packed_whole_and_once() -> None:
    rows = [5, 9, 3, 20, 7, 1]
    cut = raw_megatron.pieces(rows, 12)
    assert sorted(length for each in cut for length in each) == sorted(rows)
    assert all(sum(each) <= 12 or each == [20] for each in cut)


def test_faster_settings_are_combined_and_the_fastest_decides() -> None:
    found = [
        {"name": "older model runner", "seconds": [9.0]},
        {"name": "newer model runner", "seconds": [8.0]},
        {"name": "512 sequences", "seconds": [9.5]},
    ]
    engine, environment = raw_sweep.together([one["name"] for one in found], found)
    assert engine == {"max_num_seqs": 512} and environment == {"VLLM_USE_V2_MODEL_RUNNER": "1"}


@pytest.mark.parametrize(
    ("vllm", "share"),
    [pytest.param(3.5, (3.5 + 2) / 8, id="the raw engine was faster"), pytest.param(5.0, (4 + 2) / 8, id="ours was")],
)
def test_the_ceiling_of_a_phase_is_the_fastest_engine(vllm: float, share: float) -> None:
    row = of_ours() | {
        "vllm": [{"seconds": [9.0]}, {"failed": "too little memory"}, {"seconds": [vllm, 9.9, vllm]}],
        "megatron": [{"seconds": [2.0]}],
    }
    result = raw_sweep.of_ceiling(row)
    assert result["ceiling"] == {"generate": vllm, "update": 2.0}
    assert result["of_ceiling"] == pytest.approx(share)
    assert bool(raw_sweep.misses(row | result)) == (share < raw_sweep.OF_CEILING_WANTED)


def test_an_engine_that_never_ran_leaves_its_reason() -> None:
    row = of_ours() | {"vllm": [{"failed": "no wheel"}], "megatron": [{"seconds": [2.0]}]}
    assert raw_sweep.of_ceiling(row) == {"failed": "vllm: no wheel"}


def of_ours() -> dict[str, Any]:
    """Return the row of a step of 8 s, without the engines."""
    phases = {phase: {"median": seconds} for phase, seconds in SECONDS_OF_OURS.items()}
    return {"model": "7B", "gpus": 1, "ours": {"phase_seconds": phases, "step_seconds": {"median": 8.0}}}
