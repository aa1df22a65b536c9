"""The process groups of one rank of thousands: which are made, and that all of their members make the same ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlhf_megatron.topology.communicators import communicator, made_groups
from rlhf_megatron.topology.layout import AXES, Layout
from rlhf_megatron.topology.process_groups import make_groups

DENSE = Layout(tensor=8, pipeline=4, data=32)
EXPERTS = Layout(tensor=4, pipeline=8, data=256, expert=8, expert_tensor=1)
WITH_CONTEXT = Layout(tensor=2, context=4, pipeline=4, data=4, expert=4)
COLUMNS = {
    "tp": ("tensor",), "dp_cp": ("context", "data"), "mp": ("tensor", "pipeline"), "intra_dist_opt": AXES,
    "pp": ("pipeline",), "cp": ("context",), "dp": ("data",),
}  # fmt: skip
EXPERT_COLUMNS = {
    "expt_dp": ("data",), "tp_ep_pp": ("tensor", "expert", "pipeline"), "ep": ("expert",), "expt_tp": ("tensor",),
    "tp_ep": ("tensor", "expert"),
}  # fmt: skip


@pytest.fixture
def world() -> Iterator[Any]:
    """Make this process one rank of a world that is not there."""

    def join(rank: int, ranks: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)

    yield join
    dist.destroy_process_group()


@pytest.mark.parametrize("layout", [DENSE, EXPERTS, WITH_CONTEXT], ids=["dense", "experts", "context"])
def test_a_rank_makes_its_own_groups_once(world: Any, layout: Layout) -> None:
    world(layout.size - 1, layout.size)
    groups: Any = make_groups(layout, range(layout.size), tied_embeddings=True)
    made = [members for members, _ in made_groups()]
    assert all(layout.size - 1 in members for members in made), "others' groups"
    assert len(made) == len(set(made)), "two of the same ranks"
    assert [members for members in made if len(members) == 1] in ([], [(layout.size - 1,)])
    assert len(made) <= 10
    assert groups.intra_dist_opt is dist.group.WORLD
    again: Any = make_groups(layout, range(layout.size))
    assert len(made_groups()) == len(made), "another role of the same layout makes none"
    assert again.tp is groups.tp and again.embd is None


@pytest.mark.parametrize("layout", [DENSE, WITH_CONTEXT], ids=["dense", "context"])
def test_groups_are_those_of_the_layout(world: Any, layout: Layout) -> None:
    ranks = range(100, 100 + layout.size)
    for position in (0, 1, 37, layout.size - 1):
        world(ranks[position], 5000)
        groups = make_groups(layout, ranks, tied_embeddings=True)
        for names, all_groups in (
            (COLUMNS, layout.groups_along),
            (EXPERT_COLUMNS, layout.expert_groups_along),
        ):
            for name, axes in names.items():
                [own] = [members for members in all_groups(*axes) if position in members]
                got = dist.get_process_group_ranks(getattr(groups, name))
                assert got == [ranks[member] for member in own], name
        stages = layout.group_of(position, "pipeline")
        ends = [ranks[stages[0]], ranks[stages[-1]]]
        at_an_end = ranks[position] in ends
        assert (groups.embd is not None) == at_an_end
        assert not at_an_end or dist.get_process_group_ranks(groups.embd) == ends


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (DENSE, Layout(tensor=8, data=128)),
        (WITH_CONTEXT, Layout(data=128)),
        (Layout(pipeline=2, data=2), Layout(data=4)),
    ],
)
def test_members_make_a_group_in_the_same_order(world: Any, one: Layout, other: Layout) -> None:
    """Or two ranks would wait for each other, each in another group."""
    orders: dict[int, list[Any]] = {}
    for rank in range(min(one.size, 128)):
        world(rank, one.size)
        for layout in (one, other, one):
            make_groups(layout, range(one.size), tied_embeddings=True)
        orders[rank] = list(made_groups())
    for (_, left), (_, right) in itertools.islice(itertools.combinations(orders.items(), 2), 2000):
        shared = set(left) & set(right)
        assert [key for key in left if key in shared] == [key for key in right if key in shared]


def test_one_thread_works_on_what_is_in_flight_over_gloo() -> None:
    """Two threads, each of which notes what it has finished, end a process by a corrupted heap within millions."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group: Any = communicator([0], "overlapped")
        assert isinstance(group._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)
        assert group._get_backend(torch.device("cpu")).options._threads == 1
        gathered = [torch.zeros(4) for _ in range(100)]
        works = [
            group.allgather_into_tensor_coalesced([each], [torch.full((4,), float(number))])
            for number, each in enumerate(gathered)
        ]
        for work in works:
            work.wait()
        assert [each.tolist() for each in gathered] == [[float(number)] * 4 for number in range(100)]
    finally:
        dist.destroy_process_group()
