"""Drawing, giving up and going on with vLLM's GPU engine, whose internals are of another version than on CPUs."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from gpu.devices import skip_without_gpus
from hugging_face import make_model
from parallel.queue_ranks import CACHE_TOKENS, GROUPS, RESPONSES, lockstep, replicas, requests_of, sampling, serve
from parallel.ranks import run_ranks
from rlhf_megatron.compat.vllm import block_allocation, internals, steady_steps
from rlhf_megatron.rollout.engine import Completion
from rlhf_megatron.rollout.work_queue import WorkQueue

LENGTHS = {request.row_id: request.max_tokens for request in requests_of(range(GROUPS))}
ROW, TOKENS, LOGPROBS, ENDING, VERSIONS = range(5)


@pytest.mark.parametrize("tensor", [1, 2])
def test_ranks_of_a_replica_keep_in_step_where_the_cache_is_small(tensor: int, tmp_path: Path) -> None:
    skip_without_gpus(tensor)
    model = make_model(tmp_path, "qwen3", tied=False)
    found: list[dict[str, Any]] = run_ranks(lockstep, tensor, {"model": str(model), "tensor": tensor})
    one = found[0]
    for other in found[1:]:
        assert [steps for _, *steps in other["rounds"]] == [steps for _, *steps in one["rounds"]]
        assert other["preempted"] == one["preempted"]
    assert one["cache"] <= CACHE_TOKENS and one["left"] == 0
    print(f"preempted: {one['preempted'][1]} drawing as there is room, {one['preempted'][2]} all at once")
    assert one["preempted"][1] <= one["preempted"][2]
    completions = [completion for part, *_ in one["rounds"][:3] for completion in part]
    assert any(completion[ENDING] == "abort" for completion in completions)
    assert all(len(of[TOKENS]) == len(of[LOGPROBS]) == len(of[VERSIONS]) for of in completions)
    finished = {of[ROW]: len(of[TOKENS]) for of in completions if of[ENDING] != "abort"}
    assert finished == LENGTHS


def test_a_step_of_all_sequences_is_a_graph(tmp_path: Path) -> None:
    """By itself vLLM captures steps of 512 at most, so that larger ones wait for Python."""
    model = make_model(tmp_path, "qwen3", tied=False)
    assert run_ranks(most_sequences_of_a_graph, 1, {"model": str(model)})[0] == 540


def most_sequences_of_a_graph(model: str) -> int:
    engine = serve(model, max_num_seqs=540, kv_cache_gb=1.0)
    graphs = internals.model_runner(engine._engine).cudagraph_manager.graphs
    return max(each.num_reqs for each in graphs if each.num_reqs)  # others hold a part of a step each


def test_replicas_share_a_queue(tmp_path: Path) -> None:
    found = run_ranks(replicas, 2, {"model": str(make_model(tmp_path, "qwen3", tied=False))})
    rows = sorted(completion[ROW] for result in found for completion in result["queue"])
    assert rows == list(range(GROUPS * RESPONSES))
    assert all(result["queue"] for result in found)
    whole = [of[ROW] for result in found for of in result["first"] if of[ENDING] != "abort"]
    assert sorted(whole + [of[ROW] for result in found for of in result["second"]]) == rows
    assert sum(result["resumed"] for result in found) > 0


def test_an_engine_wakes_up_where_torch_keeps_all_memory_for_later(tmp_path: Path) -> None:
    model = make_model(tmp_path, "qwen3", tied=False)
    run_ranks(wake_beside_full_cache, 1, {"model": str(model)})


def wake_beside_full_cache(model: str) -> None:
    """Wake it beside what an update leaves: memory that no tensor has, and that the driver has not either. Takes the
    whole GPU."""
    engine, room = serve(model, kv_cache_gb=4.0), 1 << 30
    engine.sleep()
    torch.empty(torch.cuda.mem_get_info()[0] - room, dtype=torch.uint8, device="cuda")
    assert torch.cuda.mem_get_info()[0] < 2 * room
    engine.wake_weights()
    engine.wake_kv_cache()


@pytest.mark.parametrize("sleeps", [True, False])
@pytest.mark.parametrize("tensor", [1, 2])
def test_paused_responses_keep_their_cache_while_others_have_the_gpu(tensor: int, sleeps: bool, tmp_path: Path) -> None:
    """Without a cache that comes back from the host, or with block tables that do not, the tokens would be others."""
    skip_without_gpus(tensor)
    model = make_model(tmp_path, "qwen3", tied=False)
    found = run_ranks(pause_and_go_on, tensor, {"model": str(model), "tensor": tensor, "sleeps": sleeps})
    for result in found:
        assert result["tokens"] == found[0]["tokens"]
        assert result["paused"][0] > 0 and result["aborted"] == 0
        assert result["freed"] > 3 << 30 if sleeps else result["freed"] < 1 << 28
        assert 0 < result["copied"] < 1 << 28 if sleeps else result["copied"] == 0, "what is in use, of 4 GB"
        assert result["versions"] > 3, "of rows that several weights have sampled"
        assert result["equal"] >= 0.8 * GROUPS * RESPONSES, "the rest may differ by rounding"
        assert result["with_vllms_steps"] >= 0.8 * GROUPS * RESPONSES


@pytest.mark.parametrize("newer", [True, False], ids=["newer", "older"])
def test_a_cache_in_8_bits_outlives_sleep_too(newer: bool, tmp_path: Path) -> None:
    """The older of vLLM's model runners clears one as it wakes."""
    arguments = {"model": str(make_model(tmp_path, "qwen3", tied=False)), "tensor": 1, "sleeps": True, "cache": "fp8"}
    (result,) = run_ranks(pause_and_go_on, 1, arguments, environment={"VLLM_USE_V2_MODEL_RUNNER": str(int(newer))})
    assert result["paused"][0] > 0 and result["versions"] > 3
    assert result["equal"] >= 0.6 * GROUPS * RESPONSES, "rounding to 8 bits lets more of them differ"


