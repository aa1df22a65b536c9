"""Parts of vLLM's allocator: its own class, with calls of the driver noted instead of made."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_megatron.compat.vllm.sleeping_memory import SleepingMemory
from rlhf_megatron.rollout.vllm.process_environment import prepare_environment

FIRST, SECOND, OTHER = (0, 512, 1000, 1), (0, 1024, 2000, 2), (0, 2048, 3000, 3)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Return the calls of the driver by a new allocator."""
    prepare_environment()
    from vllm.device_allocator import cumem

    told: list[tuple[str, Any]] = []
    monkeypatch.setattr(cumem, "cumem_available", True)
    monkeypatch.setattr(cumem, "create_and_map", lambda handle: told.append(("map", handle)))
    monkeypatch.setattr(cumem, "unmap_and_release", lambda handle: told.append(("unmap", handle)))
    monkeypatch.setattr(cumem.torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr(cumem.CuMemAllocator, "instance", cumem.CuMemAllocator())
    return told


def allocator() -> Any:
    from vllm.device_allocator.cumem import CuMemAllocator

    return CuMemAllocator.get_instance()


def test_each_engine_sleeps_and_wakes_by_itself(driver: list[tuple[str, Any]]) -> None:
    one, other = SleepingMemory(), SleepingMemory()
    with one.in_use():
        for handle in (FIRST, SECOND):
            allocator().python_malloc_callback(handle)
    with other.in_use():
        assert allocator().get_current_usage() == 0, "vLLM refuses an engine where there are others"
        allocator().python_malloc_callback(OTHER)
        allocator().sleep(offload_tags=())
        assert driver == [("unmap", OTHER)]
    with one.in_use():
        allocator().sleep(offload_tags=())
    assert driver[1:] == [("unmap", FIRST), ("unmap", SECOND)]
    with other.in_use():
        allocator().wake_up()
    assert driver[3:] == [("map", OTHER)]
    with one.in_use():
        allocator().wake_up()
        assert allocator().get_current_usage() == 512 + 1024
    assert driver[4:] == [("map", FIRST), ("map", SECOND)]
    assert allocator().get_current_usage() == 512 + 1024 + 2048, "of all, where no engine is in use"


def test_what_an_engine_frees_is_found_while_another_is_in_use(
    driver: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: None)
    allocator().python_malloc_callback(FIRST)  # before there are parts
    one, other = SleepingMemory(), SleepingMemory()
    with one.in_use():
        allocator().python_malloc_callback(SECOND)
    with other.in_use():
        assert [allocator().python_free_callback(handle[2]) for handle in (FIRST, SECOND)] == [FIRST, SECOND]
    assert allocator().get_current_usage() == 0


def test_pools_of_one_tag_are_kept_for_each_engine(driver: list[tuple[str, Any]]) -> None:
    one, other = SleepingMemory(), SleepingMemory()
    pools = {memory: [(object(), object()), (object(), object())] for memory in (one, other)}  # of any version
    for memory in (one, other):
        with memory.in_use():
            assert not allocator().allocator_and_pools
            allocator().allocator_and_pools["weights"] = pools[memory]
    with other.in_use():
        allocator().release_pools()
    with one.in_use():
        assert allocator().allocator_and_pools == {"weights": pools[one]}
    with other.in_use():
        assert not allocator().allocator_and_pools
