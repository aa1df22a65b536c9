"""Teams: ranks that exchange among themselves, and libraries that take a part of the ranks for the whole world."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallel.ranks import run_ranks
from rlhf_megatron.data.rollout_batch import batch_from_rows
from rlhf_megatron.topology.exchange import from_rank, gather_objects, sum_over_ranks
from rlhf_megatron.topology.row_exchange import gather_rows
from rlhf_megatron.topology.team import make_team, whole_world, world_of_their_own


def exchange_in_two_teams() -> dict[str, Any]:
    """Exchange on rank 0, and on ranks 1 and 2, which do not wait for each other."""
    teams = [make_team([0], 1.0), make_team([1, 2], 1.0)]
    own = next(team for team in teams if team.here)
    rank = dist.get_rank()
    rows = gather_rows(batch_from_rows([[rank]], [[10 + rank]], row_id=[rank]), own.group)
    found: dict[str, Any] = {
        "rows": rows.numbers.holder.tolist(),
        "tokens": rows.held.tokens.tolist(),
        "sum": sum_over_ranks([rank], own.group),
        "all": gather_objects(rank, own.group),
        "first": from_rank(rank, own.first, own.group),
        "everywhere": from_rank(rank, teams[1].first),
    }
    if rank == 0:  # behind the others' last call: they are not waited for
        found["sum again"] = sum_over_ranks([7], own.group)
    return found


def test_teams_exchange_among_themselves() -> None:
    alone, *pair = run_ranks(exchange_in_two_teams, 3)
    assert alone == {
        "rows": [0],
        "tokens": [0, 10],
        "sum": [0],
        "all": [0],
        "first": 0,
        "everywhere": 1,
        "sum again": [7],
    }
    assert [each.pop("tokens") for each in pair] == [[1, 11], [2, 12]]
    assert pair == [{"rows": [1, 2], "sum": [3], "all": [1, 2], "first": 1, "everywhere": 1}] * 2


def take_a_part_for_the_world() -> dict[str, Any]:
    """Have ranks 1 and 2 make groups as a library does that believes to be alone; then all ranks make one more."""
    found: dict[str, Any] = {}
    with world_of_their_own([1, 2] if dist.get_rank() else []):
        if dist.get_world_size() == 2:
            groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
            pair = dist.new_group([0, 1])
            value = torch.tensor([dist.get_rank() + 1])
            dist.all_reduce(value, group=pair)
            found = {
                "world": dist.get_world_size(),
                "rank": [dist.get_rank(), int(os.environ["RANK"])],
                "sum": value.item(),
                "alone": dist.get_world_size(groups[dist.get_rank()]),
            }
            kept = pair
    if found:  # what was made there stays in use
        box = ["from the second" if found["rank"][0] == 1 else None]
        dist.broadcast_object_list(box, src=1, group=kept)
        found["heard"] = box[0]
    everyone = dist.new_group([0, 2])
    total = torch.tensor([dist.get_rank()])
    if dist.get_rank() != 1:
        dist.all_reduce(total, group=everyone)
    return found | {"after": total.item(), "again": [dist.get_rank(), int(os.environ["RANK"])]}


def test_a_part_can_be_a_world_of_its_own_for_a_while() -> None:
    outside, *inside = run_ranks(take_a_part_for_the_world, 3)
    assert outside == {"after": 2, "again": [0, 0]}
    of_both = {"world": 2, "sum": 3, "alone": 1, "heard": "from the second"}
    assert inside == [
        of_both | {"rank": [0, 0], "after": 1, "again": [1, 1]},
        of_both | {"rank": [1, 1], "after": 2, "again": [2, 2]},
    ]


def test_the_world_of_all_ranks_stays_as_it_is() -> None:
    assert run_ranks(groups_made, 2) == [[0, 0, 1]] * 2


def groups_made() -> list[int]:
    before = dist.distributed_c10d._world.group_count
    with world_of_their_own(range(2)):
        made = dist.distributed_c10d._world.group_count - before
    return [made, whole_world().first, len(whole_world().ranks) - 1]


def shared_memory_of_a_replica() -> str:
    """Return vLLM's names of the shared memory of a replica of two ranks, of two on this host."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    from rlhf_megatron.compat.vllm import cpu

    cpu.name_shared_memory_by_job()
    os.environ["VLLM_DIST_IDENT"] = "env"
    first = dist.get_rank() // 2 * 2
    with world_of_their_own([first, first + 1]):
        return _CPUSHMDistributed.make_group_name(SimpleNamespace(unique_name="tp:0", ranks=[0, 1]))  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs vLLM shares no memory of the host")
def test_replicas_on_one_host_do_not_share_memory() -> None:
    names = run_ranks(shared_memory_of_a_replica, 4)
    assert names[0] == names[1] != names[2] == names[3]