def pause_and_go_on(model: str, tensor: int, sleeps: bool, cache: Literal["fp8"] | None = None) -> dict[str, Any]:
    """Generate all groups at once; then some at a time, between which the engine sleeps and gets the same weights
    again."""
    section = {"max_num_seqs": 16, "kv_cache_gb": 4.0, "layout": {"tensor": tensor}, "sleep": sleeps}
    engine = serve(model, kv_cache_dtype=cache, **section)
    asked = [dataclasses.replace(each, key=each.row_id) for each in requests_of(range(GROUPS))]
    reference = {each.row_id: each.token_ids for each in engine.generate(asked, sampling())}
    engine.drop_paused()  # no prompt is in the cache, as before
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_allocation, "only_where_needed", lambda _: contextlib.nullcontext())
        patch.setattr(steady_steps, "taken_at_once", lambda *_: contextlib.nullcontext())
        with_vllms = [each.token_ids == reference[each.row_id] for each in engine.generate(asked, sampling())]
    weights = {name: parameter.clone() for name, parameter in engine.parameters().items()}
    rows: dict[int, Completion] = {}
    paused, aborted, freed, copied = list[int](), 0, 0, 0
    for version in range(2, 2 + GROUPS):
        waiting = [
            dataclasses.replace(each, begun=rows.get(each.row_id))
            for each in asked
            if each.row_id not in rows or not rows[each.row_id].is_whole
        ]
        if not waiting:
            break
        going_on = {each.group_id for each in waiting if each.begun}
        waiting.sort(key=lambda each: (each.group_id not in going_on, each.group_id))
        queue = WorkQueue(range(len({each.group_id for each in waiting})), 3)
        rows |= {each.row_id: each for each in engine.generate(waiting, sampling(), queue=queue, pauses=True)}
        paused.append(engine.record.paused)
        aborted += engine.record.aborted
        free = torch.cuda.mem_get_info()[0]
        engine.sleep()
        freed, copied = max(freed, torch.cuda.mem_get_info()[0] - free), max(copied, engine._kept_cache.size)
        engine.wake_weights()
        for name, parameter in engine.parameters().items():
            parameter.copy_(weights[name])
        engine.wake_kv_cache()
        engine.weights_updated(version)
    return {
        "tokens": {row: rows[row].token_ids for row in sorted(rows)},
        "paused": paused,
        "aborted": aborted,
        "freed": freed,
        "copied": copied,
        "versions": sum(len(set(each.weight_versions)) > 1 for each in rows.values()),
        "equal": sum(rows[row].token_ids == tokens for row, tokens in reference.items()),
        "with_vllms_steps": sum(with_vllms),
    }
