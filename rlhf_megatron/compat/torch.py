"""Private names of torch: groups, their records, gloo's threads, the thread count of vLLM, the compiler, addresses."""

from __future__ import annotations

import contextlib
import datetime
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from rlhf_megatron.compat.patches import NONE_FOUND, replacement

KNOWN = {"first": "2.11.0", "last": "2.13.0"}


@replacement(
    "torch",
    **KNOWN,
    why="Megatron's optimizer and vLLM take the default group for the whole world, which a role may be a part of",
    upstream="https://github.com/pytorch/pytorch/issues/151960",
)
@contextlib.contextmanager
def as_world(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Make ``group`` the default process group inside the block; there, ranks are those of ``group``.

    ``get_megatron_optimizer`` and vLLM run collectives over the default group and test for "rank 0" there, so a role on
    a part of the world has to be the whole world to them. torch has no public way to say so.
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


def lie_at(tensors: list[torch.Tensor], addresses: list[int], numbers: list[int]) -> bool:
    """Return whether ``tensors[i]`` begins at ``addresses[i]`` for each i of ``numbers``.

    A torch with CUDA compares the inputs of a graph by a function that takes half of the time that Python takes.
    """
    compare: Any = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)
    if compare is None:
        return all(tensors[i].data_ptr() == addresses[i] for i in numbers)
    return bool(compare(tensors, addresses, numbers))


def take_memory_by_pages(is_on: bool) -> None:
    """Have torch enlarge its GPU memory by pages from now on ("expandable segments"), or again by blocks as asked for.

    Of the latter those of one micro-batch are a little too small for the next one, and stay beside the new ones. vLLM's
    memory that sleeps must not be made of pages, nor what other processes map. A user's own choice stays.
    """
    if not torch.cuda.is_available():
        return
    given = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    if "expandable_segments" not in given:
        settings = [*filter(None, [given]), f"expandable_segments:{is_on}"]
        torch._C._accelerator_setAllocatorSettings(",".join(settings))


def align_group_names() -> None:
    """Have all ranks give the next process group the same name; collective over the world.

    torch names groups by a count of each process's own, which differs where a part of the ranks has made groups that
    the others have not.
    """
    count = torch.tensor(distributed_c10d._world.group_count)
    dist.all_reduce(count, dist.ReduceOp.MAX)
    distributed_c10d._world.group_count = int(count)


def named_group(ranks: Sequence[int], name: str, backend: str | None, timeout: datetime.timedelta) -> dist.ProcessGroup:
    """Make the process group of ``ranks``, by their own calls alone; NCCL connects them at their first collective.

    By itself torch names groups by a count that only agrees where all ranks of the world call for all groups, and with
    a device named NCCL splits the world's communicator for each, which every rank has to take part in. Over gloo one
    thread works on the group's collectives, in order.
    """
    world = distributed_c10d._get_default_group()
    device, world.bound_device_id = world.bound_device_id, None
    try:
        with _group_names(name), _gloo_of_one_thread():
            group = dist.new_group(list(ranks), timeout, backend, use_local_synchronization=True)
    finally:
        world.bound_device_id = device
    assert group is not None, f"this rank is none of {ranks}"
    return group


def split_of(
    parent: dist.ProcessGroup, parts: list[list[int]], name: str, timeout: datetime.timedelta
) -> dist.ProcessGroup:
    """Split the NCCL communicator of ``parent``: of ``parts``, in its ranks, return this rank's; collective over it."""
    dist.all_reduce(torch.zeros(1, device="cuda"), group=parent)  # which must have a communicator
    # torch 2.11 splits all backends of the parent; later versions only those asked for.
    asked = {"backend": "cuda:nccl"} if "backend" in inspect.signature(dist.split_group).parameters else {}
    with _group_names(name):
        group = dist.split_group(parent, parts, timeout, **asked)
    assert group is not None, f"this rank is in none of {parts}"
    return group


@replacement(
    "torch",
    **KNOWN,
    why="torch names groups by a count of each process's own, and a name that differs between ranks hangs",
    upstream="https://github.com/pytorch/pytorch/issues/173608",
)
@contextlib.contextmanager
def _group_names(name: str) -> Iterator[None]:
    """Have the group that is made inside be called ``name``, the same on all of its ranks and no other's."""
    before = distributed_c10d._process_group_name
    distributed_c10d._process_group_name = lambda *_, **__: distributed_c10d.GroupName(name)
    try:
        yield
    finally:
        distributed_c10d._process_group_name = before


class _GlooOfOneThread(dist.ProcessGroupGloo):
    """gloo whose collectives one thread works on, not two.

    Each thread notes the name of what it has finished in one std::string, without a lock (torch 2.13,
    ProcessGroupGloo::runLoop): where two finish at once, and a name is longer than 15 characters, as that of coalesced
    gathers is, both free the same memory.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> None:
        interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [self.create_device(interface=name) for name in interfaces] or [self.create_default_device()]
        options._threads, options._timeout = 1, timeout
        super().__init__(store, rank, size, options)


@replacement(
    "torch",
    **KNOWN,
    why="two threads of gloo that finish at once free the same memory; torch takes no options of gloo's",
    upstream=NONE_FOUND,
)
@contextlib.contextmanager
def _gloo_of_one_thread() -> Iterator[None]:
    """Have the group that is made inside be of ``_GlooOfOneThread`` where it is of gloo; torch takes no options."""
    before = distributed_c10d.ProcessGroupGloo
    distributed_c10d.ProcessGroupGloo = _GlooOfOneThread  # type: ignore[misc]
    try:
        yield
    finally:
        distributed_c10d.ProcessGroupGloo = before  # type: ignore[misc]


def default_store() -> dist.Store:
    """Return the store of the default process group, through which its ranks have found each other."""
    store: dist.Store = distributed_c10d._get_default_store()
    return store


def nccl_flight_record() -> bytes | None:
    """Return the latest collectives of this rank, in JSON; None where this torch has no NCCL."""
    dump: Any = getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_nccl_trace_json", None)
    record: bytes | None = dump() if dump is not None and torch.cuda.is_available() else None
    return record


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Have tensors that are made inside be of ``dtype`` where nothing else is said."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


_VARIANTS = 128  # torch refuses a ninth; models, roles, passes with and without gradients each need some


def with_constant_floats(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiled function to which Python's floats are constants, of which each value has code of its own."""
    from torch._dynamo import config

    return config.patch(specialize_float=True, recompile_limit=_VARIANTS)(compiled)  # type: ignore[no-any-return]


@contextlib.contextmanager
def preserved_threads() -> Iterator[None]:
    """Give ``torch.set_num_threads`` and the thread count back after an engine was made.

    On CPUs vLLM replaces the function by one that does nothing, and may lower the count for itself.
    """
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != threads:
            set_num_threads(threads)
