"""Counts and times what one rank of thousands does to get its process groups, and what joining takes.

    python tools/bench/process_groups.py --output docs/results/process_groups.json
    torchrun --nproc-per-node 2 tools/bench/process_groups.py --gpus --output docs/results/communicators.json

Without --gpus: the groups of an actor, a reference in the same layout and a critic, on one rank of 1,024 and 8,192 with
torch's fake backend, beside groups made by all ranks of the world for each role; and real processes of this machine
that join a world over gloo, with all connections at once and with those that are used. With --gpus: NCCL communicators
of all ranks, made lazily and by splitting, with the memory they take.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gloo_worlds import time_to_join
from reports import spread, write_report
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlhf_megatron.compat.torch import named_group, split_of
from rlhf_megatron.topology.communicators import made_groups
from rlhf_megatron.topology.layout import AXES, Layout
from rlhf_megatron.topology.process_groups import make_groups

# (actor and reference, critic) by ranks.
LAYOUTS = {
    1024: (Layout(tensor=8, pipeline=4, data=32), Layout(tensor=8, data=128)),
    8192: (Layout(tensor=4, pipeline=8, data=256, expert=8, expert_tensor=1), Layout(tensor=8, data=1024)),
}
JOINED = (64, 128, 256)
REPEATS = 5
TIMEOUT = datetime.timedelta(minutes=5)


def main() -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpus", action="store_true", help="time NCCL communicators, under torchrun")
    parser.add_argument(
        "--joined", type=int, nargs="*", default=JOINED, help="processes that join (default: %(default)s)"
    )
    parser.add_argument("--output", type=Path, help="write the results there as JSON")
    options = parser.parse_args()
    if options.gpus:
        results: dict[str, Any] = {"communicators": communicators()}
    else:
        results = {
            "rows": [simulated(ranks) for ranks in LAYOUTS],
            "joining": [time_to_join(ranks, lazy) for ranks in options.joined for lazy in (False, True)],
        }
    if int(os.environ.get("RANK", "0")) == 0:
        print(results)
        if options.output:
            write_report(options.output, results)
    return 0


def simulated(ranks: int) -> dict[str, Any]:
    """Return the groups of three roles on the last of ``ranks``."""
    model, critic = LAYOUTS[ranks]
    roles = {"actor": model, "reference": model, "critic": critic}
    return {
        "ranks": ranks,
        "layouts": {name: _degrees(layout) for name, layout in roles.items()},
        "by all ranks": _counted(ranks, lambda: [_make_by_all(layout) for layout in roles.values()]),
        "by members": _counted(ranks, lambda: [_make_by_members(layout) for layout in roles.values()]),
    }


def _degrees(layout: Layout) -> dict[str, int]:
    return {name: degree for name, degree in dataclasses.asdict(layout).items() if degree not in (None, 1)} | (
        {"expert_tensor": 1} if layout.expert_tensor == 1 else {}
    )


def _counted(ranks: int, make: Callable[[], list[list[list[int]]]]) -> dict[str, Any]:
    """Return the cost of making the groups of all roles: calls by role, of one rank, connections of gloo, seconds."""
    dist.init_process_group("fake", store=FakeStore(), rank=ranks - 1, world_size=ranks)
    start = time.perf_counter()
    of_roles = make()
    seconds = time.perf_counter() - start
    dist.destroy_process_group()
    calls = [members for made in of_roles for members in made]
    return {
        "calls of each role": [len(made) for made in of_roles],
        "of one rank": sum(len(members) == 1 for members in calls),
        "this rank is in": sum(ranks - 1 in members for members in calls),
        "connections of this rank, if all at once": sum(len(members) - 1 for members in calls if ranks - 1 in members),
        "seconds": seconds,
    }


def _make_by_members(layout: Layout) -> list[list[int]]:
    before = set(made_groups())
    make_groups(layout, range(layout.size), tied_embeddings=True)
    return [list(members) for members, _ in made_groups().keys() - before]


def _make_by_all(layout: Layout) -> list[list[int]]:
    """Do as every rank did for each role: one group for each distinct set of ranks, also those that it is not in."""
    distinct = dict.fromkeys(tuple(members) for members in _all_groups(layout))
    for members in distinct:
        dist.new_group(list(members))
    return [list(members) for members in distinct]


def _all_groups(layout: Layout) -> Iterator[list[int]]:
    for axes in (
        *(("tensor",), ("context", "data"), ("tensor", "pipeline"), AXES, ("pipeline",), ("context",), ("data",)),
        *(("tensor", "context"), ("tensor", "context", "data")),
    ):
        yield from layout.groups_along(*axes)
    for axes in (("data",), ("tensor", "expert", "pipeline"), ("expert",), ("tensor",), ("tensor", "expert")):
        yield from layout.expert_groups_along(*axes)
    for members in layout.groups_along("pipeline"):
        yield from (sorted({members[0], members[-1]}), [members[0]])


def communicators() -> dict[str, Any]:
    """Return milliseconds and bytes of a communicator of all ranks, made in each way and used once."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    ranks = list(range(dist.get_world_size()))
    ways: dict[str, Callable[[str], dist.ProcessGroup | None]] = {
        "lazy": lambda name: named_group(ranks, name, "nccl", TIMEOUT),
        "split of the role's": lambda name: split_of(_world(), [ranks], name, TIMEOUT),
        "split of the world's, as new_group does": lambda _: dist.new_group(ranks),
    }
    results: dict[str, Any] = {}
    for way, make in ways.items():
        seconds, taken = [], []
        for number in range(REPEATS + 1):
            dist.barrier()
            torch.cuda.synchronize()
            free, start = torch.cuda.mem_get_info()[0], time.perf_counter()
            dist.all_reduce(torch.ones(1, device=device), group=make(f"{way}-{number}"))
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
            taken.append(free - torch.cuda.mem_get_info()[0])
        results[way] = {
            "milliseconds": spread([1e3 * each for each in seconds[1:]]),
            "MB": spread([each / 2**20 for each in taken[1:]]),
        }
    dist.destroy_process_group()
    return {"ranks": len(ranks), "ways": results}


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


if __name__ == "__main__":
    sys.exit(main())
