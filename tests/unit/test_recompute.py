"""Modules that selective recomputation is of: what is refused, their memory by hand, and their time."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_megatron.models.architecture import LayerKind, read_architecture
from rlhf_megatron.models.recompute import recomputed_fraction
from rlhf_megatron.planning.activation_memory import recomputed_activations
from rlhf_megatron.planning.layout_search import find_layouts
from rlhf_megatron.planning.memory import estimate
from rlhf_megatron.planning.model_folders import planned_architectures
from rlhf_megatron.planning.report import plan_errors
from rlhf_megatron.planning.step_time import expected_time
from rlhf_megatron.recipe import ActorSection, OptimizerSection, RecipeError, load_recipe, load_rl
from rlhf_megatron.recipe.memory_savings import RecomputedModule, RecomputeSection
from rlhf_megatron.topology.layout import Layout

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
DENSE, EXPERTS = LayerKind("full", "dense"), LayerKind("full", "experts")


def selective(*modules: str) -> str:
    return f"actor.recompute={{granularity: selective, modules: [{', '.join(modules)}]}}"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor.recompute.modules=[mlp]", "needs granularity selective; it is none"),
        ("actor.recompute={granularity: full, modules: [mlp]}", "needs granularity selective; it is full"),
        (selective(), "modules names none; name some, or leave it out for core_attn"),
        (selective("moe", "shared_experts"), "moe is the whole layer of experts, shared ones too; leave out shared_"),
        (selective("layernorm"), "layernorm: Megatron restores its output by C++ that each machine compiles as a run"),
        (selective("attention"), "Input should be 'core_attn', 'mlp', 'moe'"),
    ],
)
def test_modules_that_cannot_be_meant_are_refused(override: str, message: str) -> None:
    with pytest.raises(RecipeError) as refused:
        load_recipe(RECIPES / "qwen7b_grpo.yaml", [override])
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("qwen7b_grpo", [selective("moe")], "modules: moe: the model is dense; name mlp"),
        ("qwen3_30b_a3b_grpo", [selective("mlp")], "mlp: every layer has experts; name moe"),
        ("qwen3_30b_a3b_grpo", [selective("shared_experts")], "shared_experts: the model has no shared expert"),
        (
            "qwen3_30b_a3b_grpo",
            [selective("moe"), "actor.layout.pipeline=2", "algorithm.router_replay=rollout"],
            "with a pipeline, moe would replay the experts of a later micro-batch",
        ),
    ],
)
def test_modules_that_no_layer_has_are_refused(name: str, overrides: list[str], message: str) -> None:
    errors = plan_errors(load_recipe(RECIPES / f"{name}.yaml", overrides), 16)
    assert any(message in str(error) for error in errors), errors


@pytest.mark.parametrize(
    ("model", "modules", "kind", "tensor", "numbers"),
    [
        ("qwen2.5-7b", ["mlp"], DENSE, 4, 3 * 18944 / 4),
        ("glm-4.5-air", ["moe"], EXPERTS, 1, 3 * 1408 + 8 * (3 * 1408 + 2 * 4096)),
        ("glm-4.5-air", ["mlp"], EXPERTS, 1, 0),
        ("glm-4.5-air", ["shared_experts", "core_attn"], EXPERTS, 1, 3 * 1408),
        ("deepseek-v3", ["moe"], EXPERTS, 8, (3 * 2048 + 8 * (3 * 2048 + 2 * 7168)) / 8),
    ],
)
def test_what_a_layer_no_longer_keeps_by_hand(
    model: str, modules: list[RecomputedModule], kind: LayerKind, tensor: int, numbers: float
) -> None:
    section = ActorSection(
        tokens_per_gpu=8192,
        optimizer=OptimizerSection(learning_rate=1e-6),
        recompute=RecomputeSection(granularity="selective", modules=modules),
    )
    layout = Layout(tensor, expert=tensor, expert_tensor=1)
    found = recomputed_activations(section, read_architecture(RECIPES / "models" / model), kind, layout, 2, 8192)
    assert found == pytest.approx(2 * numbers)


def test_of_all_layers_one_is_whole_at_a_time() -> None:
    kept, again = (load_recipe(RECIPES / "qwen7b_grpo.yaml", overrides) for overrides in ([], [selective("mlp")]))
    architectures = planned_architectures(kept)
    before, after = (estimate(each, architectures, 8).roles["actor"][0].activations for each in (kept, again))
    assert before - after == pytest.approx(27 * 16384 * 2 * 3 * 18944 / 4 / 2**30)


def test_recomputing_takes_the_time_of_its_products() -> None:
    model = read_architecture(RECIPES / "models" / "qwen2.5-7b")
    attention = 3584 * (2 * 28 + 2 * 4) * 128
    assert recomputed_fraction(model, ["mlp", "core_attn"]) == 3 * 18944 / (3 * 18944 + attention / 3584)
    plain, mlp, full = (
        load_rl(RECIPES / "qwen7b_grpo.yaml", ["cluster.gpu=H100", *override])
        for override in ([], [selective("mlp")], ["actor.recompute.granularity=full"])
    )
    times = [expected_time(each, planned_architectures(each), 8) for each in (plain, mlp, full)]
    seconds = [time.phases["update"] for time in times if time]
    assert seconds == sorted(set(seconds)) and len(seconds) == 3


def test_a_search_also_tries_the_recipes_modules() -> None:
    recipe = load_rl(RECIPES / "qwen7b_grpo.yaml", ["cluster.gpu=H100", "cluster.gpu_memory_gb=70", selective("mlp")])
    assert find_layouts(recipe, 2)
