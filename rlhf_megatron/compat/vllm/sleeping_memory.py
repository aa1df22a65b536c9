"""Memory that vLLM can put to sleep, of which it has one allocator for a process: each engine here has its own part.

``CuMemAllocator.sleep`` and ``wake_up`` take all allocations of the process, whichever engine they are of, and so the
worker refuses a second one ("CuMem allocator can only be used for one instance per process", v1/worker/gpu_worker.py).
A second allocator cannot be: the C extension below knows one pair of callbacks.
"""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Iterator, MutableMapping
from typing import Any

from rlhf_megatron.compat.patches import replacement
from rlhf_megatron.compat.vllm.names import KNOWN, PACKAGES


class Allocations(MutableMapping[int, Any]):
    """The allocator's allocations by address: all are found, and a walk sees those of ``owner``; without one, all."""

    def __init__(self) -> None:
        self.owner: object = None
        self._entries: dict[int, tuple[object, Any]] = {}

    def __getitem__(self, address: int) -> Any:
        return self._entries[address][1]

    def __setitem__(self, address: int, data: Any) -> None:
        self._entries[address] = (self.owner, data)

    def __delitem__(self, address: int) -> None:
        del self._entries[address]

    def __iter__(self) -> Iterator[int]:
        return (address for address, (owner, _) in self._entries.items() if self.owner in (None, owner))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class SleepingMemory:
    """One engine's part of vLLM's allocator."""

    def __init__(self) -> None:
        self._allocator, self._pools = allocator_of_engines(), dict[str, Any]()
        atexit.register(self._release)  # as the allocator does with pools that it knows outside of ``in_use``

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Have the allocator know this engine's memory alone inside, and add to it what is allocated there."""
        allocator, allocations = self._allocator, self._allocator.pointer_to_data
        before = allocations.owner, allocator.allocator_and_pools
        allocations.owner, allocator.allocator_and_pools = self, self._pools
        try:
            yield
        finally:
            allocations.owner, allocator.allocator_and_pools = before

    def _release(self) -> None:
        with self.in_use():
            self._allocator.release_pools()


@replacement(
    *PACKAGES,
    **KNOWN,
    why="vLLM's allocator puts the memory of all engines of a process to sleep together, and so a second one is "
    "refused",
    upstream="https://github.com/vllm-project/vllm/issues/18975",
)
def allocator_of_engines() -> Any:
    """Return vLLM's allocator, which from now on tells engines apart."""
    from vllm.device_allocator.cumem import CuMemAllocator

    allocator = CuMemAllocator.get_instance()
    if not isinstance(allocator.pointer_to_data, Allocations):
        allocations = Allocations()
        allocations.update(allocator.pointer_to_data)
        allocator.pointer_to_data = allocations
    return allocator
