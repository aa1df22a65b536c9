"""Memory on a GPU by phase: what is in use counts, what torch keeps for later or what sleeps does not; retries."""

from __future__ import annotations

import pytest
import torch

from parallel.ranks import run_ranks
from rlhf_megatron.runtime.health_rules import memory_metrics
from rlhf_megatron.runtime.phases import Phases

GB = 1 << 30


def peaks() -> dict[str, float]:
    """Return GB that each phase had at most beyond what there was before."""
    from vllm.device_allocator.cumem import CuMemAllocator

    torch.zeros(1, device="cuda")
    phases = Phases()
    phases.begin(records=True)
    with phases.phase("before"):
        pass
    with phases.phase("outer"), phases.phase("inner"):
        torch.empty(2 * GB, dtype=torch.uint8, device="cuda")
    with phases.phase("kept for later"):
        pass
    torch.cuda.empty_cache()
    allocator = CuMemAllocator.get_instance()
    with allocator.use_memory_pool(tag="weights"):
        weights = torch.zeros(GB, dtype=torch.uint8, device="cuda")
    with phases.phase("awake"):
        pass
    allocator.sleep()
    with phases.phase("asleep"):
        pass
    allocator.wake_up()
    assert len(weights) == GB
    found = phases.peaks()
    return {name: found[name] - found["before"] for name in found}


def test_what_is_in_use_counts() -> None:
    [found] = run_ranks(peaks, 1)
    expected = {"outer": 2.0, "inner": 2.0, "kept for later": 0.0, "awake": 1.0, "asleep": 0.0}
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=0.15)


def retries() -> list[float]:
    """Return counts of emptied caches: at first, with room, and with none for the next block beside the last."""
    torch.zeros(1, device="cuda")
    room = torch.cuda.mem_get_info()[0] // 10
    counts = [memory_metrics()["memory/gpu_retries"]]
    for tenths in (6, 7):
        torch.empty(tenths * room, dtype=torch.uint8, device="cuda")
        counts.append(memory_metrics()["memory/gpu_retries"])
    return counts


def test_a_full_gpu_is_seen() -> None:
    assert run_ranks(retries, 1) == [[0.0, 0.0, 1.0]]
