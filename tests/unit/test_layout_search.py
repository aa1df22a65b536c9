"""The layouts that a plan proposes: they fit, what it says to change makes them, and others are not worth a line."""

from __future__ import annotations

import functools
import re
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from end_to_end.commands import ROOT, python
from rlhf_megatron.planning.layout_search import Candidate, find_layouts, nearest_layout
from rlhf_megatron.planning.memory import estimate
from rlhf_megatron.planning.model_folders import planned_architectures
from rlhf_megatron.planning.step_time import expected_time
from rlhf_megatron.recipe import RecipeError, load_rl

GPUS = ("cluster.gpu=H100", "cluster.gpu_memory_gb=80")


@functools.cache
def layouts(name: str, world: int, *own: str) -> list[Candidate]:
    """Return what is found for a recipe of the repository on H100s, with overrides of its own; several tests look."""
    return find_layouts(load_rl(ROOT / "recipes" / f"{name}.yaml", [*GPUS, *own]), world)


@pytest.mark.parametrize(
    "name, world",
    [
        ("qwen7b_grpo", 8),
        ("qwen32b_dapo", 64),
        ("qwen70b_dapo", 96),
        pytest.param("qwen3_30b_a3b_grpo", 16, marks=pytest.mark.grid),
    ],
)
def test_what_is_proposed_fits_and_is_what_its_overrides_make(name: str, world: int) -> None:
    path = ROOT / "recipes" / f"{name}.yaml"
    found = layouts(name, world)
    assert found
    for each in found:
        again = load_rl(path, [*GPUS, *each.overrides])
        architectures = planned_architectures(again)
        assert again == each.recipe
        assert expected_time(again, architectures, world) == each.time
        assert max(estimate(again, architectures, world).phases.values()) == each.memory <= 0.95 * 80
    assert all(later.memory < earlier.memory for earlier, later in pairwise(found))


def found_with(*own: str) -> list[Candidate]:
    """Return layouts of a 7B model on 8 GPUs whose recipe has ``own``, which their overrides make of it."""
    path = ROOT / "recipes" / "qwen7b_grpo.yaml"
    found = layouts("qwen7b_grpo", 8, *own)
    for each in found:
        assert load_rl(path, [*GPUS, *own, *each.overrides]) == each.recipe
    return found


def test_a_number_of_recomputed_layers_does_not_hide_layouts_that_recompute_none() -> None:
    plain, some = found_with(), found_with("actor.recompute={granularity: full, layers: 4}")
    assert [(each.time, each.memory) for each in some] == [(each.time, each.memory) for each in plain]


def test_degrees_of_the_recipe_are_tried_that_are_no_power_of_two_or_of_several_nodes() -> None:
    recipe, narrow = ROOT / "recipes" / "qwen7b_grpo.yaml", ["cluster.gpus_per_node=1", "cluster.gpu_memory_gb=40"]
    own = ["actor.layout={pipeline: 7}", "actor.sequence_parallel=false", "reference.sequence_parallel=false"]
    replica = ["rollout.layout.tensor=2", "rollout.gpu_memory_utilization=0.3"]
    found = find_layouts(load_rl(recipe, [*GPUS, *narrow, *own, *replica]), 14)
    assert {(each.recipe.actor.layout.pipeline, each.recipe.rollout.layout.tensor) for each in found} == {(7, 2)}


def test_without_room_for_a_cache_the_smallest_weights_are_told() -> None:
    few = [*GPUS, "rollout.gpu_memory_utilization=0.02"]
    told = nearest_layout(load_rl(ROOT / "recipes" / "qwen7b_grpo.yaml", few), 8)
    of_a_quarter = "of the nearest 3.5 of 1.6 GB are weights with rollout.gpu_memory_utilization=0.02"
    assert of_a_quarter in told and told.endswith("rollout.layout.tensor=4")  # as many key-value heads


def test_virtual_stages_are_kept_where_they_fit_and_hide_no_other_layout() -> None:
    layouts = [each.recipe.actor.layout for each in found_with("actor.layout={pipeline: 2, virtual_pipeline: 7}")]
    assert {(layout.pipeline, layout.virtual_pipeline) for layout in layouts} >= {(1, None), (2, 7)}


def test_the_first_is_no_slower_than_the_recipe_itself() -> None:
    recipe = load_rl(ROOT / "recipes" / "qwen7b_grpo.yaml", GPUS)
    own = expected_time(recipe, planned_architectures(recipe), 8)
    assert own is not None and layouts("qwen7b_grpo", 8)[0].time.seconds <= own.seconds


