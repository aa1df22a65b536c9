"""vLLM's GPU runner samples the same tokens with the same logprobs, inputs kept from step to step or made anew."""

from __future__ import annotations

import collections
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from gpu.devices import skip_without_gpus
from hugging_face import make_model
from newer_runner_repeats import counted, made_anew
from parallel.queue_ranks import BYTES, GROUPS, MAX_PROMPT, MAX_RESPONSE, RESPONSES, requests_of, sampling, serve
from parallel.ranks import run_ranks
from rlhf_megatron.compat.vllm import internals, steady_inputs
from rlhf_megatron.rollout.work_queue import WorkQueue

ROWS = 6
# Of sampling, and whether ours draws; a nucleus is vLLM's own to draw from.
SAMPLINGS: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": ({}, True),
    "another temperature": ({"temperature": 0.7, "stop_token_ids": (3, 5, 8, 13, 21)}, True),
    "the likeliest": ({"temperature": 0.0}, True),
    "a nucleus": ({"temperature": 1.3, "top_p": 0.8, "top_k": 40}, False),
}


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_samples_are_those_of_inputs_made_anew(family: str, tensor: int, tmp_path: Path) -> None:
    skip_without_gpus(tensor)
    model = make_model(tmp_path, family, tied=False)
    found = run_ranks(both_ways, tensor, {"model": str(model), "tensor": tensor})
    for result in found:
        print(result["counts"])
        assert result["tokens"] == found[0]["tokens"], "ranks of a replica keep in step"
        for name, counts in result["counts"].items():
            assert counts["kept"] > 20 and counts["anew"] > 0, name
            draws = result["draws"] and SAMPLINGS[name.partition(",")[0]][1]
            assert counts.get("sampled", 0) == (counts["kept"] if draws else 0), name
        assert result["counts"]["plain, all at once"]["preempted"] > 0
        assert result["counts"]["plain, each compared"]["with new blocks"] > 0
        assert result["paused"] > 0


def both_ways(model: str, tensor: int) -> dict[str, Any]:
    """Sample by each way of making inputs; return how inputs were made, and what was sampled."""
    # Of half the sequences that may run; a token has a key and a value of two heads of 32 in four layers.
    cache = ROWS // 2 * (MAX_PROMPT + MAX_RESPONSE) * 2 * 2 * 32 * 4 * BYTES / tensor
    engine = serve(model, max_num_seqs=ROWS, kv_cache_gb=cache / 2**30, layout={"tensor": tensor})
    runner = internals.model_runner(engine._engine)
    assert hasattr(runner, "speculator"), "the newer runner"
    counts: dict[str, collections.Counter[str]] = {}
    tokens = []
    for name, (settings, _) in SAMPLINGS.items():
        for how in ("as there is room", "all at once", "each compared")[: 3 if name == "plain" else 1]:
            asked = requests_of(range(GROUPS))
            if how == "all at once":
                asked = [dataclasses.replace(request, group_id=0) for request in asked]
            of_case = dataclasses.replace(sampling(), **settings)
            engine.drop_paused()  # no prompt is in the cache
            with counted(compares=how == "each compared") as counts[f"{name}, {how}"]:
                ours = engine.generate(asked, of_case)
            engine.drop_paused()
            with made_anew():
                assert engine.generate(asked, of_case) == ours, (name, how)
            tokens.append([each.token_ids for each in ours])
    with counted(compares=False) as counts["plain, paused"]:
        ours, paused = pause_and_go_on(engine)
    with made_anew():
        assert pause_and_go_on(engine) == (ours, paused)
    tokens.append([each.token_ids for each in ours])
    draws = steady_inputs._has_known_sampler(runner)  # vLLM 0.25's
    return {"counts": counts, "tokens": tokens, "paused": paused, "draws": draws}


def pause_and_go_on(engine: Any) -> tuple[list[Any], int]:
    """Generate some groups at a time, between which weights are updated; return rows and how often one was paused."""
    rows: dict[int, Any] = {}
    paused = 0
    engine.drop_paused()
    for version in range(1, 1 + GROUPS):
        engine.weights_updated(version)
        asked = [
            dataclasses.replace(each, begun=rows.get(each.row_id), key=each.row_id)
            for each in requests_of(range(GROUPS))
        ]
        waiting = [each for each in asked if each.begun is None or not each.begun.is_whole]
        if not waiting:
            break
        queue = WorkQueue(range(len({each.group_id for each in waiting})), 3)
        rows |= {each.row_id: each for each in engine.generate(waiting, sampling(), queue=queue, pauses=True)}
        paused += engine.record.paused
    assert len(rows) == GROUPS * RESPONSES
    return [rows[row] for row in sorted(rows)], paused
