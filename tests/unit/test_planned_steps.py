"""vLLM's scheduler plans the same steps with the same blocks, and the same comes of them, with ours inside.

Two of vLLM's schedulers get the same requests, one of them with ours inside, and are compared after each step. The
engine that samples by these steps is in test_vllm_engine.py.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from scheduling import BLOCK_SIZE, LoneScheduler

from rlhf_megatron.compat.vllm import block_allocation, logprobs, steady_steps
from rlhf_megatron.rollout.vllm.process_environment import has_gpu, prepare_environment

pytestmark = pytest.mark.skipif(has_gpu(), reason="the configuration is that of vLLM's CPU platform")

SEQUENCES, BLOCKS, STEPS, STOP = 8, 40, 300, 7
ALL, WINDOW = (None,), (2 * BLOCK_SIZE + 3,)


@pytest.fixture(autouse=True)
def environment() -> None:
    prepare_environment()


def is_replaced(scheduler: LoneScheduler) -> bool:
    return {"allocate_slots", "cache_blocks"} & vars(scheduler.own.kv_cache_manager).keys() != set()


def is_taken_at_once(scheduler: LoneScheduler) -> bool:
    return "schedule" in vars(scheduler.own)


@contextlib.contextmanager
def ours_in(scheduler: LoneScheduler, at_once: bool) -> Iterator[None]:
    """Have ours in a scheduler, as an engine has it while it generates."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(block_allocation.only_where_needed(scheduler.own))
        if at_once:
            stack.enter_context(steady_steps.taken_at_once(scheduler.own, scheduler.states))
        stack.enter_context(logprobs.kept_as_numbers(scheduler.own, on_gpu=False))
        yield


def state_of(request: Any) -> tuple[Any, ...]:
    pending = request.num_output_placeholders, getattr(request, "num_in_flight_tokens", 0)
    return request.request_id, request.num_computed_tokens, request.num_tokens, request.status, *pending


def blocks_of(scheduler: LoneScheduler) -> dict[str, Any]:
    """Return where each token is, which blocks others may share, and the blocks that are free, in vLLM's order."""
    manager = scheduler.own.kv_cache_manager
    free = [block.block_id for block in manager.block_pool.free_block_queue.get_all_free_blocks()]
    kinds = manager.coordinator.single_type_managers
    return {
        "tables": [{name: [b.block_id for b in row] for name, row in kind.req_to_blocks.items()} for kind in kinds],
        "published": [dict(kind.num_cached_block) for kind in kinds],
        "to be zeroed": [list(kind.new_block_ids) for kind in kinds],
        "hashed": [block.block_id for block in manager.block_pool.blocks if block.block_hash is not None],
        "references": [block.ref_cnt for block in manager.block_pool.blocks],
        "free": free,
        "running": [state_of(each) for each in scheduler.own.running],
        "sampled": {
            name: (list(each.detokenizer.token_ids), list(each.logprobs_processor.logprobs))
            for name, each in scheduler.states.items()
        },
        "preempted": {name: each.num_preemptions for name, each in scheduler.own.requests.items()},
    }


def plan_of(planned: Any) -> tuple[Any, ...]:
    cached = planned.scheduled_cached_reqs
    new = [(each.req_id, each.block_ids, each.num_computed_tokens) for each in planned.scheduled_new_reqs]
    running = (cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, cached.num_output_tokens)
    more = cached.resumed_req_ids, cached.all_token_ids, planned.total_num_scheduled_tokens
    of_cache = getattr(planned, "num_common_prefix_blocks", None), planned.free_encoder_mm_hashes
    drafts = planned.scheduled_spec_decode_tokens
    return planned.num_scheduled_tokens, new, running, more, of_cache, drafts, planned.finished_req_ids


def outcome_of(outputs: Sequence[Any]) -> list[tuple[Any, ...]]:
    samples = [(each.request_id, each.outputs[0]) for each in outputs]
    return [(name, list(each.token_ids), each.logprobs, each.finish_reason, each.stop_reason) for name, each in samples]


def sampled(planned: Any, name: str) -> list[int]:
    """Return made-up tokens: one, and one more for each draft that is accepted."""
    draws = random.Random(f"{name} {planned.num_scheduled_tokens}")
    accepted = draws.randint(0, len(planned.scheduled_spec_decode_tokens.get(name, [])))
    return [draws.randint(STOP, 60) for _ in range(accepted + 1)]


