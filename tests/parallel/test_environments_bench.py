"""The benchmark of slow environments at toy size: the same turns with waits and without, and where the time went."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import environments as bench
import pytest

from parallel.ranks import run_ranks
from rlhf_megatron.recipe import load_rl
from rlhf_megatron.rollout.vllm.process_environment import has_gpu

TOY = bench.Shape(None, 16, 3, 8, waits=0.05, rollout={"max_num_seqs": 8})


def measured_on_rank(folder: str) -> list[list[dict[str, float]]]:
    with contextlib.chdir(folder):
        (measured,) = bench.measure(TOY, load_rl(Path("recipe.yaml")), steps=1)
    return [measured[True], measured[False]]


@pytest.mark.skipif(has_gpu(), reason="the toy has float32 weights on vLLM's CPU kernels")
def test_the_same_turns_with_waits_and_without(tmp_path: Path) -> None:
    folder = bench.folder_with_model(tmp_path / "work")
    recipe = bench.prepare(TOY, folder)
    ((slow, fast),) = run_ranks(measured_on_rank, 1, {"folder": str(folder)})
    expected = sum(sum(TOY.lengths(row)) for row in range(16))
    for step in (*slow, *fast):
        assert step["tokens"] == expected and step["engine_steps"] > expected / 8
        assert step["engine_seconds"] > 0 and step["idle_seconds"] >= 0 and step["other_seconds"] > 0
        assert step["prefix_cache_hit_rate"] > 0.3, "a turn begins with what the cache has of those before"
    mean = sum(sum(TOY.latencies(row)) for row in range(16)) / (16 * 3)
    assert slow[0]["latency_mean"] >= mean * 3 / 4, "of a turn, or of the beginning, which is at once"
    bench.write(tmp_path / "found.json", "toy", recipe, {True: slow, False: fast})
    row: dict[str, Any] = json.loads((tmp_path / "found.json").read_text())["rows"][0]
    assert row["ratio"]["median"] == pytest.approx(slow[0]["tokens_per_second"] / fast[0]["tokens_per_second"])


def test_latencies_are_of_the_distribution_that_the_report_names() -> None:
    shape = bench.SHAPES["0.5B"]
    drawn = sorted(seconds for row in range(256) for seconds in shape.latencies(row))
    assert drawn[0] > 0 and drawn[-1] == 5.0 and 0.45 < drawn[len(drawn) // 2] < 0.55
    assert 0.7 < sum(drawn) / len(drawn) < 0.85
