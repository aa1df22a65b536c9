"""Regathering of plain tensors on real ranks: many in a row, casts, damage on the way, ranks that fail."""

from __future__ import annotations

import contextlib
import io
import os
import resource
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.ranks import run_ranks, write_result
from rlhf_megatron.models.architecture import Architecture
from rlhf_megatron.models.weight_source import window
from rlhf_megatron.regather.execute import Regather
from rlhf_megatron.regather.peer_memory import PeerMemory
from rlhf_megatron.regather.plan import RankPlan, ShardSpec, plan_regather
from rlhf_megatron.regather.shard_specs import rollout_shards, trainer_shards
from rlhf_megatron.regather.transport import Pending, PointToPoint
from rlhf_megatron.regather.verify import RegatherError
from rlhf_megatron.topology.layout import Layout
from shards import architecture, checkpoint, filled

REGATHERINGS = 200
STAGING = 16384  # several rounds
DAMAGED = 3  # the transfer that is damaged on rank 1


class Operations(TorchDispatchMode):
    """Record of what torch does."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(str(function))
        return function(*args, **(kwargs or {}))


class DamagedTransport(PointToPoint):
    """Transport that flips a bit of what arrives in one transfer of many."""

    def __init__(self) -> None:
        self.transfers = 0

    def start(self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, Sequence[Tensor]]) -> list[Pending]:
        pending = super().start(sends, receives)
        self.transfers += 1
        if self.transfers == DAMAGED and dist.get_rank() == 1:
            for each in pending:
                each.wait()
            next(iter(receives.values()))[0].view(torch.int32)[0] ^= 1
            return []
        return pending


def sides(a: Architecture) -> tuple[ShardSpec, ShardSpec]:
    """Return both sides, from TP2 to a replica on each of two ranks."""
    return trainer_shards(a, Layout(2), range(2)), rollout_shards(a, 1, range(2))


def shards(blocks: Sequence[Any], tensors: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: value.to(dtype) for name, value in filled(blocks, tensors).items()}


def many_regatherings() -> dict[str, Any]:
    """Regather 200 times other weights into the same storage, a poisoned one; then with a cast, and with damage on the
    way."""
    a, rank = architecture(tied=False), dist.get_rank()
    sources, wanted = sides(a)
    plan = plan_regather(sources, wanted, rank)
    regather = Regather(plan, torch.float32, "cpu", staging_bytes=STAGING, direct_bytes=1024)
    held = shards(sources.blocks(rank), checkpoint(a))
    targets = {name: torch.full_like(v, torch.nan) for name, v in shards(wanted.blocks(rank), checkpoint(a)).items()}
    places = [tensor.data_ptr() for tensor in targets.values()]
    operations, wrong = Operations(), 0
    for number in range(REGATHERINGS):
        tensors = checkpoint(a, seed=number)
        for name, value in shards(sources.blocks(rank), tensors).items():
            held[name].copy_(value)
        with operations if number else contextlib.nullcontext():
            regather.run(held, targets)
        expected = shards(wanted.blocks(rank), tensors)
        wrong += sum(not torch.equal(targets[name], value) for name, value in expected.items())
    regather.verify(held, targets)
    moved = places != [tensor.data_ptr() for tensor in targets.values()]
    return {
        "wrong": wrong + wrong_where_one_moves(regather, held, targets, expected),
        "moved": moved,
        "operations": sorted(operations.seen),
        "staging": regather.staging_bytes,
        "cast": casts_as_torch_does(a, plan, held, wanted.blocks(rank), tensors),
        "damage": what_damage_says(plan, held, targets),
    }


def wrong_where_one_moves(
    regather: Regather, held: dict[str, Tensor], targets: dict[str, Tensor], expected: dict[str, Tensor]
) -> int:
    """Return how many parameters are wrong after others have moved, one before each run: first ones, and others."""
    wrong = 0
    for name in [*targets, *held]:
        for tensors in (held, targets):
            old = tensors.get(name)
            if old is not None:
                tensors[name] = old.clone()
                old.fill_(torch.nan)
        for tensor in targets.values():
            tensor.fill_(torch.nan)
        regather.run(held, targets)
        wrong += sum(not torch.equal(targets[name], value) for name, value in expected.items())
    return wrong


def casts_as_torch_does(
    a: Architecture, plan: RankPlan, held: dict[str, Tensor], blocks: Sequence[Any], tensors: dict[str, Tensor]
) -> bool:
    """Regather float32 in the trainer, bfloat16 in the rollout, with padded rows."""
    expected = shards(blocks, tensors, torch.bfloat16)
    targets = {name: torch.full_like(value, torch.nan) for name, value in expected.items()}
    rows = targets["lm_head.weight"]
    targets["lm_head.weight"] = torch.cat([rows, rows[:56]])
    expected["lm_head.weight"] = torch.cat([expected["lm_head.weight"], torch.zeros_like(rows[:56])])
    Regather(plan, torch.bfloat16, "cpu", source_dtype=torch.float32).run(held, targets)
    return all(torch.equal(targets[name], value) for name, value in expected.items())


def what_damage_says(plan: RankPlan, held: dict[str, Tensor], targets: dict[str, Tensor]) -> str:
    """Return the error of a check after a regathering that was damaged."""
    regather = Regather(plan, torch.float32, "cpu", DamagedTransport(), staging_bytes=STAGING)
    regather.run(held, targets)
    try:
        regather.verify(held, targets)
    except RegatherError as error:
        return str(error)
    return "no error"


def test_weights_that_change_two_hundred_times() -> None:
    ranks = run_ranks(many_regatherings, 2)
    for result in ranks:
        assert result["wrong"] == 0 and not result["moved"] and result["cast"]
        assert 0 < result["staging"] <= STAGING + 1024  # a piece begins at a multiple of 16 bytes
        # Nothing is made after the first: only copies between what is there, and transfers.
        made = {name for name in result["operations"] if not name.startswith("c10d.")}
        assert made == {"aten._foreach_copy_.default"}
        told = "model.embed_tokens.weight differs after the transfer (tensors: 1, first seen on rank 1)"
        assert told in result["damage"]


def over_two_hosts() -> dict[str, Any]:
    """Regather where ranks 2 and 3 are another host: what they lack comes once, and they forward it to each other."""
    a, rank = architecture(tied=False), dist.get_rank()
    sources, wanted = trainer_shards(a, Layout(2), range(2)), rollout_shards(a, 1, range(4))
    plan = plan_regather(sources, wanted, rank, hosts=2)
    held = shards(sources.blocks(rank), checkpoint(a))
    expected = shards(wanted.blocks(rank), checkpoint(a), torch.bfloat16)
    wrong = 0
    for direct_bytes in (1024, None):
        for dtype, source_dtype in ((torch.float32, None), (torch.bfloat16, torch.float32)):
            regather = Regather(
                plan, dtype, "cpu", staging_bytes=STAGING, direct_bytes=direct_bytes, source_dtype=source_dtype
            )
            for seed in range(5):
                tensors = checkpoint(a, seed)
                for name, value in shards(sources.blocks(rank), tensors).items():
                    held[name].copy_(value)
                targets = {name: torch.full_like(value, torch.nan, dtype=dtype) for name, value in expected.items()}
                regather.run(held, targets)
                wanted_now = shards(wanted.blocks(rank), tensors, dtype)
                wrong += sum(not torch.equal(targets[name], value) for name, value in wanted_now.items())
            regather.verify(held, targets)
    damage = "no error"
    if rank == 3:
        forwarded = plan.forwarded[0]
        window(targets[forwarded.destination_parameter], forwarded.destination_offset, forwarded.region).add_(1)
    try:
        regather.verify(held, targets)
    except RegatherError as error:
        damage = str(error)
    crossing = sum(copy.elements for copy in plan.receives if copy.source // 2 != rank // 2)
    return {"wrong": wrong, "crossing": crossing, "damage": damage, "kept": plan.bytes_kept(1)}


def test_a_host_receives_once_and_forwards() -> None:
    ranks = run_ranks(over_two_hosts, 4)
    assert [result["wrong"] for result in ranks] == [0] * 4
    crossing = [result["crossing"] for result in ranks]
    assert crossing[:2] == [0, 0] and sum(crossing) == ranks[2]["kept"]
    assert max(crossing[2:]) <= 1.1 * min(crossing[2:])
    assert all("differs after the transfer (tensors: 1, first seen on rank 3)" in each["damage"] for each in ranks)


def read_from(folder: str, trainer: int, rollout: Sequence[int]) -> dict[str, Any]:
    """Have ranks read from each other in memory that they share, as GPUs of one host do; then weights move.

    The first ranks train, with a tensor parallelism of ``trainer``; each rank of ``rollout`` has all weights.
    """
    a, rank, world = architecture(tied=False), dist.get_rank(), dist.get_world_size()
    sources, wanted = trainer_shards(a, Layout(trainer), range(trainer)), rollout_shards(a, 1, rollout)
    plan = plan_regather(sources, wanted, rank)
    held, peers = peers_by_files(folder, plan, sources)
    regather = Regather(plan, torch.float32, "cpu", peers=peers)
    targets = {name: torch.full_like(v, torch.nan) for name, v in shards(wanted.blocks(rank), checkpoint(a)).items()}
    wrong = 0
    for number in range(20):
        tensors = checkpoint(a, seed=number)
        for name, value in shards(sources.blocks(rank), tensors).items():
            held[name].copy_(value)
        regather.run(held, targets)
        expected = shards(wanted.blocks(rank), tensors)
        wrong += sum(not torch.equal(targets[name], value) for name, value in expected.items())
    regather.verify(held, targets)
    for number, name in enumerate(filled(wanted.blocks(rollout[0]), tensors)):
        if expected and number % world == rank:  # on one rank alone
            targets[name] = torch.full_like(targets[name], torch.nan)
        regather.run(held, targets)
        wrong += sum(not torch.equal(targets[name], value) for name, value in expected.items())
    result = {"wrong": wrong, "staging": regather.staging_bytes, "given": len(peers.own), "taken": len(targets)}
    if trainer < world:
        return result
    moved = next(iter(peers.own))
    held[moved] = held[moved].clone()
    try:
        regather.run(held, targets)
        said = "no error"
    except RegatherError as error:
        said = str(error)
    return result | {"moved": moved, "said": said}


def peers_by_files(folder: str, plan: RankPlan, sources: ShardSpec) -> tuple[dict[str, Tensor], PeerMemory]:
    """Return this rank's parameters, which lie in files, and those of the ranks that it reads from or that read from
    it."""
    a, rank, world = architecture(tied=False), dist.get_rank(), dist.get_world_size()
    partners = {copy.source for copy in plan.receives} | {copy.destination for copy in plan.sends}
    parameters = {
        each: in_files(folder, each, shards(sources.blocks(each), checkpoint(a))) for each in (rank, *partners)
    }
    held = parameters.pop(rank)
    own = {copy.source_parameter: held[copy.source_parameter].data_ptr() for copy in plan.sends}
    return held, PeerMemory(frozenset(range(world)), parameters, own, [dist.barrier], [dist.barrier], [])


def in_files(folder: str, rank: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of these shapes in files that all ranks map."""
    return {
        name: torch.from_file(f"{folder}/{rank}-{name}", shared=True, size=value.numel()).view(value.shape)
        for name, value in tensors.items()
    }


