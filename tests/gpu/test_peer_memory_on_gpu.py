"""Weights out of the memory of another GPU of the host: read when they are written, and before they change again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from parallel.ranks import run_ranks
from rlhf_megatron.regather.execute import Regather
from rlhf_megatron.regather.peer_memory import map_peers
from rlhf_megatron.regather.plan import plan_regather
from rlhf_megatron.regather.shard_specs import parameter_shapes, rollout_shards, trainer_shards
from rlhf_megatron.topology.layout import Layout
from shards import architecture

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ROUNDS, FOLLOWING = 40, 200
CYCLES = 30_000_000  # some 20 ms, in which another rank could read or write what it must not


def read_in_turns(trainers: int, rollout: Sequence[int], moving: int | None = None) -> dict[str, list[list[float]]]:
    """Return what this rank has after each round, in which rank r writes ``round + r / 10`` everywhere and all read.

    The first ranks train, with a tensor parallelism of ``trainers``; each rank of ``rollout`` wants all weights. No CPU
    waits for another, and one rank or the other is late, before it writes or before it reads. On the rank ``moving``,
    alone, in each second round another of the parameters that are filled is elsewhere than before: it is missed before
    the first copies start, or behind them. Then many rounds follow each other while nobody is late.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    a = architecture(tied=False, vocabulary=256)
    sources, wanted = trainer_shards(a, Layout(trainers), range(trainers)), rollout_shards(a, 1, rollout)
    plan = plan_regather(sources, wanted, rank)
    held, targets = (
        {name: torch.zeros(shape, device="cuda") for name, shape in parameter_shapes(side.blocks(rank)).items()}
        for side in (sources, wanted)
    )
    peers = map_peers(plan, held)
    assert peers is not None
    regather = Regather(plan, torch.float32, "cuda", peers=peers)
    regather.run(held, targets)  # compiles
    taken, left = [], []  # what was replaced stays in memory, so that it is not there that the next one is made
    for number in range(ROUNDS + FOLLOWING):
        late = number < ROUNDS
        if late and number % (world + 1) == rank:
            torch.cuda._sleep(CYCLES)
        for tensor in held.values():
            tensor.fill_(number + rank / 10)
        if late and number // 2 % (world + 1) == rank:
            torch.cuda._sleep(CYCLES)
        if late and moving == rank and number % 2:
            name = list(targets)[number // 2 % len(targets)]
            left.append(targets[name])
            targets[name] = torch.full_like(targets[name], torch.nan)
        regather.run(held, targets)
        taken.append(torch.cat([torch.zeros(0, device="cuda"), *(tensor.flatten() for tensor in targets.values())]))
    found = [sorted({round(value, 1) for value in each.unique().tolist()}) for each in taken]
    peers.close()
    return {"found": found, "moved": [[len(left)]]}


@pytest.mark.parametrize(
    ("world", "trainers", "rollout", "moving"),
    [
        (2, 2, [0, 1], None),
        (4, 4, [0, 1, 2, 3], None),
        (2, 2, [0, 1], 1),
        (4, 2, [1, 2], 2),
        (4, 2, [1, 2], 1),
    ],
    ids=[
        *("two ranks", "four ranks", "parameters move on one rank"),
        *("a rank only gives, one only takes, one has nothing", "what moves is of a rank that gives and takes"),
    ],
)
def test_what_is_read_is_of_the_round(world: int, trainers: int, rollout: list[int], moving: int | None) -> None:
    written = [[round(number + rank / 10, 1) for rank in range(trainers)] for number in range(ROUNDS + FOLLOWING)]
    arguments = {"trainers": trainers, "rollout": rollout, "moving": moving}
    results = run_ranks(read_in_turns, world, arguments, timeout=180)
    nothing: list[list[float]] = [[] for _ in written]
    assert [each["found"] for each in results] == [written if rank in rollout else nothing for rank in range(world)]
    assert [each["moved"] for each in results] == [[[ROUNDS // 2 if rank == moving else 0]] for rank in range(world)]
