"""Bytes between hosts of a step by hand, and where they are none."""

from __future__ import annotations

import pytest

from rlhf_megatron.planning.edges import Edges
from rlhf_megatron.planning.model_folders import planned_architectures
from rlhf_megatron.planning.parameters import model_parameters
from rlhf_megatron.planning.report import carried_between_hosts, plan_text
from rlhf_megatron.recipe import RLRecipe, load_recipe


def demo(*keys: str, name: str = "qwen7b_grpo") -> RLRecipe:
    recipe = load_recipe(f"recipes/{name}.yaml", keys)
    assert isinstance(recipe, RLRecipe)
    return recipe


def test_a_ring_counts_where_it_leaves_a_host() -> None:
    edges = Edges()
    edges.all_reduce([0, 0, 1, 1], 100.0)
    assert edges.sent == {0: 150.0, 1: 150.0} and edges.total == 300.0 and edges.busiest == 150.0


def test_rows_of_all_go_to_all_but_those_that_stay() -> None:
    edges = Edges()
    edges.spread([0, 1, 1, 1], [0, 0], 100.0)
    assert edges.sent == {0: 0.0, 1: 75.0} and edges.received == {0: 75.0}


def test_a_broadcast_reaches_each_other_host_once() -> None:
    edges = Edges()
    edges.broadcast([2, 2, 5, 5, 6], 10.0)
    assert edges.sent == {2: 20.0} and edges.received == {5: 10.0, 6: 10.0}


def test_gradients_of_a_step_by_hand() -> None:
    keys = ("actor.layout={tensor: 8}", "cluster.gpus_per_node=8")
    recipe = demo(*keys)
    architectures = planned_architectures(recipe)
    carried, over_gloo = (carried_between_hosts(recipe, architectures, 16, each) for each in ("nccl", "gloo"))
    # Eight rings of two ranks, each with an eighth of the model: float32 gradients there, bfloat16 weights back.
    updates, parameters = recipe.batch.updates_per_step, model_parameters(architectures["actor"])
    assert carried.of(kinds=["gradients"]).total == pytest.approx(updates * parameters * (4 + 2), rel=0.01)
    assert over_gloo.of(kinds=["gradients"]).total == pytest.approx(updates * parameters * (8 + 2), rel=0.01)
    assert carried.of(kinds=["activations"]).total == 0, "a layer's ranks lie on one host"
    assert carried.of(["exchange"], tokens=2 * carried.tokens).total == pytest.approx(
        2 * carried.of(["exchange"]).total
    )


def test_activations_of_stages_on_two_hosts_by_hand() -> None:
    recipe = demo("actor.layout={tensor: 8, pipeline: 2}", "cluster.gpus_per_node=8")
    architectures = planned_architectures(recipe)
    carried = carried_between_hosts(recipe, architectures, 16, "nccl")
    passes = recipe.batch.passes
    cut = 8 if recipe.actor.sequence_parallel else 1
    update = carried.tokens * architectures["actor"].hidden * 2 * 8 / cut * 2 * passes
    assert carried.of(["update"], ["activations"]).total == pytest.approx(update)
    assert carried.of(kinds=["gradients"]).total == 0


def test_what_delta_nets_exchange_between_two_hosts_by_hand() -> None:
    layout = {"actor.layout": "{context: 2}", "actor.recompute": "{}", "rollout.layout": "{tensor: 1}"}
    keys = [f"{key}={value}" for key, value in layout.items()]
    recipe = demo(*keys, "cluster.gpus_per_node=1", name="qwen3_next_grpo")
    carried = carried_between_hosts(recipe, planned_architectures(recipe), 2, "nccl")
    # In 36 delta nets half of the queries, keys, values, two numbers of each head and outputs, then of their gradients.
    # In 12 layers a ring carries keys and values, then both these and their gradients.
    of_delta = 36 * (2 * 2048 + 4096 + 2 * 32 + 4096) / 2 * 2
    of_attention = 12 * (2 * 2 * 256) * 3
    update = recipe.batch.passes * carried.tokens * (of_delta + of_attention) * 2
    assert carried.of(["update"], ["activations"]).total == pytest.approx(update)


def test_a_plan_has_the_lines_for_several_hosts_alone() -> None:
    recipe = demo()
    assert "Between hosts" not in plan_text(recipe, 8)
    text = plan_text(recipe, 16)
    assert "Between hosts in one step" in text and "of the busiest host" in text
