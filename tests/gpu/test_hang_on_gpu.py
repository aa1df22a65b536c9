"""A hang of two GPUs: the report of the rank that waits has NCCL's flight recorder, and the run goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
import yaml

from end_to_end.commands import ROOT
from end_to_end.runs import SUPERVISED, TRAIN, decisions, make_model, steps_of

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

STEPS, STOPPED_IN = 8, 5


def test_a_hang_leaves_what_nccl_was_doing(tmp_path: Path) -> None:
    make_model(tmp_path, layers=1)
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{first} + {second} ="}],
            "reward_model": {"style": "rule", "ground_truth": str(first + second)},
        }
        for first in range(8)
        for second in range(8)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    changes = {"steps": STEPS, "retry": {"hang_seconds": 15, "hang_seconds_at_start": 300}}
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(SUPERVISED | changes))
    torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, "--max-restarts=1", str(ROOT / TRAIN), "sft.yaml"]
    environment = os.environ | {"RLHF_MEGATRON_FAULT": f"stop@update:{STOPPED_IN}:1"}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=300)

    run = tmp_path / "runs" / SUPERVISED["name"]
    (hang,) = [line for line in decisions(run) if line["what"] == "hang"]
    assert f"rank 0 in update of step {STOPPED_IN}; rank 1 said nothing" in hang["why"]
    recorded = json.loads((tmp_path / hang["stacks"] / "rank-0.nccl.json").read_text())
    states = [entry["state"] for entry in recorded["entries"]]
    assert "completed" in states and states[-1] != "completed", "what was waited for is the last that began"
    assert sorted(steps_of(run)) == list(range(1, STEPS + 1))