def test_the_stage_with_the_vocabulary_gets_fewer_layers(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    values = {
        "defaults": [str(ROOT / "tools/bench/step_recipe.yaml")],
        "model": {"config": str(ROOT / "recipes/models/qwen2.5-14b")},
        "batch": {"prompts_per_step": 64},
        "actor": {"tokens_per_gpu": 4352, "offload": {"gradients": True}},
        "rollout": {"kv_cache_gb": 30},
    }
    path.write_text(yaml.safe_dump(values))
    recipe = load_rl(path, ["cluster.gpu=H200", "cluster.gpu_memory_gb=140"])
    layout = min(find_layouts(recipe, 2), key=lambda each: each.time.seconds).recipe.actor.layout
    assert (layout.pipeline, layout.first_stage_layers, layout.last_stage_layers) == (2, 25, 23)


def test_smaller_gpus_and_fewer_of_them_leave_less_to_choose_from() -> None:
    recipe = load_rl(ROOT / "recipes" / "qwen7b_grpo.yaml", [*GPUS, "rollout.kv_cache_gb=10"])
    one = find_layouts(recipe, 1)
    assert all(each.recipe.actor.offload.streamed_optimizer == 1.0 for each in one)
    small = load_rl(ROOT / "recipes" / "qwen7b_grpo.yaml", ["cluster.gpu=A100", "cluster.gpu_memory_gb=20"])
    assert find_layouts(small, 2) == []


def test_what_is_kept_free_is_not_planned_with() -> None:
    reserve = 20
    of_both = (layouts("qwen7b_grpo", 8), layouts("qwen7b_grpo", 8, f"cluster.memory_reserve_gb={reserve}"))
    whole, less = (max(each.memory for each in found) for found in of_both)
    assert less <= 0.95 * (80 - reserve) < whole


@pytest.mark.parametrize(
    "name, overrides, message",
    [
        ("qwen7b_grpo", [], "cluster.gpu: say what the GPUs are, such as cluster.gpu=H100"),
        (
            "qwen7b_grpo",
            [*GPUS, "model.dtype=float32"],
            "times are estimated for reinforcement learning only, and not in",
        ),
    ],
)
def test_what_cannot_be_estimated_is_refused(name: str, overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        find_layouts(load_rl(ROOT / "recipes" / f"{name}.yaml", overrides), 16)


def test_the_list_in_the_docs_is_what_the_command_prints(tmp_path: Path) -> None:
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")  # the command leaves its output in its folder
    shown = re.search(r"\$ python (launch/plan.py .*)\n((?:.*\n)*?)```", (ROOT / "docs" / "gpus.md").read_text())
    assert shown is not None
    done = python(*shown[1].split(), folder=tmp_path).check()
    assert [line.rstrip() for line in done.out.splitlines()] == shown[2].splitlines()


def test_the_command_lists_layouts_and_says_what_to_change_for_the_first(tmp_path: Path) -> None:
    recipe = ROOT / "recipes" / "qwen7b_grpo.yaml"
    command = ("launch/plan.py", str(recipe), "--world=8", *GPUS)
    model = f"model.config={ROOT / 'recipes/models/qwen2.5-7b'}"
    done = python(*command, "--price=2.5", model, folder=tmp_path).check()
    header, *rows, terms, last = done.out.splitlines()
    assert header.split() == [
        "s/step",
        "tok/s/GPU",
        "GPU-h",
        "cost",
        "GB",
        "actor",
        "recompute",
        "stream",
        "masters",
        "rollout",
    ]
    best = find_layouts(load_rl(recipe, [*GPUS, model]), 8)
    assert len(rows) == len(best) and rows[0].split()[0] == f"{best[0].time.seconds:,.1f}"
    assert re.fullmatch(r"of a step: tail \S+, bubbles 0, gradients \S+, requests .* s; start \d+ s", terms)
    assert last == "the first: " + " ".join(best[0].overrides)
    none = python(*command, "cluster.gpu_memory_gb=10", model, folder=tmp_path)
    assert none.status == 1
    told = re.fullmatch(
        r"error: no layout fits 8 GPUs of 10 GB; the nearest needs (.+) GB in phase (\w+), "
        r"and 9\.5 GB are planned with: (.*)",
        none.err.splitlines()[-1],
    )
    assert told is not None
    changed = load_rl(recipe, [*GPUS, "cluster.gpu_memory_gb=10", model, *told[3].split()])
    phases = estimate(changed, planned_architectures(changed), 8).phases
    assert max(phases, key=phases.__getitem__) == told[2] and f"{phases[told[2]]:.1f}" == told[1]
