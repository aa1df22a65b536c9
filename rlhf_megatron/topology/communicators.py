"""Process groups of sets of ranks, each made once per process, by its own members alone.

Roles share them. Two collectives over one communicator must start in the same order on all of its ranks, and they do:
one thread of a process runs its roles one after the other, in an order that all ranks read from the same recipe, and no
role leaves work behind when its call returns. What is in flight beside other collectives of the same ranks has a
``purpose`` of its own, and with it another communicator. The engine makes its own groups.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import weakref
from collections.abc import Sequence
from typing import Literal

import torch.distributed as dist

from rlhf_megatron.compat.torch import named_group, split_of

# lazy: NCCL makes a communicator of its members at their first collective; split: at once, one split of the role's
# communicator for all groups along an axis. Measured on two H100s (docs/results/communicators.json): 178 (163-287) and
# 189 (175-215) ms for each, 484 MB either way; lazy ones are made only where they are used.
MAKING: Literal["lazy", "split"] = "lazy"
_TIMEOUT = datetime.timedelta(minutes=30)  # torch's for gloo; with NCCL alone it is 10

_Key = tuple[tuple[int, ...], str]
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[_Key, dist.ProcessGroup]] = weakref.WeakKeyDictionary()


def made_groups() -> dict[_Key, dist.ProcessGroup]:
    """Return the groups that this process has made here in the world that it is in, by ranks and purpose."""
    world = dist.group.WORLD
    assert world is not None, "the world is joined first"
    return _made.setdefault(world, {})


def splits() -> bool:
    """Return whether communicators are split off the role's; without NCCL there is nothing to split."""
    return MAKING == "split" and _has_nccl()


def alone() -> dist.ProcessGroup:
    """Return the group of this rank alone, for those that ask a group for its size or exchange with nobody."""
    return _make((dist.get_rank(),), "", for_host=True)


def whole_role(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Return the group of all of a role's ranks, for tensors of device and host; the world's own where these are
    all."""
    members = tuple(sorted(ranks))
    if len(members) == 1:
        return alone()
    world = dist.group.WORLD
    if len(members) == dist.get_world_size() and world is not None:
        return world
    return _make(members, "role", for_host=True)


def own_node() -> dist.ProcessGroup:
    """Return the group of the ranks that torchrun has started on this node, for tensors of the host; its members call
    it."""
    first = dist.get_rank() - int(os.environ["LOCAL_RANK"])
    return whole_role(range(first, first + int(os.environ["LOCAL_WORLD_SIZE"])))


def communicator(ranks: Sequence[int], purpose: str) -> dist.ProcessGroup:
    """Return the group of ``ranks`` for tensors of the device; its members call it, in the same order as for other
    groups."""
    return _make(tuple(sorted(ranks)), purpose, for_host=False)


def split_communicator(
    role: dist.ProcessGroup, ranks: Sequence[int], own: Sequence[int], parts: Sequence[Sequence[int]], purpose: str
) -> dist.ProcessGroup:
    """Do as ``communicator`` does, of the positions ``own`` among ``ranks``, at once; ``parts`` are those of all ranks.

    Collective over the ``role``. Roles of the same ranks share them.
    """
    members = tuple(sorted(ranks[position] for position in own))
    key = (members, f"{_digest(ranks)}{purpose}")
    if key not in made_groups():
        order = {rank: index for index, rank in enumerate(sorted(ranks))}
        places = [sorted(order[ranks[position]] for position in part) for part in parts]
        made_groups()[key] = split_of(role, places, f"{key[1]}-{_digest(members)}", _TIMEOUT)
    return made_groups()[key]


def _make(members: tuple[int, ...], purpose: str, for_host: bool) -> dist.ProcessGroup:
    made, key = made_groups(), (members, purpose)
    if key not in made:
        backend = None if for_host or not _has_nccl() else "nccl"
        made[key] = named_group(members, f"{purpose}-{_digest(members)}", backend, _TIMEOUT)
    return made[key]


def _has_nccl() -> bool:
    return "nccl" in dist.get_backend_config()


def _digest(ranks: Sequence[int]) -> str:
    return hashlib.sha256("_".join(map(str, ranks)).encode()).hexdigest()
