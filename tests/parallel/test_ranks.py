"""The helper that starts ranks: results by rank, errors with their output, and no process left after a timeout."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from parallel.ranks import run_ranks


def add_ranks(amount: float) -> dict[str, Any]:
    value = torch.tensor([dist.get_rank() + amount])
    dist.all_reduce(value)
    return {"rank": dist.get_rank(), "sum": value.item()}


def fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank one has had enough")
    dist.barrier()


def sleep_long(pid_folder: str) -> None:
    (Path(pid_folder) / str(psutil.Process().pid)).touch()
    time.sleep(600)


def test_results_come_back_in_rank_order() -> None:
    results = run_ranks(add_ranks, world_size=2, arguments={"amount": 0.5})
    assert results == [{"rank": 0, "sum": 2.0}, {"rank": 1, "sum": 2.0}]


def test_an_error_carries_the_output_of_the_rank() -> None:
    with pytest.raises(RuntimeError, match="rank one has had enough"):
        run_ranks(fail_on_rank_one, world_size=2)


def test_a_timeout_kills_every_rank(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ran past 12 s"):
        run_ranks(sleep_long, world_size=1, arguments={"pid_folder": str(tmp_path)}, timeout=12)
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 1
    assert not any(psutil.pid_exists(pid) for pid in pids)
