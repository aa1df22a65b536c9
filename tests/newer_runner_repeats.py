"""Check, by Triton's interpreter, that vLLM's newer model runner samples with kept inputs what it samples without them.

A script for ``triton_kernels.run_in_interpreter``, whose argument is one of ``CASES``. vLLM 0.32 can run this runner on
CPUs that Triton has a backend for; its sampler stays vLLM's own there, as in all versions but 0.25.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

LONGEST_PROMPT, LENGTH, ROWS, REQUESTS, CACHE_BLOCKS = 20, 40, 4, 10, 6
BLOCK_BYTES = 32 * 2 * 2 * 32 * 4 * 4  # tokens, keys and values, heads and their size, float32, layers
FIELDS = (np.ndarray, type(None), bool, int, list)


def requests() -> list[Any]:
    """Return requests of many lengths, more than run at a time, all of one group: vLLM alone limits how many run."""
    from rlhf_megatron.rollout.engine import Request

    return [
        Request(
            row,
            [(7 * row + token) % 240 + 2 for token in range(LONGEST_PROMPT - row)],
            seed=70 + row,
            group_id=0,
            max_tokens=2 + (11 * row) % (LENGTH - 1),
            key=row,
        )
        for row in range(REQUESTS)
    ]


def make(model: str, **settings: Any) -> Any:
    from rlhf_megatron.compat.vllm import internals
    from rlhf_megatron.recipe import RolloutSection
    from rlhf_megatron.rollout.engine_registry import make_engine

    of_all = {"max_response_length": LENGTH, "max_num_seqs": ROWS, "max_num_batched_tokens": 128}
    section = RolloutSection.model_validate({**of_all, **settings})
    engine: Any = make_engine(model, section, "float32", LONGEST_PROMPT, 1, "auto")
    assert hasattr(internals.model_runner(engine._engine), "speculator"), "the newer runner"
    engine.weights_updated(1)
    return engine


def values_of(inputs: Any) -> dict[str, Any]:
    """Return copies of all fields of inputs, as numbers that can be compared."""
    values = {}
    for field in dataclasses.fields(inputs):
        value = getattr(inputs, field.name)
        if isinstance(value, torch.Tensor):
            value = value.cpu().numpy()
        assert isinstance(value, FIELDS), field.name
        values[field.name] = (value.dtype, value.copy()) if isinstance(value, np.ndarray) else (type(value), value)
    return values


@contextlib.contextmanager
def counted(compares: bool) -> Iterator[collections.Counter[str]]:
    """Count how inputs were made; if it ``compares``, each kept one with what vLLM makes anew of the same plan."""
    from rlhf_megatron.compat.vllm import steady_inputs

    counts: collections.Counter[str] = collections.Counter()
    prepare, sampled = steady_inputs._Steps.prepare_inputs, steady_inputs._sampled
    latest: list[tuple[Any, dict[str, Any]]] = []

    def prepare_inputs(steps: Any, planned: Any, *more: Any) -> Any:
        inputs = prepare(steps, planned, *more)
        counts["kept" if steps._kept else "anew"] += 1
        counts["preempted"] += len(planned.preempted_req_ids or ())
        if compares and steps._kept:
            ours = values_of(inputs)
            same(ours, values_of(steps._vllms_prepare(planned, *more)))
            counts["with new blocks"] += any(planned.scheduled_cached_reqs.new_block_ids)
        if compares:
            on_host = {name: of for name, of in values_of(inputs).items() if name.endswith(("_np", "_upper_bound"))}
            for before, values in latest:  # what a step before may still be read by
                same({name: values_of(before)[name] for name in values}, values)
            latest[:] = [(inputs, on_host)]
        return inputs

    def count_sampled(*arguments: Any) -> Any:
        counts["sampled"] += 1
        return sampled(*arguments)

    steady_inputs._Steps.prepare_inputs, steady_inputs._sampled = prepare_inputs, count_sampled
    try:
        yield counts
    finally:
        steady_inputs._Steps.prepare_inputs, steady_inputs._sampled = prepare, sampled


def same(ours: dict[str, Any], of_vllm: dict[str, Any]) -> None:
    for name, (kind, value) in of_vllm.items():
        assert ours[name][0] == kind, name
        assert np.array_equal(ours[name][1], value), (name, ours[name][1], value)


@contextlib.contextmanager
def made_anew() -> Iterator[None]:
    from rlhf_megatron.compat.vllm import steady_inputs

    of_ours, steady_inputs.kept = steady_inputs.kept, lambda _: contextlib.nullcontext()
    try:
        yield
    finally:
        steady_inputs.kept = of_ours


def ends(model: str, ahead: bool = False) -> None:
    """Have requests end at different times and come later, by several temperatures and at stop tokens."""
    from rlhf_megatron.compat.vllm import internals
    from rlhf_megatron.rollout.engine import Sampling

    engine = make(model)
    assert type(internals.scheduler(engine._engine)).__name__ == ("AsyncScheduler" if ahead else "Scheduler")
    for sampling in (
        Sampling(0.7, 1.0, -1, LENGTH, ()),
        Sampling(1.0, 1.0, -1, LENGTH, (3, 5, 8, 13, 21, 34, 55)),
        Sampling(0.0, 1.0, -1, LENGTH, ()),
    ):
        compares = sampling.temperature == 0.7
        with counted(compares) as counts:
            ours = engine.generate(requests(), sampling)
        engine.drop_paused()  # and nothing of it is in the cache
        with made_anew():
            assert engine.generate(requests(), sampling) == ours, sampling
        engine.drop_paused()
        assert counts["kept"] > counts["anew"] > REQUESTS // 2, counts
        assert not compares or counts["with new blocks"], counts
        stopped = sum(each.finish_reason == "stop" for each in ours)
        assert bool(stopped) == bool(sampling.stop_token_ids) and stopped < REQUESTS
    engine.close()


def ahead(model: str) -> None:
    """Do the same where vLLM plans a step before it has the tokens of the one before, as it does on GPUs."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(platform: Any, vllm_config: Any) -> None:
        check(platform, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    ends(model, ahead=True)


def preempted(model: str) -> None:
    """Have requests lose their cache to others and begin anew, since it has no room for as many as run."""
    from rlhf_megatron.rollout.engine import Sampling

    engine, sampling = make(model, kv_cache_gb=CACHE_BLOCKS * BLOCK_BYTES / 2**30), Sampling(1.0, 1.0, -1, LENGTH, ())
    results = []
    for compares in (True, False):
        with counted(compares) as counts:
            results.append(engine.generate(requests(), sampling))
        engine.drop_paused()
        assert counts["preempted"] > 0 and counts["kept"] > counts["anew"], counts
    with made_anew():
        assert [engine.generate(requests(), sampling)] * 2 == results
    engine.close()


def paused(model: str) -> None:
    """Have requests stay in the cache while weights are updated, and sample on beside new ones."""
    engine = make(model)
    with counted(compares=True) as counts:
        ours = pause_and_go_on(engine)
    assert counts["kept"] > counts["anew"] > REQUESTS // 2, counts
    with made_anew():
        assert pause_and_go_on(engine) == ours
    engine.close()


def pause_and_go_on(engine: Any) -> list[Any]:
    from rlhf_megatron.rollout.engine import Sampling
    from rlhf_megatron.rollout.work_queue import WorkQueue

    rows: dict[int, Any] = {}
    count = 0
    engine.drop_paused()
    for version in range(1, 1 + REQUESTS):
        engine.weights_updated(version)
        waiting = [dataclasses.replace(each, group_id=each.row_id, begun=rows.get(each.row_id)) for each in requests()]
        waiting = [each for each in waiting if each.begun is None or not each.begun.is_whole]
        if not waiting:
            break
        queue = WorkQueue(range(len(waiting)), 3)
        rows |= {
            each.row_id: each
            for each in engine.generate(waiting, Sampling(1.0, 1.0, -1, LENGTH, ()), queue=queue, pauses=True)
        }
        count += engine.record.paused
    assert count > 0 and len(rows) == REQUESTS and all(each.is_whole for each in rows.values())
    return [rows[row] for row in sorted(rows)]


CASES = {case.__name__: case for case in (ends, ahead, preempted, paused)}


def main() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from newer_runner_speculates import stand_in_for_a_backend

    stand_in_for_a_backend()
    from hugging_face import make_model
    from rlhf_megatron.rollout.vllm.process_environment import prepare_environment

    prepare_environment()
    with tempfile.TemporaryDirectory() as folder:
        CASES[sys.argv[1]](str(make_model(Path(folder))))


if __name__ == "__main__":
    main()
