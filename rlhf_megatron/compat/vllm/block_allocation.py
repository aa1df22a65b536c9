"""Allocation of vLLM's cache blocks at the steps that need one: a sequence that samples fills a block in many.

vLLM looks for blocks to free, to allocate and to publish for each running request at each step, by a dozen calls in
Python; where a model is small that was a seventh of the time of an engine's step (0.5B with 256 sequences on an H200).
What is here asks two tables of vLLM's before, and calls vLLM only where one of them has something to do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from rlhf_megatron.compat.patches import is_known, replacement
from rlhf_megatron.compat.vllm.names import KNOWN, PACKAGES


@replacement(
    *PACKAGES,
    **KNOWN,
    why="vLLM goes through the allocation of blocks for each running request at each step, also where it has room",
    upstream="https://github.com/vllm-project/vllm/pull/29206",
)
@contextlib.contextmanager
def only_where_needed(scheduler: Any) -> Iterator[None]:
    """Have vLLM's ``scheduler`` allocate and publish blocks where there is one to allocate or to publish.

    It plans the same steps with the same blocks. In a version that is not known, and for caches that are not of one
    kind that keeps all tokens (where blocks are also freed as a sequence grows), all is vLLM's own.
    """
    if not is_known(PACKAGES, **KNOWN) or not keeps_all_tokens(manager := scheduler.kv_cache_manager):
        yield
        return
    _allocate_where_needed(manager)
    if manager.enable_caching:
        _publish_where_needed(manager)
    try:
        yield
    finally:
        for name in ("allocate_slots", "cache_blocks"):
            vars(manager).pop(name, None)  # the class's own are there again


def keeps_all_tokens(manager: Any) -> bool:
    """Say whether there is one kind of cache, in which each token has a slot until its request ends.

    A block is also that of one hash: otherwise the end of a prompt is published, and copied, within a block.
    """
    from vllm.v1.core import kv_cache_coordinator
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    plain = (kv_cache_coordinator.UnitaryKVCacheCoordinator, kv_cache_coordinator.KVCacheCoordinatorNoPrefixCache)
    if type(manager) is not KVCacheManager or type(manager.coordinator) not in plain:
        return False
    first, *others = manager.coordinator.single_type_managers
    is_full = type(first) is FullAttentionManager and not others
    return is_full and first.block_size == manager.block_pool.hash_block_size


class CacheBlocks:
    """Blocks of each request in a cache that keeps all tokens, by vLLM's own name of it."""

    def __init__(self, manager: Any) -> None:
        [kind] = manager.coordinator.single_type_managers
        self._publishes, self._size = manager.enable_caching, kind.block_size
        self._blocks, self._published = kind.req_to_blocks, kind.num_cached_block

    def lack(self, name: str, tokens: int) -> bool:
        """Say whether there is no room for so many ``tokens`` in all."""
        return tokens > len(self._blocks.get(name, ())) * self._size

    def end(self, name: str, tokens: int) -> bool:
        """Say whether so many tokens fill a block that others may share and that is not published yet."""
        return self._publishes and tokens >= (self._published.get(name, 0) + 1) * self._size


def _allocate_where_needed(manager: Any) -> None:
    from vllm.v1.request import RequestStatus

    blocks = CacheBlocks(manager)
    allocate, none, running = manager.allocate_slots, manager.empty_kv_cache_blocks, RequestStatus.RUNNING

    def allocate_slots(
        request: Any, num_new_tokens: int, *arguments: Any, num_lookahead_tokens: int = 0, **named: Any
    ) -> Any:
        # The scheduler gives more only for what waits, which may find blocks of others or has to leave some free.
        if num_new_tokens and request.status == running and not arguments and not named:
            name = request.request_id
            tokens = request.num_computed_tokens + num_new_tokens + num_lookahead_tokens
            if not blocks.lack(name, tokens) and not blocks.end(name, tokens):
                return none
        return allocate(request, num_new_tokens, *arguments, num_lookahead_tokens=num_lookahead_tokens, **named)

    manager.allocate_slots = allocate_slots


def _publish_where_needed(manager: Any) -> None:
    blocks, publish = CacheBlocks(manager), manager.cache_blocks

    def cache_blocks(request: Any, num_computed_tokens: int) -> None:
        if blocks.end(request.request_id, num_computed_tokens):
            publish(request, num_computed_tokens)

    manager.cache_blocks = cache_blocks
