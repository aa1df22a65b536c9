"""Planning without GPUs: numbers of parameters and memory against hand counts and the weight map, and the text."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import runpy
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlhf_megatron.data.epochs import in_steps
from rlhf_megatron.models.architecture import (
    Architecture,
    Head,
    ModelError,
    parse_architecture,
    read_architecture,
    read_config,
)
from rlhf_megatron.models.weight_map import Block, is_expert, megatron_blocks, rollout_blocks, tensor_shapes
from rlhf_megatron.planning.dry_run import dry_run
from rlhf_megatron.planning.memory import Estimate, estimate
from rlhf_megatron.planning.model_folders import planned_architectures, role_architectures
from rlhf_megatron.planning.parameters import (
    active_parameters,
    model_parameters,
    rank_parameters,
)
from rlhf_megatron.planning.report import plan_text
from rlhf_megatron.planning.rollout_parameters import replica_of, rollout_parameters
from rlhf_megatron.planning.stage_memory import GB
from rlhf_megatron.planning.start_time import communicators_of_a_rank, expected_start, parameters_of_a_node
from rlhf_megatron.recipe import Recipe, RecipeError, check_world, load_recipe, make_recipe, resolved_yaml
from rlhf_megatron.regather.plan import plan_regather
from rlhf_megatron.regather.shard_specs import parameter_shapes, rollout_shards, trainer_shards
from rlhf_megatron.regather.views import shareable
from rlhf_megatron.topology.communicators import made_groups
from rlhf_megatron.topology.layout import Layout
from rlhf_megatron.topology.process_groups import make_groups
from rlhf_megatron.topology.role_layout import make_layout

ROOT = Path(__file__).resolve().parents[2]
RECIPES = {
    "tiny_sft": 2,
    "tiny_grpo": 2,
    "tiny_tools": 2,
    "tiny_guess": 2,
    "tiny_agent": 2,
    "tiny_reasoning_gym": 2,
    "tiny_openenv": 2,
    "tiny_textarena": 2,
    "tiny_textarena_sft": 2,
    "tiny_verifiers": 2,
    "tiny_ppo": 2,
    "tiny_reward_model": 2,
    "tiny_judge": 2,
    "smollm_grpo": 1,
    "smollm_gsm8k_sft": 1,
    "smollm_gsm8k_grpo": 1,
    "qwen7b_grpo": 8,
    "qwen7b_lora": 1,
    "qwen7b_one_gpu": 1,
    "qwen7b_one_gpu_levers": 1,
    "qwen7b_one_step_off": 8,
    "qwen7b_sft": 8,
    "qwen32b_dapo": 32,
    "qwen70b_dapo": 96,
    "qwen3_30b_a3b_grpo": 16,
    "glm45_air_grpo": 64,
    "deepseek_v3_grpo": 96,
    "gpt_oss_20b_grpo": 8,
    "qwen3_next_grpo": 32,
}
PLANNED = [name for name in RECIPES if not name.startswith("tiny")]  # the tiny model is made by the demo
MODELS = ["qwen2.5-7b", "qwen2.5-32b", "qwen2.5-72b", "qwen3-30b-a3b", "glm-4.5-air", "deepseek-v3", "smollm2-135m"]


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def recipe_of(name: str, *overrides: str) -> Recipe:
    return load_recipe(ROOT / "recipes" / f"{name}.yaml", overrides)


def architecture_of(model: str) -> Architecture:
    return read_architecture(ROOT / "recipes" / "models" / model)


def memory_of(recipe: Recipe, model: str, world: int) -> Estimate:
    """Return the memory of a recipe whose roles are all made of ``model``, but those that have a folder of their
    own."""
    return estimate(recipe, role_architectures(recipe, architecture_of(model)), world)


def test_every_shipped_recipe_is_listed_here() -> None:
    assert {path.stem for path in (ROOT / "recipes").glob("*.yaml")} == set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_shipped_recipes_load_and_fill_their_world(name: str) -> None:
    recipe = recipe_of(name)
    assert recipe.name == name
    assert make_recipe(yaml.safe_load(resolved_yaml(recipe)), name) == recipe
    check_world(recipe, RECIPES[name])


@pytest.mark.parametrize("name", PLANNED)
def test_shipped_recipes_plan_and_fit(name: str) -> None:
    text = dry_run(recipe_of(name), RECIPES[name])
    assert "NOT fit" not in text and "barely" not in text and "NOT hold" not in text
    assert f"on {RECIPES[name]} GPUs" in text


@pytest.mark.parametrize(
    ("model", "parameters"),
    # As on the model cards: 7.61B (exactly this in the safetensors index), 32.8B, 72.7B, 30.5B and 135M.
    [
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-32b", 32_763_876_352),
        ("qwen2.5-72b", 72_706_203_648),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("smollm2-135m", 134_515_008),
    ],
)
def test_parameters_are_the_published_ones(model: str, parameters: int) -> None:
    assert model_parameters(architecture_of(model)) == parameters


def held(blocks: Sequence[Block]) -> int:
    """Return elements of the parameters that ``blocks`` fill."""
    ends: dict[str, tuple[int, ...]] = defaultdict(tuple)
    for block in blocks:
        end = tuple(begin + stop - start for begin, (start, stop) in zip(block.offset, block.region, strict=True))
        ends[block.parameter] = tuple(max(pair) for pair in zip(ends[block.parameter] or end, end, strict=True))
    return sum(math.prod(size) for size in ends.values())


@pytest.mark.parametrize("head", ["language", "scalar"])
@pytest.mark.parametrize(
    ("model", "tensor", "pipeline"),
    [
        ("qwen2.5-7b", 1, 1),
        ("qwen2.5-7b", 4, 2),
        ("qwen2.5-32b", 8, 4),
        ("qwen2.5-72b", 8, 5),
        ("smollm2-135m", 1, 1),
        ("smollm2-135m", 3, 2),
        ("qwen2.5-72b", 16, 5),
        ("qwen3-30b-a3b", 2, 4),
        ("qwen3-30b-a3b", 8, 1),
    ],
)
def test_rank_parameters_agree_with_the_weight_map(model: str, tensor: int, pipeline: int, head: Head) -> None:
    architecture = architecture_of(model).with_head(head)
    layout = Layout(tensor=tensor, pipeline=pipeline)
    for stage in range(pipeline):
        positions = (layout.position(rank, 0, stage) for rank in range(tensor))
        fullest = max(held(megatron_blocks(architecture, layout, position, "local")) for position in positions)
        assert rank_parameters(architecture, layout, stage).total == fullest


def test_expert_parameters_agree_with_the_weight_map() -> None:
    architecture = architecture_of("qwen3-30b-a3b")
    assert int(active_parameters(architecture) / 1e8) == 33  # the model card says 3.3B
    layout = Layout(tensor=2, data=4, expert=4, expert_tensor=2)
    blocks = megatron_blocks(architecture, layout, 5, "transformer_engine")
    counted = rank_parameters(architecture, layout, 0)
    assert counted.total == held(blocks)
    assert counted.experts == held([block for block in blocks if is_expert(block.parameter)])


@pytest.mark.parametrize(
    ("model", "tensor"),
    [("qwen2.5-7b", 1), ("qwen2.5-7b", 4), ("qwen2.5-72b", 16), ("qwen3-30b-a3b", 8)],
)
def test_rollout_parameters_agree_with_the_weight_map(model: str, tensor: int) -> None:
    """With 16 ranks and 8 key-value heads, vLLM repeats the heads."""
    architecture = architecture_of(model)
    for whole_experts in {False, architecture.experts is not None}:
        expected = max(held(rollout_blocks(architecture, tensor, rank, whole_experts)) for rank in range(tensor))
        replica = replica_of(architecture, tensor, whole_experts)
        assert rollout_parameters(architecture, tensor, whole_experts, replica).total == expected


@pytest.mark.parametrize("tied", [False, True])
def test_rows_that_pad_a_vocabulary_count(tied: bool) -> None:
    architecture = dataclasses.replace(architecture_of("smollm2-135m"), vocabulary=1000, tied_embeddings=tied)
    hidden, padded = architecture.hidden, 1152  # a multiple of 64 that 3 ranks can share
    matrices = 1 if tied else 2
    assert rank_parameters(architecture, Layout(3), 0).embeddings == matrices * padded // 3 * hidden + hidden
    assert (
        rollout_parameters(architecture, 3, False, replica_of(architecture, 3)).embeddings
        == matrices * padded // 3 * hidden + hidden
    )
    first, between, last = (rank_parameters(architecture, Layout(3, 3), stage).embeddings for stage in range(3))
    assert (first, between, last) == (padded // 3 * hidden, 0, padded // 3 * hidden + hidden)


@pytest.mark.parametrize(
    ("model", "layout", "tensor", "overrides"),
    [
        ("qwen2.5-7b", {}, 1, []),
        ("qwen2.5-7b", {"tensor": 4, "pipeline": 2}, 4, []),
        ("qwen2.5-72b", {"tensor": 16, "pipeline": 5}, 16, []),
        ("qwen3-30b-a3b", {}, 1, []),
        ("qwen3-30b-a3b", {"tensor": 2}, 2, []),  # each rank has a part of each expert, there and here
        ("qwen3-30b-a3b", {"tensor": 2, "expert": 2, "expert_tensor": 1}, 2, []),  # here whole ones
        ("qwen3-30b-a3b", {"tensor": 2, "expert": 2, "expert_tensor": 1}, 2, ["rollout.layout.expert_parallel=true"]),
        ("qwen3-30b-a3b", {"data": 4, "expert": 4}, 4, ["rollout.layout.expert_parallel=true"]),
        ("qwen3-30b-a3b", {"pipeline": 2, "tensor": 2}, 2, []),
        ("qwen3-30b-a3b", {"tensor": 2}, 2, ["actor.optimizer.overlap_grad_reduce=true"]),
    ],
)
def test_shared_weights_agree_with_the_plan(
    model: str, layout: dict[str, int], tensor: int, overrides: list[str]
) -> None:
    """On the pipeline stage that has least of them; with 16 ranks vLLM repeats heads."""
    architecture, own_layout = read_architecture(ROOT / "recipes" / "models" / model), Layout(**layout)
    world, whole_experts = own_layout.size, "rollout.layout.expert_parallel=true" in overrides
    sources, wanted = (
        trainer_shards(architecture, own_layout, range(world)),
        rollout_shards(architecture, tensor, range(world), whole_experts),
    )
    counts = []
    in_buckets = "actor.optimizer.overlap_grad_reduce=true" in overrides
    for rank in range(0, world, tensor):
        others = parameter_shapes(wanted.blocks(rank))
        views = shareable(
            plan_regather(sources, wanted, rank), laid_out(parameter_shapes(sources.blocks(rank)), in_buckets)
        )
        alike = {name: view.numel() for name, view in views.items() if view.numel() == math.prod(others[name])}
        assert all(name in alike for name in views if "norm" in name)
        counts.append(sum(alike.values()))
    overrides = [f"model.path=recipes/models/{model}", f"actor.layout={json.dumps(layout)}", *overrides]
    recipe = recipe_of("qwen7b_grpo", *overrides, f"rollout.layout.tensor={tensor}")
    rollout = memory_of(recipe, model, world).rollout
    assert rollout is not None
    assert rollout.shared == pytest.approx(2 * min(counts) / GB, abs=1e-6)


def laid_out(shapes: Mapping[str, Sequence[int]], in_buckets: bool) -> dict[str, torch.Tensor]:
    """Return parameters without memory; matrices of a layer's experts lie one behind the other, if not
    ``in_buckets``."""
    tensors: dict[str, torch.Tensor] = {}
    for _, names in itertools.groupby(sorted(shapes), lambda name: name.rstrip("0123456789") + name * in_buckets):
        ordered = sorted(names, key=lambda name: (len(name), name))
        sizes = [math.prod(shapes[name]) for name in ordered]
        parts = torch.empty(sum(sizes), device="meta").split(sizes)
        tensors |= {name: own.view(*shapes[name]) for name, own in zip(ordered, parts, strict=True)}
    return tensors


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["rollout.share_weights=never"], "rollout.share_weights is never"),
        (["actor.offload.parameters=true"], "actor.offload.parameters takes the actor's off the GPU"),
        (["rollout.dtype=float32"], "rollout.dtype is float32 and model.dtype bfloat16"),
    ],
)
def test_a_plan_says_why_weights_are_copies(overrides: list[str], why: str) -> None:
    shared = dry_run(recipe_of("qwen7b_grpo", "actor.layout.tensor=2", "rollout.layout.tensor=2"), 8)
    assert "weights 7.1 (of which 7.1 in the actor's memory)" in shared and "copies" not in shared
    text = dry_run(recipe_of("qwen7b_grpo", "actor.layout.tensor=2", "rollout.layout.tensor=2", *overrides), 8)
    assert f"rollout: all weights are copies, since {why}\n" in text and "in the actor's memory" not in text


def test_the_recipe_in_the_readme_and_its_plan_are_those_of_the_file() -> None:
    readme = (ROOT / "README.md").read_text()
    recipe = re.search(r"```yaml\n(name: qwen7b_grpo\n.*?)```", readme, re.DOTALL)
    assert recipe and yaml.safe_load(recipe[1]) == yaml.safe_load((ROOT / "recipes/qwen7b_grpo.yaml").read_text())
    shown = re.search(r"```text\n(Model\n.*?)```", readme, re.DOTALL)
    plan = plan_text(recipe_of("qwen7b_grpo", "cluster.gpu=H100"), 8)
    assert shown and all(part in plan for part in shown[1].split("  ...\n"))


@pytest.mark.parametrize(
    "name, overrides, line",
    [
        ("qwen7b_grpo", [], "set cluster.gpu, such as cluster.gpu=H100"),
        (
            "qwen7b_grpo",
            ["cluster.gpu=H200", "model.dtype=float32"],
            "there are no figures to estimate float32 by",
        ),
    ],
)
def test_a_plan_says_what_it_lacks_to_estimate_a_time(name: str, overrides: list[str], line: str) -> None:
    text = plan_text(recipe_of(name, *overrides), 16)
    assert f"Time of one step (estimate, without reward functions)\n  {line}\n" in text


def test_memory_by_hand() -> None:
    """7B on one GPU in bfloat16: 2 bytes of weights, 4 of gradients and 12 of optimizer per parameter."""
    recipe = recipe_of("qwen7b_grpo", "actor.layout.tensor=1", "rollout.gpu_memory_utilization=0.5")
    result = memory_of(recipe, "qwen2.5-7b", 1)
    [actor] = result.roles["actor"]
    billion = 7_615_616_512 / GB
    assert (actor.weights, actor.gradients, actor.optimizer) == pytest.approx((2 * billion, 4 * billion, 12 * billion))
    per_token = 28 * 2 * (4 * 3584 + 2 * 3584 + 2 * 512 + 3 * 18944)
    assert actor.activations == pytest.approx(16384 * per_token / GB)
    local = recipe_of("qwen7b_grpo", "actor.layout.tensor=1", "actor.transformer_implementation=local")
    [unfused] = memory_of(local, "qwen2.5-7b", 1).roles["actor"]
    assert unfused.activations == pytest.approx(16384 * (per_token + 28 * 2 * 2 * 18944) / GB)
    copies = recipe_of("qwen7b_grpo", "actor.layout.tensor=1", "rollout.share_weights=never")
    copied = memory_of(copies, "qwen2.5-7b", 1).rollout
    assert result.rollout is not None and copied is not None
    # Half of 80 GB, less 2 GB for vLLM's activations; the weights are the actor's.
    assert result.rollout.kv_cache == pytest.approx(40 - 2)
    assert copied.kv_cache == pytest.approx(40 - 2 * billion - 2)
    # Key and value of 28 layers x 4 heads x 128 numbers of 2 bytes for a token.
    assert result.rollout.cache_tokens == int(result.rollout.kv_cache * GB / (2 * 28 * 4 * 128 * 2))
    in_8_bits = ["rollout.kv_cache_dtype=fp8", "algorithm.rollout_correction={type: tis}"]
    smaller = memory_of(recipe_of("qwen7b_grpo", "actor.layout.tensor=1", *in_8_bits), "qwen2.5-7b", 1).rollout
    assert smaller is not None and smaller.cache_tokens == int(smaller.kv_cache * GB / (2 * 28 * 4 * 128))
    assert result.phases["generate"] > 80


@pytest.mark.parametrize(
    ("layout", "parts"), [("{}", 1), ("{tensor: 2}", 2), ("{tensor: 2, expert_parallel: true}", 1)]
)
def test_memory_of_a_rollout_in_8_bits_by_hand(layout: str, parts: int) -> None:
    """One byte for each weight of attention and experts of 30B-A3B, four for each row: experts are cut into parts."""
    corrected = ["algorithm.rollout_correction={type: tis}", f"rollout.layout={layout}", "rollout.kv_cache_gb=8"]
    plain, quantized = (
        memory_of(recipe_of("qwen3_30b_a3b_grpo", *corrected, *more), "qwen3-30b-a3b", 16).rollout
        for more in ([], ["rollout.quantization=fp8"])
    )
    assert plain is not None and quantized is not None
    ranks, hidden, inside = 1 if layout == "{}" else 2, 2048, 768
    experts = 128 * parts // ranks * (2 * inside // parts * (hidden + 4) + hidden * (inside // parts + 4))
    attention = (4096 + 2 * 512) // ranks * (hidden + 4) + hidden * (4096 // ranks + 4)
    assert quantized.weights - plain.weights == pytest.approx(48 * (experts + attention) / GB, rel=1e-3)
    assert quantized.reserved - plain.reserved == pytest.approx(quantized.weights - plain.weights)


@pytest.mark.parametrize(("name", "model"), [("train_step", "qwen2.5-7b"), ("train_step_small", "qwen2.5-0.5b")])
def test_memory_as_it_was_measured(name: str, model: str) -> None:
    """Of forward and backward on an H200, within a tenth. No step was taken: Adam had master weights alone."""
    measured = json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text())
    overrides = ("actor.layout.tensor=1", "actor.tokens_per_gpu=4096", "rollout.max_response_length=1024")
    [actor] = memory_of(recipe_of("qwen7b_grpo", *overrides), model, 1).roles["actor"]
    expected = actor.weights + actor.gradients + actor.optimizer / 3 + actor.activations + actor.logits
    assert measured["parameters"] == actor.parameters
    assert expected * GB / 1e9 == pytest.approx(measured["role"]["peak_memory_gb"], rel=0.1)


def test_the_longest_response_that_is_given_goes_through_an_update_whole() -> None:
    given = (
        "loop=sft",
        "algorithm={}",
        "reference=null",
        "rollout=null",
        "batch={prompts_per_step: 64}",
        "data.max_prompt_length=512",
    )
    [budget], [longer] = (
        memory_of(recipe_of("qwen7b_grpo", *given, *more), "qwen2.5-7b", 4).roles["actor"]
        for more in ([], ["data.max_response_length=32256"])
    )
    assert longer.activations / budget.activations == pytest.approx(32768 / 16384)


def test_the_optimizer_is_cut_over_data_parallel_ranks() -> None:
    model = "qwen2.5-7b"
    [one] = memory_of(recipe_of("qwen7b_grpo"), model, 4).roles["actor"]
    [many] = memory_of(recipe_of("qwen7b_grpo"), model, 32).roles["actor"]
    [uncut] = memory_of(recipe_of("qwen7b_grpo", "actor.optimizer.distributed=false"), model, 32).roles["actor"]
    assert many.optimizer == pytest.approx(one.optimizer / 8)
    assert uncut.optimizer == one.optimizer and many.weights == one.weights


def test_recomputing_needs_less_and_a_pipeline_holds_more_micro_batches() -> None:
    model = "qwen2.5-7b"
    none, some, full = (
        memory_of(recipe_of("qwen7b_grpo", f"actor.recompute={{granularity: {text}}}"), model, 8).roles["actor"][0]
        for text in ("none", "full, layers: 14", "full")
    )
    assert none.activations > some.activations > full.activations > 0
    few, all_of_chunks, all_of_stage = (
        memory_of(recipe_of("qwen7b_grpo", f"actor.recompute={text}", layout), model, 8).roles["actor"][0].activations
        for layout in ["actor.layout={tensor: 2, pipeline: 2, virtual_pipeline: 2}"]
        for text in ("{granularity: full, layers: 6}", "{granularity: full, layers: 7}", "{granularity: full}")
    )
    assert few > all_of_chunks == all_of_stage
    stages = memory_of(recipe_of("qwen7b_grpo", "actor.layout={tensor: 2, pipeline: 4}"), model, 8).roles["actor"]
    assert [stage.activations / stages[3].activations for stage in stages] == pytest.approx([4, 3, 2, 1])
    assert [stage.logits > 0 for stage in stages] == [False, False, False, True]


def test_uneven_stages_and_ranks_are_shown() -> None:
    recipe = recipe_of("qwen70b_dapo")
    assert make_layout(recipe.actor.layout, 96).stage_layers(80) == [12, 14, 14, 14, 14, 12]
    text = dry_run(recipe, 96)
    for line in (
        "actor: tensor 8 x pipeline 6 x data 2 on ranks 0-95, sequence parallel",
        "stage 0: layers 0-11 on ranks 0-15",
        "stage 5: layers 68-79 on ranks 80-95",
        "tensor groups: 0-7; 8-15; ...; 88-95 (12 groups)",
        "data groups: 0,8; 1,9; ...; 87,95 (48 groups)",
        "rollout: 12 replicas of tensor 8",
        "512 prompts x 16 responses = 8192 rows",
    ):
        assert line in text


def test_virtual_stages_are_shown_chunk_by_chunk() -> None:
    text = dry_run(recipe_of("qwen70b_dapo", "actor.layout.virtual_pipeline=2"), 96)
    stages = Layout(8, 6, 2, virtual_pipeline=2, first_stage_layers=12, last_stage_layers=12).stage_chunks(80)
    for stage, chunks in enumerate(stages):
        layers = ", ".join(f"{chunk[0]}-{chunk[-1]}" for chunk in chunks)
        assert f"stage {stage}: layers {layers} on ranks" in text


def test_groups_shown_are_those_of_the_layout() -> None:
    layout = Layout(tensor=2, context=2, data=2)
    text = dry_run(recipe_of("qwen7b_grpo", "actor.layout={tensor: 2, context: 2}"), 8)
    for axis, between in (("tensor", "-"), ("context", ","), ("data", ",")):
        groups = "; ".join(between.join(map(str, group)) for group in sorted(layout.groups_along(axis)))
        assert f"{axis} groups: {groups}\n" in text


def test_what_does_not_fit_is_said_with_advice() -> None:
    text = dry_run(recipe_of("qwen7b_grpo", "actor.tokens_per_gpu=65536"), 8)
    assert "phase update" in text and "does NOT fit: lower actor.tokens_per_gpu, or set actor.recompute" in text
    text = dry_run(recipe_of("qwen7b_grpo", "rollout.gpu_memory_utilization=0.18"), 8)
    assert "the KV cache does NOT hold one sequence" in text
    text = dry_run(recipe_of("qwen7b_grpo", "rollout.gpu_memory_utilization=0.7"), 8)
    assert "of 80, does NOT fit: lower rollout.gpu_memory_utilization" in text


def test_a_reference_is_planned_only_where_it_is_used() -> None:
    assert "reference: tensor 4" in dry_run(recipe_of("qwen7b_grpo"), 8)
    assert "reference: not made" in dry_run(recipe_of("qwen7b_grpo", "algorithm.kl_coef=0"), 8)


def test_critic_and_reward_model_count_in_every_phase() -> None:
    critic = "critic={tokens_per_gpu: 8192, optimizer: {learning_rate: 1e-5}, layout: {tensor: 2}}"
    judge = "reward_model={tokens_per_gpu: 8192, path: recipes/models/smollm2-135m, layout: {tensor: 1}}"
    gae = "algorithm.advantage=gae"
    model = "qwen2.5-7b"
    alone, both = (memory_of(recipe_of("qwen7b_grpo", *more), model, 8) for more in ([], [critic, judge, gae]))
    [value], [score] = both.roles["critic"], both.roles["reward_model"]
    assert value.parameters == rank_parameters(architecture_of(model).with_head("scalar"), Layout(2), 0).total
    assert (
        score.parameters == model_parameters(architecture_of("smollm2-135m")) + 576
    )  # tied embeddings, and one row for the head
    assert value.optimizer > 0 == value.logits and score.gradients == score.optimizer == 0
    for phase in ("generate", "logprobs", "update"):
        assert both.phases[phase] >= alone.phases[phase] + value.resident + score.resident - 1e-9
    text = dry_run(recipe_of("qwen7b_grpo", critic, judge, gae), 8)
    assert "critic: tensor 2 x data 4" in text and "reward_model: tensor 1 x data 8" in text


def test_what_leaves_between_phases_counts_only_where_it_is_used() -> None:
    everything = "{parameters: true, gradients: true, optimizer: true}"
    model = "qwen2.5-7b"
    stays = memory_of(recipe_of("qwen7b_grpo"), model, 8)
    leaves = memory_of(recipe_of("qwen7b_grpo", f"actor.offload={everything}"), model, 8)
    [actor] = leaves.roles["actor"]
    [reference] = leaves.roles["reference"]
    assert actor.resident == 0.0 and reference.resident == reference.weights > 0.0
    assert leaves.phases["generate"] == pytest.approx(stays.phases["generate"] - actor.model_states)
    assert leaves.phases["update"] == pytest.approx(stays.phases["update"])
    text = dry_run(recipe_of("qwen7b_grpo", f"actor.offload={everything}"), 8)
    assert f", of which {actor.model_states:.1f} leave between phases" in text


def test_logits_are_kept_where_there_is_memory_for_all_of_them() -> None:
    model, tokens = "qwen2.5-7b", recipe_of("qwen7b_grpo").actor.tokens_per_gpu
    gigabytes = 2 * tokens * 152_064 / 4 / 2**30  # over four tensor-parallel ranks
    none, less, enough = (
        memory_of(recipe_of("qwen7b_grpo", f"actor.kept_logits_gb={kept}"), model, 8).roles["actor"][-1].logits
        for kept in (0, 0.99 * gigabytes, 1.01 * gigabytes)
    )
    assert none == less < gigabytes < enough


def test_logits_that_there_is_memory_for_are_told_of() -> None:
    told = "an update computes its logits twice; actor.kept_logits_gb=1.2 fits, and computes them once"
    assert told in dry_run(recipe_of("qwen7b_grpo", "actor.kept_logits_gb=0"), 8)
    kept = dry_run(recipe_of("qwen7b_grpo", "actor.kept_logits_gb=1.2"), 8)
    full = dry_run(recipe_of("qwen7b_grpo", "actor.kept_logits_gb=0", "cluster.gpu_memory_gb=48"), 8)
    assert "logits twice" not in kept + full
    over = dry_run(recipe_of("qwen7b_grpo", "actor.kept_logits_gb=1.2", "cluster.gpu_memory_gb=47"), 8)
    assert "does NOT fit: set actor.kept_logits_gb to 0, lower actor.tokens_per_gpu" in over


@pytest.mark.parametrize(
    ("key", "value", "of_twelve_bytes"), [("state_dtype", "bfloat16", 8), ("master_remainders", True, 10)]
)
def test_narrow_state_takes_less_memory(key: str, value: str | bool, of_twelve_bytes: int) -> None:
    model, narrow = "qwen2.5-7b", f"actor.optimizer.{key}={value}"
    [whole] = memory_of(recipe_of("qwen7b_grpo"), model, 8).roles["actor"]
    [less] = memory_of(recipe_of("qwen7b_grpo", narrow), model, 8).roles["actor"]
    assert less.optimizer == pytest.approx(whole.optimizer * of_twelve_bytes / 12)
    assert less.stream_buffer > 0 == whole.stream_buffer
    with pytest.raises(RecipeError, match=f"{key}={value} needs optimizer.distributed"):
        recipe_of("qwen7b_grpo", narrow, "actor.optimizer.distributed=false")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("model.dtype=float32", "needs weights in bfloat16; they are float32"),
        ("actor.lora={rank: 8}", "adapters are float32"),
    ],
)
def test_remainders_are_of_weights_in_bfloat16(change: str, why: str) -> None:
    with pytest.raises(RecipeError, match=f"actor.optimizer.master_remainders=True:? {why}"):
        recipe_of("qwen7b_grpo", "actor.optimizer.master_remainders=true", change)


def test_a_streamed_optimizer_is_in_host_memory() -> None:
    model = "qwen2.5-7b"
    [whole] = memory_of(recipe_of("qwen7b_grpo"), model, 8).roles["actor"]
    [half] = memory_of(recipe_of("qwen7b_grpo", "actor.offload.streamed_optimizer=0.5"), model, 8).roles["actor"]
    [none] = memory_of(recipe_of("qwen7b_grpo", "actor.offload.streamed_optimizer=1"), model, 8).roles["actor"]
    assert half.optimizer == half.streamed == pytest.approx(whole.optimizer / 2)
    assert whole.streamed == whole.stream_buffer == none.optimizer == 0.0 < half.stream_buffer <= none.stream_buffer
    assert none.resident == pytest.approx(whole.resident - whole.optimizer)
    assert none.update == none.model_states + max(none.activations + none.logits, none.stream_buffer)
    text = dry_run(recipe_of("qwen7b_grpo", "actor.offload.streamed_optimizer=1"), 8)
    assert (
        f"; {none.streamed:.1f} of its optimizer in host memory, {none.stream_buffer:.1f} at a time on the GPU" in text
    )
    with pytest.raises(RecipeError, match="streamed_optimizer=0.5 needs optimizer.distributed"):
        recipe_of("qwen7b_grpo", "actor.offload.streamed_optimizer=0.5", "actor.optimizer.distributed=false")


def test_roles_on_ranks_of_their_own_share_no_memory() -> None:
    critic = "critic={tokens_per_gpu: 8192, optimizer: {learning_rate: 1e-5}, layout: {tensor: 2}, ranks: RANKS}"
    model, gae = "qwen2.5-7b", "algorithm.advantage=gae"
    actor = ["actor.ranks=0-3", "reference.ranks=0-3"]
    apart = memory_of(recipe_of("qwen7b_grpo", critic.replace("RANKS", "4-7"), gae, *actor), model, 8)
    together = memory_of(recipe_of("qwen7b_grpo", critic.replace("RANKS", "0-3"), gae, *actor), model, 8)
    [value] = apart.roles["critic"]
    assert together.phases["generate"] - value.resident <= apart.phases["generate"] < together.phases["generate"]
    text = dry_run(recipe_of("qwen7b_grpo", critic.replace("RANKS", "4-7"), gae, *actor), 8)
    assert "critic: tensor 2 x data 2 on ranks 4-7 (counted from 0 below)" in text


def test_rollout_on_ranks_of_its_own_shares_no_memory_and_keeps_its_own() -> None:
    model, roles = "qwen2.5-7b", ["actor.ranks=0-3", "reference.ranks=0-3"]
    own = [*roles, "rollout.ranks=4-7", "rollout.layout.tensor=2", "rollout.gpu_memory_utilization=0.5"]
    ahead = [*own, "rollout.steps_ahead=1", "algorithm.rollout_correction={type: tis}"]
    four = memory_of(recipe_of("qwen7b_grpo", *roles, "rollout.ranks=0-3"), model, 4)
    for overrides in (own, ahead):
        apart = memory_of(recipe_of("qwen7b_grpo", *overrides), model, 8)
        assert apart.rollout is not None and four.rollout is not None
        assert apart.rollout.replicas == 2 and four.rollout.replicas == 4
        assert apart.rollout.reserved == pytest.approx(0.5 * 80)
        # Its GPUs hold it in every phase; those of the roles hold no sleeping engine.
        assert apart.phases["generate"] == pytest.approx(2.0 + 0.5 * 80 + 0.25)
        assert apart.phases["update"] == pytest.approx(four.phases["update"] - 2.0)
    text = dry_run(recipe_of("qwen7b_grpo", *ahead), 8)
    assert "rollout: 2 replicas of tensor 2, on ranks 4-7 (counted from 0 below)\n    replicas: 0-1; 2-3\n" in text
    assert "each batch is generated while the previous one is trained on" in text


def test_pairs_are_planned_as_two_rows_each() -> None:
    overrides = ["model.path=recipes/models/qwen2.5-7b", "steps=1"]
    text = dry_run(recipe_of("tiny_reward_model", *overrides), 2)
    assert "64 pairs" in text and "1 optimizer step of 128 rows" in text and "logits 0.0" in text


def test_the_regathering_lines_are_the_callers() -> None:
    assert "Regathering" not in dry_run(recipe_of("smollm_grpo"), 1)
    assert "Regathering\n  12 GB per rank\n" in dry_run(recipe_of("smollm_grpo"), 1, ["12 GB per rank"])


def test_a_plan_without_a_config_says_what_to_do() -> None:
    with pytest.raises(RecipeError, match=r"there is no nowhere/config\.json; give the model's folder or"):
        dry_run(recipe_of("smollm_grpo", "model.path=nowhere", "model.config=null"), 1)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe"])
def test_a_damaged_config_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match="not valid JSON .*; download the model again"):
        dry_run(recipe_of("smollm_grpo", f"model.path={tmp_path}"), 1)
    with pytest.raises(ModelError, match="not valid JSON"):
        read_architecture(tmp_path)


@pytest.mark.parametrize(("field", "value"), [("head_dim", "x"), ("num_attention_heads", 0), ("vocab_size", 1.5)])
def test_sizes_that_are_none_are_refused(field: str, value: object) -> None:
    config = read_config(ROOT / "recipes/models/qwen2.5-7b") | {field: value}
    with pytest.raises(
        ModelError, match=f"^here/config.json: {field} is {value!r}; it must be a whole number above 0$"
    ):
        parse_architecture(config, "here")


@pytest.mark.parametrize(
    ("arguments", "world_size", "told"),
    [
        (["--world=-8"], "1", "--world=-8: must be a number of GPUs"),
        (["--world=0"], "1", "--world=0: must be a number of GPUs"),
        ([], "abc", "WORLD_SIZE=abc: must be a number of GPUs"),
    ],
)
def test_a_world_of_no_gpus_cannot_be_planned(
    arguments: list[str],
    world_size: str,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WORLD_SIZE", world_size)
    monkeypatch.setattr(sys, "argv", ["train.py", "recipes/smollm_grpo.yaml", "--dry-run", *arguments])
    assert runpy.run_path(str(ROOT / "launch" / "train.py"))["main"]() == 2
    assert capsys.readouterr().err == f"error: {told}, 1 or more\n"


def test_a_world_that_does_not_fit_is_refused() -> None:
    with pytest.raises(RecipeError, match="tensor 8 x pipeline 6 x data 2 = 96 is not 64 GPUs"):
        dry_run(recipe_of("qwen70b_dapo"), 64)


def test_choices_of_experts_are_counted_beside_the_cache() -> None:
    """One byte for each of the 8 experts of a token in 48 layers, for each token of the cache, in every phase."""
    plain, replayed = (
        memory_of(recipe_of("qwen3_30b_a3b_grpo", f"algorithm.router_replay='{mode}'"), "qwen3-30b-a3b", 16)
        for mode in ("off", "rollout")
    )
    assert plain.rollout is not None and replayed.rollout is not None
    choices = replayed.rollout.choices
    assert choices * GB == replayed.rollout.cache_tokens * 48 * 8 and plain.rollout.choices == 0
    for phase, needed in plain.phases.items():
        assert replayed.phases[phase] == pytest.approx(needed + choices), phase


def test_the_start_of_7b_on_1024_gpus_takes_less_than_three_minutes() -> None:
    recipe = recipe_of("qwen7b_grpo", "batch.prompts_per_step=2048")
    seconds = expected_start(recipe, planned_architectures(recipe), 1024)
    assert sum(seconds.values()) < 180, seconds
    text = plan_text(recipe, 1024)
    assert "Time from start to first step (estimate)\n  processes 8 + joining 6.12 + data 2.7 + communicators " in text
    assert "files and sockets: up to 2,558 open" in text
    more = expected_start(recipe, planned_architectures(recipe), 8192)
    assert {name for name in seconds if more[name] != seconds[name]} == {"joining"}, "all else is a rank's own"


def test_a_node_reads_what_its_ranks_hold() -> None:
    """Of 7B in 4 stages on 4 nodes the first node reads its 7 layers and the embeddings."""
    recipe = recipe_of("qwen7b_grpo", "actor.layout={tensor: 8, pipeline: 4}", "cluster.gpus_per_node=8")
    architectures = {"actor": planned_architectures(recipe)["actor"]}
    shapes = tensor_shapes(architectures["actor"])
    of_stages = [
        sum(math.prod(shape) for name, shape in shapes.items() if name.startswith(begins))
        for begins in (
            ("model.embed_tokens.", *(f"model.layers.{layer}." for layer in range(7))),
            ("lm_head.", "model.norm.", *(f"model.layers.{layer}." for layer in range(21, 28))),
        )
    ]
    assert parameters_of_a_node(recipe, architectures, 32) == pytest.approx(max(of_stages), rel=0.02)
    whole = recipe_of("qwen7b_grpo")
    assert parameters_of_a_node(whole, architectures, 32) == pytest.approx(
        sum(map(math.prod, shapes.values())), rel=1e-9
    )


def test_a_plan_counts_the_groups_that_a_rank_makes() -> None:
    """As ``topology.process_groups`` does, which needs a world."""
    recipe = recipe_of("qwen7b_grpo", "actor.layout.pipeline=4", "batch.prompts_per_step=2048")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1024)
    try:
        layout = make_layout(recipe.actor.layout, 1024)
        for _ in range(2):
            make_groups(layout, range(1024))
        made = {members for members, _ in made_groups() if len(members) > 1}
    finally:
        dist.destroy_process_group()
    assert made == communicators_of_a_rank(recipe, 1024)


def test_a_plan_says_while_how_many_run_there_are_drafts() -> None:
    plan = dry_run(recipe_of("qwen7b_grpo", "rollout.speculative={max_running: 16}"), 8)
    drafts = (
        "rollout: drafts of 3 tokens (suffix) while at most 16 sequences run per replica: logits 0.0, text of earlier"
    )
    assert f"  {drafts} epochs at most 0.25 in host memory per rank\n" in plan
    with pytest.raises(RecipeError, match=r"^rollout\.speculative: the states of the model's delta nets go back to no"):
        dry_run(recipe_of("qwen3_next_grpo", "rollout.speculative={}"), 64)


def test_what_is_set_beside_the_usual_is_told() -> None:
    keys = ("steps=0", "epochs=2", "cluster.memory_reserve_gb=8")
    told = dry_run(in_steps(recipe_of("qwen7b_grpo", *keys), 6400), 8)
    assert re.search(r"2 epochs: \d+ steps, by all rows of the files\n", told)
    assert "8 of 80 are kept free (cluster.memory_reserve_gb)" in told and " of 72, fits" in told
    assert "2 epochs: steps are counted by the run" in dry_run(recipe_of("qwen7b_grpo", *keys), 8)


def test_a_critic_in_float32_needs_more_than_one_in_the_actors_type() -> None:
    critic = "critic={layout: {tensor: 1}, tokens_per_gpu: 4096, dtype: %s, optimizer: {learning_rate: 1e-5}}"
    gae = ("algorithm.advantage=gae", "algorithm.normalize_by_std=false")
    held = {
        dtype: estimate(recipe, planned_architectures(recipe), 8).roles["critic"][0].update
        for dtype in ("bfloat16", "float32", "null")
        for recipe in [recipe_of("qwen7b_grpo", critic % dtype, *gae)]
    }
    assert held["null"] == held["bfloat16"] < held["float32"]


def test_a_model_that_is_elsewhere_is_planned_without_torch() -> None:
    arguments = ["train.py", "recipes/glm45_air_grpo.yaml", "--dry-run", "--world", "64"]
    code = f"""if True:
        import runpy, sys
        sys.argv = {arguments}
        status = runpy.run_path("launch/train.py", run_name="train")["main"]()
        print(status, sorted({{"torch", "megatron", "vllm", "transformers"}} & sys.modules.keys()))
    """
    ended = subprocess.run([sys.executable, "-P", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    *_, files, last = ended.stdout.splitlines()
    assert files.strip().startswith("not checked: there is no models/") and last == "0 []"
