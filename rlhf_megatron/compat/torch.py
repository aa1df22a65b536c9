"""Private names of torch: its table of process groups and the thread count that vLLM takes for itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


@contextlib.contextmanager
def as_world(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Make `group` the default process group inside the block; there, ranks are those of `group`.

    `get_megatron_optimizer` and vLLM run collectives over the default group and test for "rank 0" there, so a role on a
    part of the world has to be the whole world to them. torch has no public way to say so.
    """
    world = distributed_c10d._get_default_group()
    if group is None or dist.get_process_group_ranks(group) == list(range(dist.get_world_size())):
        yield
        return
    ranks = distributed_c10d._world.pg_group_ranks[group]
    distributed_c10d._update_default_pg(group)
    distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(group.size())}
    try:
        yield
    finally:
        distributed_c10d._world.pg_group_ranks[group] = ranks
        distributed_c10d._update_default_pg(world)


def align_group_names() -> None:
    """Have all ranks give the next process group the same name; collective over the world.

    torch names groups by a count of each process's own, which differs where a part of the ranks has made groups that
    the others have not.
    """
    count = torch.tensor(distributed_c10d._world.group_count)
    dist.all_reduce(count, dist.ReduceOp.MAX)
    distributed_c10d._world.group_count = int(count)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Have tensors that are made inside be of `dtype` where nothing else is said."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def preserved_threads() -> Iterator[None]:
    """Give `torch.set_num_threads` and the thread count back after an engine was made.

    On CPUs vLLM replaces the function by one that does nothing, and may lower the count for itself.
    """
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != threads:
            set_num_threads(threads)
