"""The benchmark of decoding at toy size: as many tokens as asked for, and what a step reads follows from the model."""

from __future__ import annotations

import json
from pathlib import Path

import decode as bench
import pytest
import rollout

from parallel.ranks import run_ranks
from rlhf_megatron.rollout.vllm.process_environment import has_gpu

BENCH = Path("tools/bench/decode.py").resolve()
QWEN_7B = "recipes/models/qwen2.5-7b"


@pytest.mark.skipif(has_gpu(), reason="the toy has float32 weights on vLLM's CPU kernels")
def test_steps_are_timed_by_number_of_sequences(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(rollout.TOY))
    settings = {"model": str(tmp_path), "name": "bfloat16", "running": [2, 4], "size": "toy"}
    (rows,) = run_ranks(f"{BENCH}:measure", 1, settings)
    assert [row["running"] for row in rows] == [2, 4]
    assert all(len(row[way]) == 3 for row in rows for way in ("step_ms", "step_ms_of_inputs_made_anew"))


def test_a_step_reads_weights_and_cache_once() -> None:
    names = "bfloat16", "fp8, cache too"
    plain, eight_bits = (bench.bytes_of_step(QWEN_7B, bench.SETTINGS[name], 1000) for name in names)
    head = 152_064 * 3_584 * 2
    assert plain["cache"] == 1000 * 28 * 4 * 128 * 2 * 2 == 2 * eight_bits["cache"]
    assert plain["weights"] - head == 2 * (eight_bits["weights"] - head)
    assert plain["weights"] == pytest.approx(2 * 7_615_616_512 - head, rel=1e-3)  # without the table of embeddings
