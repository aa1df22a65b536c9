"""vLLM's scheduler plans the same steps with the same blocks, whether it looks for blocks at each token or not.

Two of vLLM's schedulers get the same requests, one of them with ours inside, and are compared after each step. The
engine that samples by these steps is in test_vllm_engine.py.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from scheduling import BLOCK_SIZE, LoneScheduler

from rlhf_megatron.compat.vllm import block_allocation
from rlhf_megatron.rollout.vllm.process_environment import has_gpu, prepare_environment

pytestmark = pytest.mark.skipif(has_gpu(), reason="the configuration is that of vLLM's CPU platform")

SEQUENCES, BLOCKS, STEPS, STOP = 8, 40, 300, 7
ALL, WINDOW = (None,), (2 * BLOCK_SIZE + 3,)


@pytest.fixture(autouse=True)
def environment() -> None:
    prepare_environment()


def is_replaced(scheduler: LoneScheduler) -> bool:
    return {"allocate_slots", "cache_blocks"} & vars(scheduler.own.kv_cache_manager).keys() != set()


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
        "running": [(each.request_id, each.num_computed_tokens, each.num_tokens) for each in scheduler.own.running],
        "preempted": {name: each.num_preemptions for name, each in scheduler.own.requests.items()},
    }


def plan_of(planned: Any) -> tuple[Any, ...]:
    cached = planned.scheduled_cached_reqs
    new = [(each.req_id, each.block_ids, each.num_computed_tokens) for each in planned.scheduled_new_reqs]
    running = (cached.req_ids, cached.new_block_ids, cached.num_computed_tokens)
    return planned.num_scheduled_tokens, new, running, planned.scheduled_spec_decode_tokens, planned.finished_req_ids


def outcome_of(outputs: Any) -> list[tuple[Any, ...]]:
    of_all = [each for of_client in (outputs or {}).values() for each in of_client.outputs]
    return [(each.request_id, each.new_token_ids, each.finish_reason) for each in of_all]


def sampled(planned: Any, name: str) -> list[int]:
    """Return made-up tokens: one, and one more for each draft that is accepted."""
    draws = random.Random(f"{name} {planned.num_scheduled_tokens}")
    accepted = draws.randint(0, len(planned.scheduled_spec_decode_tokens.get(name, [])))
    return [draws.randint(STOP, 60) for _ in range(accepted + 1)]


def steps(scheduler: LoneScheduler, drafts: int) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
    """Yield what a scheduler plans, what comes out, and its blocks, at each of many steps with the same requests."""
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.outputs import DraftTokenIds
    from vllm.v1.request import RequestStatus

    own, draws, added = scheduler.own, random.Random(1), 0
    for number in range(STEPS):
        if draws.random() < 0.3 and len(own.requests) < 2 * SEQUENCES:
            group = draws.randint(1, 3)  # prompts of a group begin alike
            prompt = [group] * draws.randint(1, 70) + [draws.randint(10, 50)] * draws.randint(0, 40)
            scheduler.add(str(added), prompt, draws.randint(1, 120), [STOP])
            added += 1
        if draws.random() < 0.03 and own.requests:
            own.finish_requests(draws.choice(sorted(own.requests)), RequestStatus.FINISHED_ABORTED)
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
def test_the_same_steps_are_planned_with_the_same_blocks(
    windows: Sequence[int | None], ahead: bool, drafts: int, caches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm, ours = (LoneScheduler(SEQUENCES, BLOCKS, caches, ahead, 256, windows) for _ in range(2))
    calls = {id(each.own.kv_cache_manager): 0 for each in (vllm, ours)}
    kind = type(ours.own.kv_cache_manager)
    allocate = kind.allocate_slots

    def counted(manager: Any, *arguments: Any, **named: Any) -> Any:
        calls[id(manager)] += 1
        return allocate(manager, *arguments, **named)

    monkeypatch.setattr(kind, "allocate_slots", counted)
    with block_allocation.only_where_needed(ours.own):
        assert is_replaced(ours) == (windows == ALL)
        assert not is_replaced(vllm)
        preempted = finished = 0
        for expected, found in zip(steps(vllm, drafts), steps(ours, drafts), strict=True):
            assert found == expected
            preempted += sum(found[2]["preempted"].values())
            finished += sum(reason is not None for *_, reason in found[1])
    assert not is_replaced(ours)
    of_vllm, of_ours = calls.values()
    if windows == ALL:
        assert preempted and finished > 10
        assert of_ours < of_vllm / 2
    else:  # blocks are freed as a window moves on, and that is vLLM's own
        assert of_ours == of_vllm


def test_all_is_vllms_own_in_a_version_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = LoneScheduler(SEQUENCES, BLOCKS, caches=True)
    monkeypatch.setattr(block_allocation, "KNOWN", {"first": "0.1", "last": "0.2"})
    with block_allocation.only_where_needed(scheduler.own):
        assert not is_replaced(scheduler)