def test_weights_read_from_the_memory_of_another_rank(tmp_path: Path) -> None:
    for result in run_ranks(read_from, 2, {"folder": str(tmp_path), "trainer": 2, "rollout": [0, 1]}):
        assert result["wrong"] == 0 and result["staging"] == 0 and result["given"] and result["taken"]
        assert result["said"] == f"regathering: {result['moved']} has moved, and other ranks read it where it was"


def test_ranks_that_only_give_or_only_take_or_have_nothing(tmp_path: Path) -> None:
    ranks = run_ranks(read_from, 4, {"folder": str(tmp_path), "trainer": 1, "rollout": [1, 2]}, timeout=120)
    assert [result["wrong"] for result in ranks] == [0] * 4
    assert [bool(result["given"]) for result in ranks] == [True, False, False, False]
    assert [bool(result["taken"]) for result in ranks] == [False, True, True, False]


def different_plans() -> str:
    a = architecture()
    layout = Layout(2) if dist.get_rank() else Layout(pipeline=2)
    plan = plan_regather(trainer_shards(a, layout, range(2)), rollout_shards(a, 1, range(2)), dist.get_rank())
    try:
        Regather(plan, torch.float32, "cpu")
    except RegatherError as error:
        return str(error)
    return "no error"


def little_memory() -> dict[str, Any]:
    """Return a second rank that may take 100 MB more, and buffers of 256 MB."""
    a = architecture(tied=False, vocabulary=4_000_000, layers=1)
    plan = plan_regather(*sides(a), dist.get_rank())
    before = resource.getrlimit(resource.RLIMIT_AS)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (100 << 20), before[1]))
    with contextlib.redirect_stderr(io.StringIO()) as said:
        regather = Regather(plan, torch.float32, "cpu", direct_bytes=None)
    resource.setrlimit(resource.RLIMIT_AS, before)
    return {"said": said.getvalue(), "staging": regather.staging_bytes}


def failures() -> list[Any]:
    """Return failures of different plans, little memory, and last a rank that ends in the middle of it all."""
    found = [different_plans(), little_memory()]
    a, rank = architecture(), dist.get_rank()
    sources, wanted = sides(a)
    regather = Regather(plan_regather(sources, wanted, rank), torch.float32, "cpu")
    held, targets = (shards(side.blocks(rank), checkpoint(a)) for side in (sources, wanted))
    regather.run(held, targets)
    if rank == 1:
        write_result(found)
        os._exit(0)
    try:
        while True:
            regather.run(held, targets)
    except RegatherError as error:
        write_result([*found, str(error)])
        os._exit(0)  # there is no world any more to leave in order


def test_failures_end_with_an_error_on_all_ranks() -> None:
    ranks = run_ranks(failures, 2, timeout=120)
    for plans, memory, *_ in ranks:
        assert plans.startswith("regathering: ranks 0 and 1 plan their transfer differently (")
        assert 0 < memory["staging"] < 128 << 20
    assert "no memory for 256 MB of buffers on every rank; going on with" in ranks[0][1]["said"]
    assert not ranks[1][1]["said"]
    assert "the exchange with ranks [1] failed" in ranks[0][2]
