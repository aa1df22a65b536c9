"""What the ranks of test_rollout_queue.py do. Not a test itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from rlhf_megatron.rollout.vllm.process_environment import prepare_environment

MAX_PROMPT, MAX_RESPONSE = 48, 40
GROUPS, RESPONSES = 12, 3
CACHE_TOKENS = 8 * (MAX_PROMPT + MAX_RESPONSE)
DTYPE, BYTES = ("bfloat16", 2) if torch.cuda.is_available() else ("float32", 4)


def serve(model: str, **settings: Any) -> Any:
    """Return an engine with the model's weights."""
    prepare_environment()
    from rlhf_megatron.recipe import RolloutSection
    from rlhf_megatron.rollout.engine_registry import make_engine

    section = RolloutSection.model_validate({"max_response_length": MAX_RESPONSE, **settings})
    engine = make_engine(model, section, DTYPE, MAX_PROMPT, seed=1, load_format="auto")
    engine.weights_updated(1)
    return engine


def requests_of(groups: Sequence[int]) -> list[Any]:
    """Return responses of many lengths to prompts of many lengths."""
    from rlhf_megatron.rollout.engine import Request

    return [
        Request(
            group * RESPONSES + k,
            [(7 * group + token) % 240 + 2 for token in range(MAX_PROMPT - 2 * group)],
            1000 + group * RESPONSES + k,
            group,
            max_tokens=5 + (11 * group + 5 * k) % (MAX_RESPONSE - 4),
        )
        for group in groups
        for k in range(RESPONSES)
    ]


def as_json(completions: Sequence[Any]) -> list[Any]:
    """Return completions as JSON."""
    return [list(dataclasses.asdict(completion).values()) for completion in completions]


def sampling() -> Any:
    from rlhf_megatron.rollout.engine import Sampling

    return Sampling(1.0, 1.0, -1, MAX_RESPONSE, ())


def replicas(model: str) -> dict[str, Any]:
    """Run two replicas of one rank: all groups by the queue and by a static split, then enough of them, then the
    rest."""
    from rlhf_megatron.rollout.work_queue import WorkQueues

    engine, rank = serve(model, max_num_seqs=4, kv_cache_gb=0.0625), dist.get_rank()
    result: dict[str, Any] = {}
    for scheduling in ("queue", "static"):
        queue = WorkQueues(scheduling, rank, 2, name=scheduling).open(GROUPS)
        dist.barrier()  # a GPU is through with all groups before an engine that starts later asks for one
        result[scheduling] = as_json(engine.generate(requests_of(range(GROUPS)), sampling(), queue=queue))
    dist.barrier()

    queues = WorkQueues("queue", rank, 2, name="enough")
    done: list[int] = []
    first = engine.generate(
        requests_of(range(GROUPS)),
        sampling(),
        on_completion=lambda completion: done.append(completion.row_id),
        queue=queues.open(GROUPS, wanted=5),
    )
    record = dataclasses.asdict(engine.record)
    everywhere: list[Any] = [None, None]
    dist.all_gather_object(everywhere, first)
    begun = {completion.row_id: completion for part in everywhere for completion in part}
    # Weights of another version (here the same values) go on with what there is; either replica may.
    engine.weights_updated(2)
    left = [
        dataclasses.replace(request, begun=begun.get(request.row_id), seed=request.seed + 500)
        for request in requests_of(range(GROUPS))
        if request.row_id not in begun or not begun[request.row_id].is_whole
    ]
    second = engine.generate(left, sampling(), queue=queues.open(len({request.group_id for request in left})))
    resumed = engine.record.resumed
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    keys = [store.check([f"enough/{call}/claimed"]) for call in (1, 2)]
    return {
        **result,
        "first": as_json(first),
        "done": done,
        "record": record,
        "second": as_json(second),
        "resumed": resumed,
        "keys": keys,
    }


def lockstep(model: str, tensor: int) -> dict[str, Any]:
    """Run one replica of ``tensor`` ranks with a cache that holds few sequences: what each rank did."""
    from rlhf_megatron.compat.vllm import internals
    from rlhf_megatron.rollout.work_queue import WorkQueue

    # A sequence has up to 88 tokens, each with a key and a value of two heads of 32 in four layers.
    cache = CACHE_TOKENS * 2 * 2 * 32 * 4 * BYTES / tensor
    engine = serve(model, max_num_seqs=16, kv_cache_gb=cache / 2**30, layout={"tensor": tensor})
    scheduler = internals.scheduler(engine._engine)
    preempted = [0]
    preempt = scheduler._preempt_request

    def counted(*arguments: Any, **named: Any) -> Any:
        preempted[-1] += 1
        return preempt(*arguments, **named)

    scheduler._preempt_request = counted
    cache_config = engine._engine.vllm_config.cache_config
    rounds: list[list[Any]] = []
    waiting = requests_of(range(GROUPS))
    for wanted in (4, 4, None):
        groups = len({request.group_id for request in waiting})
        found = engine.generate(waiting, sampling(), queue=WorkQueue(range(groups), wanted))
        rounds.append([as_json(found), engine.record.steps, engine.record.sampled_tokens])
        begun = {completion.row_id: completion for completion in found}
        waiting = [
            dataclasses.replace(request, begun=begun.get(request.row_id, request.begun))
            for request in waiting
            if request.row_id not in begun or not begun[request.row_id].is_whole
        ]
    for together in (False, True):  # group after group as there is room; and all at once, as vLLM alone has them
        engine.weights_updated(2)
        preempted.append(0)
        requests = [
            dataclasses.replace(request, group_id=0 if together else request.group_id)
            for request in requests_of(range(GROUPS))
        ]
        rounds.append([as_json(engine.generate(requests, sampling())), engine.record.steps])
    return {
        "rounds": rounds,
        "left": len(waiting),
        "preempted": preempted,
        "cache": cache_config.num_gpu_blocks * cache_config.block_size,
    }
