"""The benchmark of rollouts at toy size: all ways generate what they are to, and its report says what was missed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import rollout as bench

from parallel.ranks import run_ranks
from rlhf_megatron.rollout.vllm.process_environment import has_gpu

BENCH = Path("tools/bench/rollout.py").resolve()


@pytest.mark.skipif(has_gpu(), reason="the toy has float32 weights on vLLM's CPU kernels")
def test_all_ways_generate_the_same_lengths(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(bench.TOY))
    settings = {"model": str(tmp_path), "size": "toy", "repeats": 1, "oversample": 1.5}
    one, other = run_ranks(f"{BENCH}:measure", 2, settings)
    assert one["one_replica"]["tokens"] > 0 and one["one_replica"]["ours_over_llm_generate"]["median"] > 0
    assert other["replicas"].keys() == one["replicas"].keys()
    static, queue, resumed = (one["replicas"][name] for name in ("static", "queue", "resumed"))
    assert static["tokens"] == queue["tokens"] and queue["aborted"]["median"] == 0
    assert resumed["resumed"]["median"] > 0, "the round before, which is not measured, left some"
    assert one["replicas"]["resumed_over_static_in_engine_steps"]["median"] > 1


def test_what_is_below_its_target_is_named() -> None:
    report: dict[str, Any] = {"one_replica": {"ours_over_llm_generate": {"median": 0.96}}}
    assert bench.misses(report, bench.TARGETS) == ["ours_over_llm_generate: 0.960, below 0.97"]
    report["replicas"] = {"resumed_over_static": {"median": 1.31}}
    report["one_replica"]["ours_over_llm_generate"]["median"] = 0.98
    assert bench.misses(report, bench.TARGETS) == []
