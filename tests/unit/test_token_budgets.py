"""Micro-batches that a recipe leaves open: the largest that the plan has room for, and kept by a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_megatron.planning.layout_search import find_layouts
from rlhf_megatron.planning.memory import TIGHT
from rlhf_megatron.planning.model_folders import planned_architectures
from rlhf_megatron.planning.report import plan_text
from rlhf_megatron.planning.stage_memory import keeps_logits
from rlhf_megatron.planning.step_time import bubble_share
from rlhf_megatron.planning.token_budgets import found_budgets, kept_budgets, planned_budgets, planned_gb
from rlhf_megatron.recipe import Recipe, RecipeError, load_recipe, load_rl
from rlhf_megatron.recipe.budgets import with_budgets
from rlhf_megatron.runtime.adaptation import adapt
from rlhf_megatron.runtime.recovery import Origin, RecoveryLog

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
ACTOR, REFERENCE = "actor.tokens_per_gpu", "reference.tokens_per_gpu"
WORLD = 8


def recipe_of(name: str = "qwen7b_grpo", *overrides: str) -> Recipe:
    return load_recipe(RECIPES / f"{name}.yaml", [f"{ACTOR}=auto", *overrides])


def found(recipe: Recipe, world: int = WORLD, **memory: float) -> dict[str, int]:
    return found_budgets(recipe, planned_architectures(recipe), world, **memory)


@pytest.mark.parametrize("name", ["qwen7b_grpo", "qwen7b_sft", "qwen7b_lora"])
@pytest.mark.parametrize("memory", [50.0, 70.0])
def test_what_is_found_fits_and_a_little_more_does_not(name: str, memory: float) -> None:
    recipe = recipe_of(name, "actor.kept_logits_gb=0")
    tokens, architectures = found(recipe, memory_gb=memory), planned_architectures(recipe)
    assert recipe.longest_sequence < tokens[ACTOR] < 2**16
    more = {ACTOR: tokens[ACTOR] + 256}
    needed, needed_for_more = (planned_gb(with_budgets(recipe, each), architectures, WORLD) for each in (tokens, more))
    assert needed <= TIGHT * memory < needed_for_more


def test_roles_are_found_one_by_one_within_what_others_leave() -> None:
    recipe = recipe_of("qwen7b_grpo", "actor.kept_logits_gb=0", f"{REFERENCE}=auto", "reference.offload={}")
    tokens = found(recipe, memory_gb=60)
    assert set(tokens) == {ACTOR, REFERENCE} and tokens[REFERENCE] > tokens[ACTOR]
    assert planned_gb(with_budgets(recipe, tokens), planned_architectures(recipe), WORLD) <= TIGHT * 60


def test_the_longest_sequence_is_the_least_and_reserves_stay_free() -> None:
    recipe = recipe_of()
    assert found(recipe, memory_gb=1) == {ACTOR: recipe.longest_sequence}
    reserved = recipe_of("qwen7b_grpo", "cluster.memory_reserve_gb=20")
    assert found(reserved) == found(recipe, memory_gb=60)
    assert found(reserved)[ACTOR] < found(recipe)[ACTOR]


def test_it_is_no_more_than_makes_steps_faster() -> None:
    recipe = recipe_of("qwen7b_grpo", "actor.kept_logits_gb=1.0")
    architectures = planned_architectures(recipe)
    kept = planned_budgets(recipe, architectures, WORLD)
    assert keeps_logits(kept, kept.actor, architectures["actor"])
    assert found(recipe_of("qwen7b_grpo", "actor.kept_logits_gb=0"), memory_gb=10_000) == {ACTOR: 2**16}
    small = recipe_of("qwen7b_grpo", "batch={prompts_per_step: 8, responses_per_prompt: 4}")
    rows = 8 * 4 // 2  # of each of two data-parallel ranks
    assert found(small, memory_gb=10_000)[ACTOR] == rows * small.longest_sequence
    staged = load_rl(
        RECIPES / "qwen7b_grpo.yaml", [f"{ACTOR}=auto", "actor.layout={pipeline: 4}", "actor.sequence_parallel=false"]
    )
    assert bubble_share(planned_budgets(staged, planned_architectures(staged), WORLD), WORLD) < 0.3


def test_a_plan_shows_the_number_and_the_recipe_stays_as_it_is() -> None:
    recipe = recipe_of("qwen7b_grpo", "cluster.gpu=H100")
    text = plan_text(recipe, WORLD)
    assert "tokens_per_gpu: auto" in text
    assert f"in micro-batches of up to {found(recipe)[ACTOR]:,} tokens" in text and "NOT fit" not in text


def test_each_layout_of_a_search_has_micro_batches_of_its_own() -> None:
    own = [f"{ACTOR}=auto", "actor.kept_logits_gb=0", "cluster.gpu=H100"]
    best, *_ = find_layouts(load_rl(RECIPES / "qwen7b_grpo.yaml", own), 2)
    changed = load_recipe(RECIPES / "qwen7b_grpo.yaml", [*own, *best.overrides])
    assert best.recipe.actor.tokens_per_gpu == found(changed, 2)[ACTOR] and best.overrides


def begin(log: RecoveryLog, recipe: Recipe, memory: float) -> dict[str, int]:
    """Make an attempt of a run on ``memory`` GB, as loops.run begins it; return its budgets."""
    architectures = planned_architectures(recipe)
    tokens = kept_budgets(recipe, architectures, WORLD, log.lines()) or found(recipe, memory_gb=memory)
    adaptation, reduced = adapt(with_budgets(recipe, tokens), log.of_this_launch())
    tokens |= {key: int(value) for key, value in adaptation.budgets.items()}
    planned = planned_gb(with_budgets(recipe, tokens), architectures, WORLD)
    assert log.begin(3, reduced, {"found": tokens, "planned_gb": planned}) is None
    return tokens


def test_a_run_keeps_what_it_has_found_until_its_plan_changes(tmp_path: Path) -> None:
    recipe = recipe_of("qwen7b_grpo", "actor.kept_logits_gb=0")
    first = begin(RecoveryLog(tmp_path, Origin("node 1 5")), recipe, 60)
    log = RecoveryLog(tmp_path, Origin("node 2 9"))  # started by a person again
    assert begin(log, recipe, 45) == first == found(recipe, memory_gb=60)
    log.append("fault", None, "OutOfMemoryError", kind="out_of_memory", phase="update")
    less = begin(log, recipe, 60)
    assert less == {ACTOR: int(first[ACTOR] * 0.75)}
    assert begin(RecoveryLog(tmp_path, Origin("node 3 2")), recipe, 60) == less, "it would run out of memory again"
    longer = recipe_of("qwen7b_grpo", "actor.kept_logits_gb=0", "steps=200", "actor.optimizer.learning_rate=1e-5")
    assert begin(RecoveryLog(tmp_path, Origin("node 4 2")), longer, 60) == less
    streamed = recipe_of("qwen7b_grpo", "actor.kept_logits_gb=0", "actor.offload.streamed_optimizer=1.0")
    assert begin(RecoveryLog(tmp_path, Origin("node 5 2")), streamed, 60)[ACTOR] > first[ACTOR]


@pytest.mark.parametrize("value", ["0", "1.5", "most", "null"])
def test_what_is_no_number_is_refused_in_one_line(value: str) -> None:
    with pytest.raises(RecipeError, match=r"actor\.tokens_per_gpu: must be a number of tokens above 0, or auto") as it:
        load_recipe(RECIPES / "qwen7b_grpo.yaml", [f"{ACTOR}={value}"])
    assert str(it.value).count("tokens_per_gpu") == 1
