"""The benchmark of regathering at toy size: both ways leave the same bits, and its rows say what was missed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import regather as bench

from parallel.ranks import run_ranks

BENCH = Path("tools/bench").resolve()


@pytest.mark.parametrize(
    ("model", "pairs"),
    [
        ("toy", ["TP2 = TP2", "TP2 -> TP1 x 2", "TP1 x DP2 -> TP2", "TP1 PP2 -> TP2"]),
        ("toy-mixture", ["EP2 -> TP2", "EP2 -> EP2"]),
    ],
)
def test_all_pairs_are_measured_and_drawn(model: str, pairs: list[str], tmp_path: Path) -> None:
    output = tmp_path / "regather.json"
    output.write_text(json.dumps({"rows": []}))
    rows: list[dict[str, Any]] = run_ranks(
        f"{BENCH / 'regather_measure.py'}:measure", 2, {"model": model, "output": str(output)}
    )[0]
    assert rows == json.loads(output.read_text())["rows"]
    assert [row["layouts"] for row in rows] == pairs
    for row in rows:
        assert (row["bytes_received"] > 0) == (row["layouts"] not in ("TP2 = TP2", "TP1 x DP2 -> TP2", "EP2 -> EP2"))
        assert row["bytes_local"] <= row["rollout_bytes"] <= row["bytes_local"] + row["bytes_received"]
        assert all(row[f"{kind}_seconds"] > 0 for kind in ("floor", "regather", "whole_tensors"))
    bench.draw(rows, tmp_path / "regather.png")
    assert (tmp_path / "regather.png").stat().st_size > 5000


def test_what_misses_its_target_is_named() -> None:
    good = {
        "model": "7B", "gpus": 2, "layouts": "TP2 -> TP1 x 2", "equal": False, "bytes_received": 8 << 30,
        "rollout_bytes": 16 << 30,
        "times_the_floor": 1.2, "times_faster": 11.0, "extra_mb": 300.0,
    }  # fmt: skip
    misses = bench.misses
    assert misses([good, good | {"model": "toy", "times_the_floor": 9.0}]) == []
    assert misses([good | {"model": "0.5B", "times_faster": 8.0, "times_the_floor": 1.26}]) == [
        "0.5B on 2 TP2 -> TP1 x 2: 1.26 times the floor, above 1.25"
    ]
    bad = {"times_the_floor": 1.4, "times_faster": 8.0, "extra_mb": 500.0}
    assert len(misses([good | bad])) == 3
    assert misses([good | {"equal": True}]) == [
        "7B on 2 TP2 -> TP1 x 2: 8589934592 bytes cross a link between equal layouts"
    ]
    assert misses([{"model": "32B", "gpus": 2, "failed": "the ranks ended with 1"}]) == [
        "32B on 2: the ranks ended with 1"
    ]


def test_rounds_of_a_pair_become_its_medians() -> None:
    def one(layouts: str, seconds: float, times: float) -> dict[str, Any]:
        return {
            "model": "0.5B", "gpus": 2, "layouts": layouts, "equal": False,
            "regather_seconds": seconds, "times_the_floor": times,
        }  # fmt: skip

    out_of_memory = {"model": "0.5B", "gpus": 2, "layouts": "B", "failed": "CUDA out of memory"}
    ended = {"model": "0.5B", "gpus": 2, "failed": "not done after 75 s"}
    rounds = [
        [one("A", 2.0, 1.3), one("B", 1.0, 1.0)],
        [one("A", 9.0, 1.1), out_of_memory],
        [one("A", 1.0, 1.2), ended],
    ]
    of_a = one("A", 2.0, 1.2) | {"times_the_floor_of_rounds": [1.3, 1.1, 1.2]}
    assert bench.of_rounds(rounds) == [of_a, out_of_memory, ended]
