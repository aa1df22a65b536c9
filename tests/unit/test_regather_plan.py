"""The plan of a regathering, against brute force over every element; no process group."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_megatron.models.architecture import Architecture, parse_architecture
from rlhf_megatron.models.rectangles import elements, intersect
from rlhf_megatron.models.weight_map import Block, tensor_shapes, whole_blocks
from rlhf_megatron.models.weight_source import window
from rlhf_megatron.planning.report import plan_text, sent_between_hosts
from rlhf_megatron.recipe import load_rl
from rlhf_megatron.recipe.load import load_recipe
from rlhf_megatron.regather.peer_memory import spread_over_sources
from rlhf_megatron.regather.plan import Copy, PlanError, RankPlan, ShardSpec, plan_regather
from rlhf_megatron.regather.rounds import rounds, split_copy
from rlhf_megatron.regather.shard_specs import rollout_shards, trainer_shards
from rlhf_megatron.regather.sources import share_demand
from rlhf_megatron.regather.traffic import host_traffic
from rlhf_megatron.topology.layout import Layout
from shards import architecture, checkpoint, filled

DENSE = [
    Layout(),
    Layout(2),
    Layout(4, data=2),
    Layout(pipeline=2),
    Layout(pipeline=4),
    Layout(2, 2, 2),
    Layout(2, 2, context=2),
    Layout(1, 2, 2, virtual_pipeline=2),
    Layout(data=4),
    Layout(pipeline=3, first_stage_layers=1, last_stage_layers=1),
]
MIXTURES = [
    Layout(data=4, expert=4, expert_tensor=1),
    Layout(2, 2, 2, expert=2),
    Layout(2, 1, 4, expert=4, expert_tensor=1),
    Layout(4, 2, 1, expert=2, expert_tensor=2),
    Layout(data=4, expert=2, expert_tensor=2),
]
MODELS = {
    "tied": architecture(),
    "untied": architecture(tied=False),
    "as many key-value heads": architecture(tied=False, key_value_heads=8),
    "repeated key-value heads": architecture(key_value_heads=2),
    "mixture": architecture(tied=False, experts=8),
}


def plans_of(sources: ShardSpec, wanted: ShardSpec, hosts: Sequence[int] | int = 4) -> dict[int, RankPlan]:
    ranks = sorted({*sources.shard_of, *wanted.shard_of})
    return {rank: plan_regather(sources, wanted, rank, hosts) for rank in ranks}


def lacking(a: Architecture, held: Sequence[Block], wanted: Sequence[Block], once: bool = False) -> int:
    """Return the number of elements of ``wanted`` that are not in ``held``, counted one by one; of equal ones
    ``once``."""
    own = {name: torch.zeros(shape, dtype=torch.bool) for name, shape in tensor_shapes(a).items()}
    for block in held:
        own[block.tensor][tuple(slice(*span) for span in block.region)] = True
    count = 0
    for block in wanted:
        view = own[block.tensor][tuple(slice(*span) for span in block.region)]
        count += int((~view).sum())
        view |= once
    return count


# Of the rollout: its tensor parallelism, and whether experts are spread. Each dense model has one outside the grid.
ROLLOUTS = [(1, False), (2, False), (4, False), (2, True), (4, True)]
SAMPLED = {("tied", 0), ("untied", 1), ("as many key-value heads", 2), ("repeated key-value heads", 2)}


@pytest.mark.parametrize(
    ("model", "rollout"),
    [
        pytest.param(model, rollout, id=f"{model}-{rollout}", marks=[] if is_sampled else [pytest.mark.grid])
        for model, a in MODELS.items()
        for place, rollout in enumerate(ROLLOUTS)
        if a.experts or not rollout[1]
        for is_sampled in [a.experts is not None or (model, place) in SAMPLED]
    ],
)
def test_every_element_comes_once_and_no_other_does(model: str, rollout: tuple[int, bool]) -> None:
    a = MODELS[model]
    tensors = checkpoint(a)
    for layout in MIXTURES if a.experts else [each for each in DENSE if a.key_value_heads % each.tensor == 0]:
        world = -(-layout.size // rollout[0]) * rollout[0]
        sources, wanted = (
            trainer_shards(a, layout, range(layout.size)),
            rollout_shards(a, rollout[0], range(world), rollout[1]),
        )
        plans = plans_of(sources, wanted, hosts=2)
        held = {rank: filled(sources.blocks(rank), tensors) for rank in range(layout.size)}
        expected = {rank: filled(wanted.blocks(rank), tensors) for rank in plans}
        found = {
            rank: {name: torch.full_like(value, torch.nan) for name, value in of_rank.items()}
            for rank, of_rank in expected.items()
        }
        for rank, plan in plans.items():
            for copy in (*plan.local, *plan.receives):
                fill(copy, held[copy.source], found[rank])
            assert plan.bytes_received(1) == lacking(a, sources.blocks(rank), wanted.blocks(rank))
        arrived = {rank: {name: value.clone() for name, value in of_rank.items()} for rank, of_rank in found.items()}
        for rank, plan in plans.items():
            for copy in plan.forwarded:  # nothing is forwarded twice
                fill(copy, arrived[copy.source], found[rank])
            assert all(torch.equal(found[rank][name], value) for name, value in expected[rank].items())
        check_ends(plans)
        check_hosts(a, sources, wanted, plans, [rank // 2 for rank in plans])


def fill(copy: Copy, held: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    origin = window(held[copy.source_parameter], copy.source_offset, copy.region)
    target = window(found[copy.destination_parameter], copy.destination_offset, copy.region)
    assert target.isnan().all(), f"{copy} comes twice"
    target.copy_(origin)


def check_ends(plans: dict[int, RankPlan]) -> None:
    """Check both ends of a transfer have it, and in the same order."""
    for sides in ("sends", "receives"), ("forwards", "forwarded"):
        given, taken = ({rank: getattr(plan, side) for rank, plan in plans.items()} for side in sides)
        assert sorted(itertools.chain(*given.values())) == sorted(itertools.chain(*taken.values()))
        for sender, receiver in itertools.product(plans, plans):
            there = [copy for copy in given[sender] if copy.destination == receiver]
            assert there == [copy for copy in taken[receiver] if copy.source == sender]


def check_hosts(
    a: Architecture, sources: ShardSpec, wanted: ShardSpec, plans: dict[int, RankPlan], hosts: Sequence[int]
) -> None:
    """Check that a host gets what it lacks once, its ranks evenly much of it, and the traffic is that of the plans."""
    traffic = host_traffic(sources, wanted, hosts)
    into: dict[int, int] = defaultdict(int)
    for rank, plan in plans.items():
        assert all(hosts[copy.source] == hosts[rank] for copy in plan.forwarded)
        crossing = [copy for copy in plan.receives if hosts[copy.source] != hosts[rank]]
        into[hosts[rank]] += sum(copy.elements for copy in crossing)
        within = plan.bytes_received(1) - sum(copy.elements for copy in crossing)
        of_rank = sum(copy.elements for copy in crossing), within
        rows = 80 * 24  # what cuts between rows may come to
        assert of_rank == pytest.approx((traffic.from_hosts.get(rank, 0), traffic.from_mates.get(rank, 0)), abs=rows)
        sent = sum(copy.elements for copy in plan.sends if hosts[copy.destination] != hosts[rank])
        assert sent == pytest.approx(traffic.to_hosts.get(rank, 0), abs=rows)
        assert plan.bytes_sent(1) - sent == pytest.approx(traffic.to_mates.get(rank, 0), abs=rows)
        assert {copy.source for copy in plan.arriving} <= traffic.peers.get(rank, set())
    for host, amount in into.items():
        ranks = [rank for rank in plans if hosts[rank] == host]
        held, want = ([block for rank in ranks for block in side.blocks(rank)] for side in (sources, wanted))
        assert amount == lacking(a, held, want, once=True)
    assert traffic.between_hosts == pytest.approx(sum(into.values()))


def test_hosts_of_any_size_get_each_element_once() -> None:
    for name, layout, tensor, hosts in (
        ("untied", Layout(2, 2, 2), 2, [0, 0, 0, 1, 1, 1, 1, 1]),
        ("untied", Layout(pipeline=4), 1, [0, 1, 1, 1]),
        ("repeated key-value heads", Layout(2, 2, 2), 8, [3, 3, 5, 5, 5, 3, 5, 5]),
        ("mixture", Layout(2, 2, 2, expert=2), 4, [0, 0, 0, 0, 0, 0, 1, 1]),
    ):
        a = MODELS[name]
        sources, wanted = trainer_shards(a, layout, range(layout.size)), rollout_shards(a, tensor, range(len(hosts)))
        plans = plans_of(sources, wanted, hosts)
        check_ends(plans)
        check_hosts(a, sources, wanted, plans, hosts)
        assert any(plan.forwards for plan in plans.values())


def test_the_ranks_of_a_host_receive_and_forward_equally_much() -> None:
    a = MODELS["untied"]
    sources, wanted = trainer_shards(a, Layout(1, 2), range(2)), rollout_shards(a, 1, range(8))
    plans = plans_of(sources, wanted, hosts=4)
    received = [plans[rank].bytes_received(1) - plans[rank].forwarding.bytes_received(1) for rank in range(4, 8)]
    given = [plans[rank].forwarding.bytes_sent(1) for rank in range(4, 8)]
    assert max(received) <= 1.01 * min(received) and max(given) <= 1.01 * min(given)
    assert sum(received) == plans[4].bytes_kept(1)


@pytest.mark.parametrize(
    ("model", "layout", "tensor"),
    [
        ("untied", Layout(2, 2, 8), 4),
        ("untied", Layout(1, 4, 16), 4),
        ("mixture", Layout(2, 2, 8, expert=4, expert_tensor=1), 4),
        ("mixture", Layout(1, 2, 16, expert=4, expert_tensor=1), 8),
    ],
    ids=str,
)
def test_replicas_send_equally_much(model: str, layout: Layout, tensor: int) -> None:
    a = MODELS[model]
    sources = trainer_shards(a, layout, range(layout.size))
    plans = plans_of(sources, rollout_shards(a, tensor, range(layout.size)), hosts=8)
    by_stage: dict[int, list[int]] = defaultdict(list)
    for rank, plan in plans.items():
        by_stage[layout.coordinates(rank).pipeline].append(plan.bytes_sent(1))
    for sent in by_stage.values():
        assert max(sent) <= 1.1 * sum(sent) / len(sent)


def test_equal_layouts_move_nothing() -> None:
    for a, layout in ((MODELS["untied"], Layout(2, data=2)), (MODELS["mixture"], Layout(2, data=2))):
        plans = plans_of(trainer_shards(a, layout, range(4)), rollout_shards(a, 2, range(4)))
        assert not any(plan.sends or plan.receives for plan in plans.values())


def test_a_source_on_the_same_node_is_preferred() -> None:
    a = architecture()
    blocks = trainer_shards(a, Layout(), [0]).blocks(0)
    sources = ShardSpec.of(dict.fromkeys((0, 1, 2, 6), blocks))
    wanted = ShardSpec(dict.fromkeys((4, 5, 9), "whole"), lambda _: whole_blocks(a))
    plans = plans_of(sources, wanted, hosts=4)
    assert {copy.source for rank in (4, 5) for copy in plans[rank].receives} == {6}
    # Rank 6 serves two already, so the one without a near source takes a third from each of the others.
    shares = [sum(c.elements for c in plans[9].receives if c.source == rank) for rank in (0, 1, 2, 6)]
    # Cuts are between rows, of 24 numbers at most: half a row at either end of a share.
    assert shares[3] == 0 and max(shares) - min(shares[:3]) <= 48


@given(
    st.sets(st.integers(0, 63), min_size=1, max_size=20),
    st.sets(st.integers(0, 63), min_size=1, max_size=40),
    st.sampled_from([1, 4, 8]),
)
def test_demand_is_met_from_near_and_else_evenly(holders: set[int], demanders: set[int], per_node: int) -> None:
    shares = share_demand(sorted(holders), sorted(demanders), lambda rank: rank // per_node)
    served = {leg.receiver for legs in shares.far.values() for leg, _ in legs}
    assert {*shares.near, *served} == demanders - holders
    load, near_load = dict.fromkeys(holders, 0.0), dict.fromkeys(holders, 0.0)
    takers: set[int] = set()
    for legs in (*shares.near.values(), *shares.far.values()):
        assert legs[-1][1] == 1.0
        near = {rank for rank in holders if rank // per_node == legs[0][0].receiver // per_node}
        received: dict[int, float] = defaultdict(float)
        before = 0.0
        for (source, receiver), until in legs:
            assert before < until and source in (near or holders)
            load[source] += until - before
            near_load[source] += (until - before) if near else 0.0
            takers |= set() if near else {source}
            received[receiver] += until - before
            before = until
        assert max(received.values()) - min(received.values()) < 1e-4
    for taker in takers:  # nobody who serves the far ones could have left it to one who sends less
        assert load[taker] <= min(load.values()) + 1e-4
    for rank in holders:
        mates = [near_load[other] for other in holders if other // per_node == rank // per_node]
        assert max(mates) - min(mates) < 1e-4


def test_a_missing_source_is_named() -> None:
    a = architecture()
    half = ShardSpec.of({0: trainer_shards(a, Layout(2), range(2)).blocks(0)})
    with pytest.raises(PlanError, match=r"model\.embed_tokens\.weight.*rank 0.*of 3200 elements"):
        plan_regather(half, ShardSpec.of({0: whole_blocks(a)}), 0)


def test_rounds_bound_what_moves_at_once_and_lose_nothing() -> None:
    a = architecture(tied=False)
    plan = plan_regather(trainer_shards(a, Layout(4), range(4)), rollout_shards(a, 1, range(4)), 0)
    of_pair = [copy for copy in plan.receives if copy.source == 1]
    turns = rounds(of_pair, 100)
    for turn in turns:
        assert sum(copy.elements for copy in turn) <= 100 or len(turn) == 1
    assert sum(copy.elements for turn in turns for copy in turn) == sum(copy.elements for copy in of_pair)
    moved = torch.zeros(tensor_shapes(a)["model.embed_tokens.weight"])
    for copy in of_pair:
        if copy.tensor == "model.embed_tokens.weight":
            for piece in split_copy(copy, 100):
                window(moved, piece.destination_offset, piece.region).add_(1)
    assert moved.sum() == (moved == 1).sum() == sum(c.elements for c in of_pair if c.tensor.startswith("model.embed"))


def test_reads_ask_all_sources_at_a_time() -> None:
    """A replica's rank reads a stage's layers from the ranks of that stage, and not first all of one stage."""
    a = MODELS["untied"]
    sources, wanted = trainer_shards(a, Layout(2, 2), range(4)), rollout_shards(a, 1, range(4))
    receives = plan_regather(sources, wanted, 0).receives
    spread = spread_over_sources(receives)
    assert sorted(spread) == sorted(receives)
    totals: dict[int, int] = defaultdict(int)
    for copy in receives:
        totals[copy.source] += copy.elements
    largest = max(copy.elements for copy in receives)
    done = dict.fromkeys(totals, 0)
    for copy in spread:
        done[copy.source] += copy.elements
        shares = [done[source] / totals[source] for source in totals]
        assert max(shares) - min(shares) <= 2 * largest / min(totals.values())


def test_a_dry_run_tells_bytes_and_seconds() -> None:
    recipe = load_recipe(Path("recipes/qwen70b_dapo.yaml"), ["cluster.link_gb_per_sec=50"])
    text = plan_text(recipe, 96)
    # Of 1/8 of the model, 1/6 is held: TP8 in both layouts, and 6 stages in one.
    assert "14.19 of 16.93 GB of rollout weights per GPU come from 17 other GPUs, and 14.31 GB go to others" in text
    assert "1354.26 GB go from host to host, 14.30 per GPU at most; 0.31 s at 50 GB/s" in text
    few = load_recipe(Path("recipes/qwen70b_dapo.yaml"), ["rollout.layout.tensor=4"])
    # Ten of twelve hosts lack what a stage of two nodes has: 5/6 of the model of 135.4 GB, once instead of twice.
    (line,) = [line for line in plan_text(few, 96).splitlines() if "from host to host" in line]
    assert line == "  1354.26 GB go from host to host, of 2708.66 without forwarding, 14.30 per GPU at most"


def test_a_plan_has_the_gigabytes_between_hosts() -> None:
    recipe = load_rl("recipes/qwen7b_grpo.yaml", ["cluster.gpus_per_node=2"])  # tensor 4 x data 2, and replicas of 1
    held = 14.19 / 2  # GB of the model on each host of two GPUs
    assert float(sent_between_hosts(recipe, 8)) == pytest.approx(4 * held, abs=0.5)
    assert sent_between_hosts(load_rl("recipes/qwen7b_grpo.yaml", []), 8) == "0"
    assert sent_between_hosts(load_rl("recipes/deepseek_v3_grpo.yaml", ["run_root=nowhere"]), 96) == "?"


QWEN3_235B = {
    "model_type": "qwen3_moe", "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536,
    "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 94, "num_attention_heads": 64,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "norm_topk_prob": True,
}  # fmt: skip


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_a_thousand_ranks_of_a_large_mixture(expert_parallel: bool) -> None:
    a = parse_architecture(QWEN3_235B, "Qwen3-235B-A22B")
    layout = Layout(4, 8, 32, expert=8, expert_tensor=1, first_stage_layers=11, last_stage_layers=11)
    sources, wanted = trainer_shards(a, layout, range(1024)), rollout_shards(a, 8, range(1024), expert_parallel)
    plan = plan_regather(sources, wanted, 700)
    check_against_closed_form(plan, sources, wanted)


def test_a_thousand_ranks_of_a_large_dense_model() -> None:
    config = json.loads(Path("recipes/models/qwen2.5-72b/config.json").read_text())
    a = parse_architecture(config, "Qwen2.5-72B")
    layout = Layout(8, 4, 32)
    for tensor in (4, 8):
        sources, wanted = trainer_shards(a, layout, range(1024)), rollout_shards(a, tensor, range(1024))
        plans = [plan_regather(sources, wanted, rank) for rank in range(3, 256, 64)]  # of one shard
        for plan in plans:
            check_against_closed_form(plan, sources, wanted)
        sent = [plan.bytes_sent(2) for plan in plans]
        assert max(sent) <= 1.1 * sum(sent) / len(sent)


def check_against_closed_form(plan: RankPlan, sources: ShardSpec, wanted: ShardSpec) -> None:
    """Check that a rank receives what it wants less what it holds; sums of rectangles, since the elements are too
    many."""
    own: dict[str, list[Block]] = defaultdict(list)
    for block in sources.blocks(plan.rank):
        own[block.tensor].append(block)
    wants = has = 0
    for block in wanted.blocks(plan.rank):
        wants += elements(block.region)
        has += sum(elements(r) for held in own[block.tensor] if (r := intersect(held.region, block.region)))
    assert sum(copy.elements for copy in plan.local) == has
    assert plan.bytes_received(1) == wants - has > 0
    per_node = 8
    for copy in plan.receives:
        assert copy.source != plan.rank == copy.destination
    assert len({copy.source // per_node for copy in plan.receives}) > 1
