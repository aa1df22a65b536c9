"""Levers that a plan lists: recipes that load, as fast as it says, or a reason why they cannot be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from end_to_end.commands import ROOT, python
from rlhf_megatron.planning.layout_search import find_layouts
from rlhf_megatron.planning.levers import ALL, Lever, find_levers
from rlhf_megatron.planning.model_folders import planned_architectures
from rlhf_megatron.planning.step_time import expected_time
from rlhf_megatron.recipe import load_rl

RECIPE, WITHOUT = ROOT / "recipes" / "qwen7b_one_gpu.yaml", "actor.shared_prompts=false"


def levers_of(*overrides: str) -> dict[str, Lever]:
    return {lever.name: lever for lever in find_levers(load_rl(RECIPE, [WITHOUT, *overrides]), 1)}


def test_each_is_a_recipe_that_takes_as_long_as_it_says() -> None:
    gpu = "cluster.gpu=H200"
    plain = find_layouts(load_rl(RECIPE, [gpu, WITHOUT]), 1)[0].time.seconds
    levers = levers_of(gpu)
    assert list(levers)[-1] == ALL and len(levers) == 5
    for lever in levers.values():
        assert lever.candidate is not None
        recipe = load_rl(RECIPE, [gpu, WITHOUT, *lever.overrides, *lever.candidate.overrides])
        assert recipe == lever.candidate.recipe
        time = expected_time(recipe, planned_architectures(recipe), 1)
        assert time == lever.candidate.time and time.seconds < plain
    *alone, together = (lever.candidate.time.seconds for lever in levers.values() if lever.candidate)
    assert together < min(alone)


def test_what_the_recipe_has_is_not_offered_again() -> None:
    gpu = "cluster.gpu=H200"
    has = levers_of(gpu, *levers_of(gpu)[ALL].overrides)
    assert not has


@pytest.mark.parametrize(
    ("gpu", "refused"),
    [("B200", {"training in 8 bits"}), ("A100", {"training in 8 bits", "rollout in 8 bits"})],
)
def test_other_gpus_are_offered_what_they_can_do(gpu: str, refused: set[str]) -> None:
    levers = levers_of(f"cluster.gpu={gpu}")
    assert {name for name, lever in levers.items() if not lever.candidate} == refused
    assert all(re.match(rf"\S+=\S+: cluster.gpu={gpu} is none of ", levers[name].refusal) for name in refused)
    assert "rollout.quantization=fp8" in levers["rollout in 8 bits"].overrides
    assert not {"rollout.quantization=fp8_blockwise", "actor.fp8=blockwise"} & {*levers[ALL].overrides}


def test_the_command_lists_them_beside_the_layout_without(tmp_path: Path) -> None:
    done = python(
        "launch/plan.py", str(RECIPE), "--world=1", "--levers", WITHOUT, "cluster.gpu=H100", folder=tmp_path
    ).check()
    lines = done.out.splitlines()
    rows = [line.split("  ")[0].strip() for line in lines[lines.index("") + 2 :]]
    assert rows[:6] == ["none", *levers_of("cluster.gpu=H100")]
    assert lines[-1].startswith(f"{ALL}: actor.shared_prompts=true ")