def steps(scheduler: LoneScheduler, drafts: int) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
    """Yield what a scheduler plans, what comes out, and its blocks, at each of many steps with the same requests."""
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.outputs import DraftTokenIds

    own, draws, added = scheduler.own, random.Random(1), 0
    for number in range(STEPS):
        if draws.random() < 0.3 and len(own.requests) < 2 * SEQUENCES:
            group = draws.randint(1, 3)  # prompts of a group begin alike
            prompt = [group] * draws.randint(1, 70) + [draws.randint(10, 50)] * draws.randint(0, 40)
            scheduler.add(str(added), prompt, draws.randint(1, 120), [STOP])
            added += 1
        if draws.random() < 0.03 and own.requests:
            scheduler.abort(draws.choice(sorted(own.requests)))
        if number % 50 in (20, 24):
            own.set_pause_state(PauseState.PAUSED_ALL if number % 50 == 20 else PauseState.UNPAUSED)
        planned, outputs = scheduler.step(sampled)
        if drafts:
            names = [each.request_id for each in own.running if not each.is_prefill_chunk]
            own.update_draft_token_ids(DraftTokenIds(names, [[9] * draws.randint(0, drafts) for _ in names]))
        yield plan_of(planned), outcome_of(outputs), blocks_of(scheduler)


@pytest.mark.parametrize("caches", [True, False])
@pytest.mark.parametrize(("ahead", "drafts"), [(True, 0), (False, 3)])
@pytest.mark.parametrize("windows", [ALL, WINDOW, (*ALL, *WINDOW)])
@pytest.mark.parametrize("at_once", [True, False])
def test_the_same_steps_are_planned_with_the_same_blocks(
    at_once: bool,
    windows: Sequence[int | None],
    ahead: bool,
    drafts: int,
    caches: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vllm, ours = (LoneScheduler(SEQUENCES, BLOCKS, caches, ahead, 256, windows) for _ in range(2))
    allocations = counted(type(ours.own.kv_cache_manager), "allocate_slots", monkeypatch)
    plans = counted(type(ours.own), "schedule", monkeypatch)
    with ours_in(ours, at_once), logprobs.kept_as_numbers(vllm.own, on_gpu=False):
        assert is_replaced(ours) == (windows == ALL)
        assert is_taken_at_once(ours) == (at_once and windows == ALL)
        assert not is_replaced(vllm) and not is_taken_at_once(vllm)
        preempted = finished = 0
        for expected, found in zip(steps(vllm, drafts), steps(ours, drafts), strict=True):
            assert found == expected
            preempted += sum(found[2]["preempted"].values())
            finished += len(found[1])
    assert not is_replaced(ours) and not is_taken_at_once(ours)
    of_vllm, of_ours = allocations[vllm.own.kv_cache_manager], allocations[ours.own.kv_cache_manager]
    assert plans[vllm.own] == STEPS
    if windows == ALL:
        assert preempted and finished > 10
        assert of_ours < of_vllm / 2
        assert (plans[ours.own] < STEPS) == at_once
    else:  # blocks are freed as a window moves on, and that is vLLM's own
        assert of_ours == of_vllm and plans[ours.own] == STEPS


@pytest.mark.parametrize("caches", [True, False])
@pytest.mark.parametrize("ahead", [True, False])
def test_vllm_plans_nothing_while_all_sample(caches: bool, ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = LoneScheduler(SEQUENCES, SEQUENCES * 16, caches, ahead, 256)
    plans = counted(type(scheduler.own), "schedule", monkeypatch)
    for row in range(SEQUENCES):
        scheduler.add(str(row), [row + 1] * (row + 3), 200)
    with ours_in(scheduler, at_once=True):
        ended = [each for _ in range(210) for each in scheduler.step(sampled)[1]]
    assert len(ended) == SEQUENCES and all(len(each.outputs[0].token_ids) == 200 for each in ended)
    assert plans[scheduler.own] < 20  # the prompts, the first tokens, and when nothing is left


def counted(kind: type, name: str, monkeypatch: pytest.MonkeyPatch) -> Counter[Any]:
    """Return how often each object's method of a class will have been called."""
    calls, method = Counter[Any](), getattr(kind, name)

    def called(of: Any, *arguments: Any, **named: Any) -> Any:
        calls[of] += 1
        return method(of, *arguments, **named)

    monkeypatch.setattr(kind, name, called)
    return calls


def test_all_is_vllms_own_in_a_version_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = LoneScheduler(SEQUENCES, BLOCKS, caches=True)
    monkeypatch.setattr(block_allocation, "KNOWN", {"first": "0.1", "last": "0.2"})
    monkeypatch.setattr(steady_steps, "KNOWN", {"first": "0.1", "last": "0.2"})
    with ours_in(scheduler, at_once=True):
        assert not is_replaced(scheduler) and not is_taken_at_once(scheduler)
