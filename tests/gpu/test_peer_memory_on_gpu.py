"""Weights out of the memory of another GPU of the host: read when they are written, and before they change again."""

from __future__ import annotations

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

ROUNDS = 40
CYCLES = 30_000_000  # some 20 ms, in which another rank could read or write what it must not


def read_in_turns() -> list[list[float]]:
    """Return what this rank has after each round, in which rank r writes ``round + r / 10`` everywhere and all read.

    Nothing waits on the CPU, and one rank or the other is late, before it writes or before it reads.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    a = architecture(tied=False, vocabulary=256)
    sources, wanted = trainer_shards(a, Layout(world), range(world)), rollout_shards(a, 1, range(world))
    plan = plan_regather(sources, wanted, rank)
    held, targets = (
        {name: torch.zeros(shape, device="cuda") for name, shape in parameter_shapes(side.blocks(rank)).items()}
        for side in (sources, wanted)
    )
    peers = map_peers(plan, held)
    assert peers is not None
    regather = Regather(plan, torch.float32, "cuda", peers=peers)
    regather.run(held, targets)  # compiles
    taken = []
    for number in range(ROUNDS):
        if number % (world + 1) == rank:
            torch.cuda._sleep(CYCLES)
        for tensor in held.values():
            tensor.fill_(number + rank / 10)
        if number // 2 % (world + 1) == rank:
            torch.cuda._sleep(CYCLES)
        regather.run(held, targets)
        taken.append(torch.cat([tensor.flatten() for tensor in targets.values()]))
    found = [sorted({round(value, 1) for value in each.unique().tolist()}) for each in taken]
    peers.close()
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_what_is_read_is_of_the_round(world: int) -> None:
    expected = [[round(number + rank / 10, 1) for rank in range(world)] for number in range(ROUNDS)]
    assert run_ranks(read_in_turns, world, timeout=180) == [expected] * world
