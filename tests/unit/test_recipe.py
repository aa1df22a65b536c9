"""Recipes: loading, overlays, overrides, what is refused and in which words, and the page made from the schema."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from rlhf_megatron.data.epochs import in_steps
from rlhf_megatron.models.architecture import ModelError, parse_architecture
from rlhf_megatron.planning.feasibility import check_architectures, longest_row
from rlhf_megatron.planning.model_folders import role_architectures
from rlhf_megatron.recipe import (
    Recipe,
    RecipeError,
    RewardModelingRecipe,
    RLRecipe,
    SFTRecipe,
    UserError,
    check_world,
    known_keys,
    load_evaluation,
    load_recipe,
    load_rl,
    make_recipe,
    resolved_yaml,
)
from rlhf_megatron.recipe.load import section_of
from rlhf_megatron.recipe.operations import ClusterSection
from rlhf_megatron.recipe.other_names import NAMES_HERE, WITHOUT_SENSE
from rlhf_megatron.recipe.placement import ranks_of
from rlhf_megatron.recipe.rollout import DrawnLengthsSection

ROOT = Path(__file__).resolve().parents[2]

SMALL = """
name: small
loop: rl
steps: 3
model: {path: somewhere, dtype: bfloat16}
data: {train_files: [a.parquet], max_prompt_length: 100}
batch: {prompts_per_step: 8, responses_per_prompt: 4}
actor:
  tokens_per_gpu: 1000
  optimizer: {learning_rate: 1e-4}
rollout: {max_response_length: 50}
"""

# What turns it into a recipe of another loop.
SFT = ("loop=sft", "batch.responses_per_prompt=1", "rollout=null")
PAIRS = (*SFT, "loop=reward_modeling")
GAE = ("algorithm.advantage=gae", "batch.responses_per_prompt=1")

CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "vocab_size": 152064,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "num_hidden_layers": 28,
    "intermediate_size": 18944,
    "max_position_embeddings": 1024,
}
MIXTURE = CONFIG | {
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "num_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
}


def check(recipe: Recipe, config: dict[str, Any]) -> None:
    """Look whether the layouts of a recipe fit a model with this config."""
    check_architectures(recipe, role_architectures(recipe, parse_architecture(config, "model")))


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


def refusal(path: Path, *overrides: str) -> str:
    """Return the one line that a recipe is refused with."""
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    text = str(caught.value)
    assert isinstance(caught.value, UserError) and "\n" not in text
    return text


def test_mistakes_of_keys_sections_and_what_they_are_to_each_other_are_told_together(small: Path) -> None:
    told = refusal(small, "evaluation.interval=5", *GAE[:1], "monitor.profile.steps=[9]", "rollout.steps_ahead=1")
    for part in (
        "evaluation.interval=5 needs data.validation_files",
        "algorithm.advantage=gae needs the section critic",
        "monitor.profile.steps=[9]: the run has 3 steps",
        "rollout.steps_ahead=1: the policy of an update before answers",
    ):
        assert part in told
    told = refusal(small, "stepz=4", "batch.prompts_per_step=0", "rollout.top_p=2", "actor.optimiser={}", "seed=true")
    for part in (
        "unknown key stepz; did you mean steps?",
        "unknown key actor.optimiser; did you mean actor.optimizer?",
        "seed: must be a number; it is true",
        "batch.prompts_per_step: Input should be greater than 0; it is 0",
        "rollout.top_p: ",
    ):
        assert told.count(part) == 1, told


def test_defaults_and_overrides(small: Path) -> None:
    overrides = ["steps=7", "actor.layout.tensor=2", "rollout.temperature=0.5", "reference={tokens_per_gpu: 9}"]
    recipe = load_recipe(small, overrides)
    assert (recipe.steps, recipe.actor.layout.tensor, recipe.seed) == (7, 2, 1)
    assert recipe.rollout is not None and recipe.rollout.temperature == 0.5
    assert recipe.reference is not None and recipe.reference.layout is None
    assert recipe.actor.optimizer.learning_rate == 1e-4  # YAML 1.1 reads 1e-4 as text


def test_a_recipe_is_frozen(small: Path) -> None:
    recipe = load_recipe(small)
    with pytest.raises(ValidationError):
        recipe.steps = 5  # type: ignore[misc]
    with pytest.raises(ValidationError):
        recipe.actor.optimizer.learning_rate = 1.0  # type: ignore[misc]


def test_resolved_yaml_loads_to_the_same_recipe(small: Path, tmp_path: Path) -> None:
    recipe = load_recipe(small, ["actor.layout={tensor: 2, pipeline: 2, first_stage_layers: 3}"])
    again = tmp_path / "again.yaml"
    again.write_text(resolved_yaml(recipe))
    assert load_recipe(again) == recipe
    flat = yaml.safe_load(resolved_yaml(recipe))
    assert flat["actor"]["optimizer"]["beta2"] == 0.999


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("actor.tokens_per_gpus=5", "unknown key actor.tokens_per_gpus; did you mean actor.tokens_per_gpu?"),
        ("algorithm.clip_ratio_hi=0.3", "unknown key algorithm.clip_ratio_hi; did you mean algorithm.clip_ratio_high?"),
        ("algoritm.kl_coef=0.3", "unknown key algoritm; did you mean algorithm?"),
        ("kl_coef=0.3", "unknown key kl_coef; did you mean algorithm.kl_coef?"),
        ("lr=0.3", "unknown key lr; it is actor.optimizer.learning_rate here"),
        ("learning_rate=0.3", "unknown key learning_rate; did you mean actor.optimizer.learning_rate?"),
        (
            "rollout.tensor_parallel_size=2",
            "unknown key rollout.tensor_parallel_size; it is rollout.layout.tensor here",
        ),
        ("rollout.n=8", "unknown key rollout.n; it is batch.responses_per_prompt here"),
        ("trainer.nnodes=2", "(tools/verl/from_verl.py) makes a recipe of its command"),
        ("actor.optimizer.lerning_rate=1", "did you mean actor.optimizer.learning_rate?"),
        (
            "reward.zzz=1",
            "unknown key reward.zzz; known keys here: rule, pattern, length_low, length_high, function, "
            "service, parts, on_failure, timeout_seconds, workers, memory_limit_gb, concurrency, code",
        ),
    ],
)
def test_an_unknown_key_names_the_nearest(small: Path, override: str, expected: str) -> None:
    assert refusal(small, override).endswith(expected)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["steps=-1"], "steps: Input should be greater than or equal to 0; it is -1"),
        (["steps=0"], "steps: missing; add it, or epochs"),
        (["epochs=0"], "epochs: Input should be greater than 0"),
        (
            ["epochs=2", "algorithm.filter_groups.enable=true"],
            "epochs: with algorithm.filter_groups a step takes as many prompts as it needs; give steps alone",
        ),
        (["rollout.by_prompt_length=[{up_to: 9}]"], "up_to=9: nothing is set; give max_response_length, top_p or"),
        (
            ["rollout.by_prompt_length=[{up_to: 9, top_p: 0.9}, {up_to: 9, top_k: 5}]"],
            "by_prompt_length: up_to=9 follows 9, which prompts fit first; let them rise",
        ),
        (
            ["rollout.by_prompt_length=[{up_to: 9, max_response_length: 51}]"],
            "max_response_length=51 of up_to=9 is above rollout.max_response_length=50",
        ),
        (
            ["retry={launcher: ft_launcher, hang_seconds: 60, interval_seconds: 60}"],
            "interval_seconds=60: ft_launcher kills ranks that say nothing for hang_seconds=60; lower it",
        ),
        (["cluster.memory_reserve_gb=80"], "memory_reserve_gb=80 leaves nothing of gpu_memory_gb=80; lower it"),
        (["name=../x"], "name: '../x' cannot name a run folder; begin with a letter or digit"),
        (["loop=ppo"], "loop: Input should be 'rl', 'sft' or 'reward_modeling'; it is 'ppo'"),
        (["monitor.trackers=[jsonl, comet]"], "monitor.trackers.1: Input should be 'jsonl'"),
        (["data.train_files=a.parquet"], "data.train_files: Input should be a valid list; it is 'a.parquet'"),
        (["batch.minibatch_prompts=3"], "minibatch_prompts=3 must divide prompts_per_step=8"),
        (["batch.responses_per_prompt=1"], "batch.responses_per_prompt=1 must be at least 2"),
        (["algorithm={advantage: rloo, normalize_by_std: true}"], "algorithm: normalize_by_std must be false"),
        (["algorithm.kl_coef=0.1"], "algorithm.kl_coef=0.1 needs the section reference"),
        (["deterministic=true"], "deterministic: with rollout.scheduling=queue the batches of the engine depend on"),
        (["rollout.quantization=fp8"], "rollout.quantization=fp8: another policy than the actor's answers"),
        (["rollout.kv_cache_dtype=fp8"], "rollout.kv_cache_dtype=fp8: another policy than the actor's answers"),
        (["algorithm.overlong_buffer={enable: true, len: 51}"], "overlong_buffer.len=51 must be from 1 to"),
        (["algorithm.advantage=gae"], "algorithm.advantage=gae needs the section critic"),
        (["critic={tokens_per_gpu: 100, optimizer: {learning_rate: 1e-5}}"], "critic: algorithm.advantage=grpo reads"),
        (["reward.rule=none"], "reward.rule=none needs the section reward_model"),
        (["rollout=null"], "rollout: loop rl needs this section"),
        (["rollout.temperature=0"], "rollout.temperature: Input should be greater than 0"),
        (["rollout.top_k=0"], "top_k=0 would leave no token"),
        (["loop=sft"], "batch.responses_per_prompt: loop sft does not read it; leave it out"),
        (["loop=reward_modeling"], "batch.responses_per_prompt: loop reward_modeling does not read it; leave it out"),
        (["reward_model.tokens_per_gpu=100"], "reward_model.path: missing; add it"),
        (["critic.tokens_per_gpu=100"], "critic.optimizer: missing; add it"),
        (
            ["critic={tokens_per_gpu: 9, optimizer: {learning_rate: 1}, warmup_steps: 5}", *GAE, "steps=5"],
            "critic.warmup_steps=5: the actor would learn in none of 5 steps; lower it",
        ),
        (["evaluation.samples_per_prompt=2"], "evaluation: samples_per_prompt=2 at temperature 0 would be the same"),
        (["evaluation.interval=5"], "evaluation.interval=5 needs data.validation_files"),
        (["actor.recompute.layers=2"], "layers=2 needs granularity full; it is none"),
        (["actor.layout.first_stage_layers=2"], "first_stage_layers needs pipeline of 2 or more"),
        (["actor.optimizer.min_learning_rate=1"], "min_learning_rate=1.0 is above learning_rate=0.0001"),
        (["actor.optimizer={learning_rate: 1, warmup_steps: 9, decay_steps: 9}"], "decay_steps=9 must be above warmup"),
        (
            ["actor.optimizer.min_learning_rate=1e-5"],
            "min_learning_rate=1e-05 is for schedules that fall; it is constant",
        ),
        (["actor.optimizer.decay_steps=3"], "decay_steps=3 is for schedules that fall; it is constant, leave it out"),
        (["loop=sft", "batch.responses_per_prompt=1", "algorithm.kl_coef=0.1"], "algorithm.kl_coef: loop sft does not"),
        (["reward.length_low=9"], "reward: length_low=9 is for rule length; it is data_source, leave it out"),
        (["actor.optimizer={}"], "actor.optimizer.learning_rate: missing; add it"),
        (["steps.x=1"], "override 'steps.x=1': steps is 3 and has no keys below it"),
        (["steps"], "override 'steps': must have the form key.path=value"),
        (["=1"], "override '=1': must have the form key.path=value"),
        (["name=2024-13-45"], "override 'name=2024-13-45': the value is not valid YAML; quote it"),
        (["steps=[1"], "override 'steps=[1': the value is not valid YAML"),
    ],
)
def test_bad_values_are_refused_in_one_line(small: Path, overrides: list[str], expected: str) -> None:
    assert expected in refusal(small, *overrides)


def test_overlays_merge_in_order_and_the_file_wins(small: Path, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "one.yaml").write_text("actor: {tokens_per_gpu: 1, optimizer: {beta1: 0.1, beta2: 0.1}}\n")
    (tmp_path / "shared" / "two.yaml").write_text("defaults: [one.yaml]\nactor: {optimizer: {beta1: 0.2}}\nsteps: 9\n")
    small.write_text("defaults: [shared/two.yaml]\n" + SMALL)
    recipe = load_recipe(small)
    optimizer = recipe.actor.optimizer
    assert (recipe.steps, recipe.actor.tokens_per_gpu) == (3, 1000)
    assert (optimizer.beta1, optimizer.beta2, optimizer.learning_rate) == (0.2, 0.1, 1e-4)


def test_circular_defaults_name_the_circle(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("defaults: [b.yaml]\n")
    (tmp_path / "b.yaml").write_text("defaults: [a.yaml]\n")
    assert "lead back to itself (a.yaml -> b.yaml -> a.yaml)" in refusal(tmp_path / "a.yaml")


def test_unreadable_files_say_where(tmp_path: Path) -> None:
    assert "missing.yaml: cannot be read (No such file" in refusal(tmp_path / "missing.yaml")
    cases: dict[str, tuple[bytes, str]] = {
        "broken.yaml": (b"name: x\nmodel: [a\nsteps: 3\n", "line 3, column"),
        "twice.yaml": (b"name: x\nsteps: 3\nname: y\n", "line 3, column 1: the key 'name' stands here a second time"),
        "pair.yaml": (b"? [a, b]\n: 3\n", "line 1, column 3: found unhashable key"),
        "list.yaml": (b"- 1\n", "must be a mapping of sections"),
        "binary.yaml": (b"\xff\xfe\x00", "not a text file"),
        "text.yaml": (b"defaults: a.yaml\n", "defaults must be a list of files"),
        "date.yaml": (b"name: 2024-13-45\n", "line 1, column 7: '2024-13-45' cannot be read as timestamp; quote it"),
        "tag.yaml": (b"name: !!python/object/apply:os.getcwd []\n", "line 1"),
    }
    for name, (content, expected) in cases.items():
        (tmp_path / name).write_bytes(content)
        text = refusal(tmp_path / name)
        assert name in text and expected in text


@pytest.mark.parametrize(
    ("world", "overrides", "expected"),
    [
        (6, ["actor.layout={tensor: 4}"], "actor.layout: tensor 4 does not divide 6 GPUs; change a degree"),
        (8, ["actor.layout={tensor: 2, pipeline: 3}"], "actor.layout: tensor 2 x pipeline 3 = 6 does not divide 8"),
        (8, ["actor.layout={tensor: 2, data: 2}"], "actor.layout: tensor 2 x data 2 = 4 is not 8 GPUs"),
        (8, ["reference={tokens_per_gpu: 1, layout: {tensor: 3}}"], "reference.layout: tensor 3 does not divide 8"),
        (8, ["rollout.layout={tensor: 2, data: 2}"], "rollout.layout: tensor 2 x data 2 = 4 is not 8 GPUs"),
        (3, ["rollout.layout={tensor: 2}"], "rollout.layout: tensor 2 does not divide 3 GPUs"),
        (8, ["actor.layout={tensor: 2, expert: 8}"], "actor.layout: expert 8 x expert_tensor 2 does not divide the 8"),
    ],
)
def test_layouts_that_do_not_fill_the_world(small: Path, world: int, overrides: list[str], expected: str) -> None:
    with pytest.raises(RecipeError, match="GPUs") as caught:
        check_world(load_recipe(small, overrides), world)
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("all", list(range(16))),
        ("0-3", [0, 1, 2, 3]),
        ("0,2-3", [0, 2, 3]),
        ("node1:0-1", [8, 9]),
        ("node0:6-7;node1:0-1,7", [6, 7, 8, 9, 15]),
        ("0-16", "critic.ranks=0-16: there is no 16: the ranks are 0-15"),
        ("node1:8", "critic.ranks=node1:8: there is no 8: node 1 has GPUs 0-7"),
        ("node2:0", "critic.ranks=node2:0: there is no rank 16: the ranks are 0-15"),
        ("3-1", "critic.ranks=3-1: name each rank once, in rising order"),
        ("0,0", "critic.ranks=0,0: name each rank once, in rising order"),
        ("host:0", "critic.ranks=host:0: not understood; write all"),
        ("0-", "critic.ranks=0-: not understood; write all"),
        ("", "critic.ranks=: not understood; write all"),
    ],
)
def test_ranks_of_a_role(text: str, expected: list[int] | str) -> None:
    if isinstance(expected, list):
        assert ranks_of("critic.ranks", text, 16, 8) == expected
        return
    with pytest.raises(RecipeError) as caught:
        ranks_of("critic.ranks", text, 16, 8)
    assert str(caught.value).startswith(expected)


def test_a_layout_fills_the_ranks_of_its_role(small: Path) -> None:
    critic = "critic={tokens_per_gpu: 9, optimizer: {learning_rate: 1}, layout: {tensor: 2}, ranks: 1-3}"
    with pytest.raises(RecipeError, match="critic.layout: tensor 2 does not divide 3 GPUs"):
        check_world(load_recipe(small, [critic, "algorithm.advantage=gae"]), 4)
    check_world(load_recipe(small, [critic.replace("1-3", "2-3"), "algorithm.advantage=gae"]), 4)


AHEAD = ["rollout.ranks=2-3", "rollout.steps_ahead=1", "algorithm.rollout_correction={type: tis}"]
JUDGE = "reward_model={path: judge, tokens_per_gpu: 9, ranks: RANKS}"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["rollout.ranks=0-2", "rollout.layout.tensor=2"], "rollout.layout: tensor 2 does not divide 3 GPUs"),
        (["rollout.ranks=2-4"], "rollout.ranks=2-4: there is no 4: the ranks are 0-3"),
        (
            ["actor.ranks=0", "rollout.ranks=2-3"],
            "rollout.ranks=2-3: rank 1 has neither a role nor rollout; give it one, or run on fewer GPUs",
        ),
        (
            AHEAD,
            "actor.ranks=all has rank 2, which generates ahead (rollout.steps_ahead=1, rollout.ranks=2-3); give each "
            "GPU to one of them",
        ),
        (
            [*AHEAD, "actor.ranks=0-1", "reference={tokens_per_gpu: 9, ranks: 1-2}", "algorithm.kl_coef=0.1"],
            "reference.ranks=1-2 has rank 2, which generates ahead",
        ),
        (
            [*AHEAD, "actor.ranks=0-1", JUDGE.replace("RANKS", "all")],
            "reward_model.ranks=all: with rollout.steps_ahead=1 it judges while others learn; name ranks of "
            "rollout.ranks=2-3",
        ),
    ],
)
def test_rollout_on_ranks_of_its_own_leaves_none_idle_or_torn(small: Path, overrides: list[str], expected: str) -> None:
    with pytest.raises(RecipeError) as caught:
        check_world(load_recipe(small, overrides), 4)
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.ranks=2"],
        ["actor.ranks=0-1", "rollout.ranks=2-3", "rollout.layout.tensor=2"],
        ["actor.ranks=0-2", "rollout.ranks=2-3"],
        [*AHEAD, "actor.ranks=0-1", JUDGE.replace("RANKS", "3")],
        # Without a KL term there is no reference, wherever it would be.
        [*AHEAD, "actor.ranks=0-1", "reference={tokens_per_gpu: 9}", "algorithm.kl_coef=0"],
    ],
)
def test_rollout_may_be_anywhere(small: Path, overrides: list[str]) -> None:
    check_world(load_recipe(small, overrides), 4)


def test_rollout_ahead_is_corrected_for(small: Path) -> None:
    text = refusal(small, "rollout.steps_ahead=1")
    assert "rollout.steps_ahead=1: the policy of an update before answers; correct for it" in text
    load_recipe(small, ["rollout.steps_ahead=1", "algorithm.old_logprobs=rollout"])


def test_layouts_that_fill_the_world_pass(small: Path) -> None:
    overrides = ["actor.layout={tensor: 2, pipeline: 2, data: 3}", "rollout.layout={tensor: 4}"]
    check_world(load_recipe(small, overrides), 12)
    check_world(load_recipe(small, ["actor.layout={tensor: 2}"]), 2)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["actor.layout.tensor=8"], "actor.layout.tensor=8 does not divide the model's 28 attention heads"),
        (["actor.layout.tensor=7"], "actor.layout.tensor=7 neither divides the model's 4 key-value heads"),
        (["actor.layout.expert=2"], "actor.layout.expert and expert_tensor are for models with experts"),
        (["actor.layout.pipeline=3"], "actor.layout.pipeline=3: 28 layers do not divide over 3 stages"),
        (["actor.layout={pipeline: 2, first_stage_layers: 10, last_stage_layers: 10}"], "first 10 and last 10 given"),
        (["actor.layout={pipeline: 3, first_stage_layers: 28}"], "28 layers do not divide over 3 stages"),
        (
            ["actor.layout={pipeline: 4, first_stage_layers: 14, last_stage_layers: 14}"],
            "actor.layout.pipeline=4: 28 layers do not divide over 4 stages with first 14 and last 14 given",
        ),
        (["actor.layout.pipeline=56"], "actor.layout.pipeline=56: 28 layers do not divide over 56 stages"),
        (
            ["actor.layout={tensor: 2, context: 4}", "actor.cp_comm_type=a2a"],
            "actor.layout.context=4 does not divide the 2 key-value heads of a GPU",
        ),
        (
            ["actor.layout={pipeline: 2, virtual_pipeline: 3}"],
            "actor.layout.virtual_pipeline=3 does not divide the layers of every pipeline stage, 14, 14",
        ),
        (["rollout.layout.tensor=8"], "rollout.layout.tensor=8 does not divide the model's 28 attention heads"),
        (["rollout.layout.tensor=7"], "rollout.layout.tensor=7 neither divides the model's 4 key-value heads"),
        (["algorithm.router_replay=rollout"], "algorithm.router_replay=rollout: the model is dense, without routers"),
        (["rollout.max_response_length=1000"], "= 1100 is beyond the model's 1024 positions"),
        ([*SFT, "data.max_response_length=925"], "= 1025 is beyond the model's 1024 positions"),
        ([*SFT, "data.max_prompt_length=1025"], "data.max_prompt_length=1025 is beyond the model's 1024 positions"),
        ([*PAIRS, "data.max_response_length=1025"], "data.max_response_length=1025 is beyond the model's 1024 pos"),
    ],
)
def test_layouts_that_do_not_fit_the_model(small: Path, overrides: list[str], expected: str) -> None:
    with pytest.raises(RecipeError) as caught:
        check(load_recipe(small, overrides), CONFIG)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["rollout.max_response_length=900"], 1000),
        ([*SFT, "data.max_response_length=900"], 1000),
        (SFT, 1024),
        ([*PAIRS, "data.max_response_length=900"], 900),
    ],
)
def test_the_longest_row_is_what_the_limits_let_through(small: Path, overrides: list[str], expected: int) -> None:
    assert longest_row(load_recipe(small, overrides), 1024) == expected


def test_the_critics_own_positions_are_looked_at(small: Path, tmp_path: Path) -> None:
    own = tmp_path / "judge"
    own.mkdir()
    (own / "config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": 149}))
    critic = f"critic={{tokens_per_gpu: 9, optimizer: {{learning_rate: 1}}, path: {own}}}"
    with pytest.raises(RecipeError, match="= 150 is beyond the critic's 149 positions"):
        check(load_recipe(small, [critic, *GAE]), CONFIG)
    check(load_recipe(small, [critic.replace(str(own), "elsewhere"), *GAE]), CONFIG)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["actor.layout.expert=12"], "actor.layout.expert=12 does not divide the model's 64 experts"),
        (
            ["actor.layout={expert: 2, expert_tensor: 9}"],
            "actor.layout.expert_tensor=9 does not divide the model's 512",
        ),
        (
            ["rollout.layout={tensor: 28, expert_parallel: true}"],
            "rollout.layout.tensor=28 does not divide the model's 64",
        ),
        (
            ["rollout.layout={tensor: 28}"],
            "rollout.layout.tensor=28 does not divide the model's 512 columns of an expert",
        ),
        (["actor.layout={tensor: 4, expert: 16, expert_tensor: 1}", "rollout.layout.expert_parallel=true"], None),
    ],
)
def test_layouts_and_experts(small: Path, overrides: list[str], expected: str | None) -> None:
    with pytest.raises(RecipeError, match=expected) if expected else nullcontext():
        check(load_recipe(small, overrides), MIXTURE)


def test_a_ring_has_no_window(small: Path) -> None:
    windowed = CONFIG | {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 0}
    ring = ["actor.layout={tensor: 2, context: 2}"]
    with pytest.raises(RecipeError, match="^actor.cp_comm_type=p2p: Transformer Engine's ring has no .* of 512 tokens"):
        check(load_recipe(small, ring), windowed)
    check(load_recipe(small, ring), CONFIG)
    # Megatron's own layers gather keys and values, and have context parallelism in float32 to themselves.
    others = ["actor.cp_comm_type=a2a", "actor.cp_comm_type=all_gather", "actor.transformer_implementation=local"]
    for other in (*others, "model.dtype=float32"):
        check(load_recipe(small, [*ring, other]), windowed)


def test_layouts_that_fit_the_model(small: Path) -> None:
    check(load_recipe(small, ["actor.layout={tensor: 4, pipeline: 3, first_stage_layers: 8}"]), CONFIG)
    check(load_recipe(small, ["rollout.layout.tensor=4"]), CONFIG)
    check(load_recipe(small, ["actor.layout={tensor: 2, context: 2}", "actor.cp_comm_type=a2a"]), CONFIG)
    check(load_recipe(small, [*SFT, "data.max_response_length=924"]), CONFIG)
    check(load_recipe(small, [*PAIRS, "data.max_response_length=1024"]), CONFIG)
    with pytest.raises(ModelError, match="num_hidden_layers is missing"):
        check(load_recipe(small), {k: v for k, v in CONFIG.items() if k != "num_hidden_layers"})


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("num_hidden_layers", None, "None"),
        ("num_attention_heads", 0, "0"),
        ("num_key_value_heads", "four", "'four'"),
        ("num_experts", "x", "'x'"),
        ("max_position_embeddings", "1k", "'1k'"),
    ],
)
def test_a_config_with_a_size_that_is_none_is_refused(small: Path, field: str, value: object, shown: str) -> None:
    told = rf"^model/config\.json: {field} is {shown}; it must be a whole number above 0$"
    with pytest.raises(ModelError, match=told):
        check(load_recipe(small), (CONFIG if field in CONFIG else MIXTURE) | {field: value})


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("rollout", ["loop=sft", "batch.responses_per_prompt=1"]),
        ("reward", [*SFT, "reward.rule=math"]),
        ("algorithm.loss_aggregation", [*SFT, "algorithm.loss_aggregation=sequence_sum_constant"]),
        ("batch.epochs_per_step", [*SFT, "batch.epochs_per_step=2"]),
        ("batch.minibatch_prompts", [*SFT, "batch.minibatch_prompts=4"]),
        ("batch.epochs_per_step", [*PAIRS, "batch.epochs_per_step=2"]),
        ("algorithm", [*PAIRS, "algorithm.loss_aggregation=sequence_mean_token_sum"]),
        ("reference", [*SFT, "reference.tokens_per_gpu=100"]),
        ("regather", [*SFT, "regather.verify=2"]),
    ],
)
def test_what_a_loop_does_not_read_is_refused(small: Path, key: str, overrides: list[str]) -> None:
    assert f"{key}: " in refusal(small, *overrides)


def test_defaults_of_what_a_loop_does_not_read_may_be_written_out(small: Path) -> None:
    """As overlays do, and the recipe.yaml of a run of another loop."""
    resolved = yaml.safe_load(resolved_yaml(load_recipe(small)))
    resolved |= {"loop": "sft", "rollout": None, "batch": resolved["batch"] | {"responses_per_prompt": 1}}
    recipe = make_recipe(resolved, "here")
    assert isinstance(recipe, SFTRecipe) and recipe == load_recipe(small, SFT)
    assert set(yaml.safe_load(resolved_yaml(recipe))) == set(SFTRecipe.model_fields)


def test_an_evaluation_reads_the_rollout_of_any_recipe(small: Path) -> None:
    given = ["loop=sft", "batch.responses_per_prompt=1"]
    assert load_evaluation(small, given).rollout == load_rl(small).rollout
    assert load_evaluation(small).reward == load_rl(small).reward
    with pytest.raises(RecipeError, match="rollout: an evaluation needs this section"):
        load_evaluation(small, [*given, "rollout=null"])
    with pytest.raises(RecipeError, match="unknown key rollout.max_respons_length; did you mean rollout.max_response"):
        load_evaluation(small, [*given, "rollout.max_respons_length=5"])


@pytest.mark.parametrize(
    ("overrides", "longest"),
    [
        ([], 150),
        (["loop=sft"], 200),
        (["loop=sft", "data.max_response_length=700"], 800),
        (["loop=reward_modeling"], 200),
        (["loop=reward_modeling", "data.max_response_length=700"], 700),
    ],
)
def test_the_longest_sequence_is_that_of_the_loop_and_its_limits(
    small: Path, overrides: list[str], longest: int
) -> None:
    given = ["batch.responses_per_prompt=1", "rollout=null"] if overrides else []
    assert load_recipe(small, [*given, *overrides]).longest_sequence == longest


def test_make_recipe_needs_no_file(small: Path) -> None:
    values: dict[str, Any] = yaml.safe_load(SMALL)
    assert make_recipe(values, "here") == load_recipe(small)


def test_every_key_has_a_docstring() -> None:
    keys = list(known_keys())
    assert "actor.optimizer.learning_rate" in keys and "reference.layout.tensor" in keys and len(keys) > 150
    sections: list[type[BaseModel]] = [RLRecipe, SFTRecipe, RewardModelingRecipe, Recipe]
    for section in sections:
        assert [name for name, field in section.model_fields.items() if not field.description] == []
        sections += [found for field in section.model_fields.values() if (found := section_of(field.annotation))]


def test_the_package_imports_neither_torch_nor_engines() -> None:
    code = "import sys, rlhf_megatron.recipe; print([m for m in ('torch', 'megatron', 'vllm') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_page_of_keys_is_up_to_date() -> None:
    command = [sys.executable, "-P", str(ROOT / "tools" / "recipe_reference.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_drawn_lengths_have_the_mean_and_spread_that_are_asked() -> None:
    section = DrawnLengthsSection(mean=1000, sigma=0.6)
    lengths = [section.of_row(row) for row in range(4000)]
    # The standard error of the mean of n lognormal values is mean * sqrt((exp(sigma^2) - 1) / n): 10.4.
    assert fmean(lengths) == pytest.approx(1000, abs=32)
    assert pstdev([math.log(length) for length in lengths]) == pytest.approx(0.6, rel=0.05)
    assert lengths == [section.of_row(row) for row in range(4000)]
    assert {DrawnLengthsSection(mean=50).of_row(row) for row in range(9)} == {50}


def test_epochs_are_counted_in_steps(small: Path) -> None:
    by_epochs = load_recipe(small, ["steps=0", "epochs=1.5", "evaluation.at_end=false", "monitor.profile.steps=[5]"])
    assert by_epochs.steps == 0 and load_recipe(small).with_counted_steps(99).steps == 3
    prompts = by_epochs.batch.prompts_per_step
    for rows, steps in ((prompts * 4, 6), (prompts * 4 + 1, 7), (prompts * 4 - 1, 6)):
        assert in_steps(by_epochs, rows).steps == steps
    third = load_recipe(small, ["steps=0", f"epochs={16 * prompts / 60!r}"])
    assert in_steps(third, 60).steps == 16, "and not one more for rounding"
    assert in_steps(load_recipe(small, ["epochs=100"]), 80).steps == 3, "whichever ends first"
    counted = in_steps(by_epochs, prompts * 4)
    assert make_recipe(yaml.safe_load(resolved_yaml(counted)), "resolved") == counted
    with pytest.raises(RecipeError, match=r"epochs=1.5 of 8 rows: monitor.profile.steps=\[5\]: the run has 2 steps"):
        in_steps(by_epochs, 8)


def test_keys_without_sense_are_refused_with_the_reason(small: Path) -> None:
    roles = ("disaggregated_prefill=true", "kv_transfer_config={}", "disaggregation.enabled=true", "decode_replicas=2")
    for override in (*roles, "prefill={max_num_seqs: 8}", "decode.layout.tensor=2"):
        key = re.split(r"[.=]", override)[0]
        assert f"rollout.{key}: a replica prefills and decodes in one" in refusal(small, f"rollout.{override}")
    assert "actor.cudnn_benchmark: cuDNN would choose" in refusal(small, "actor.cudnn_benchmark=true")
    assert "actor.recompute.checkpoint_layer: choose modules" in refusal(small, "actor.recompute.checkpoint_layer=2")
    assert "actor.torch_compile: vLLM compiles the rollout's" in refusal(small, "actor.torch_compile=true")
    said = refusal(small, "actor.optimizer.exp_avg_dtype=bfloat16")
    assert "actor.optimizer.exp_avg_dtype: optimizer.state_dtype is the type of both moments" in said


def test_a_role_has_a_type_of_its_own(small: Path) -> None:
    critic = "critic={tokens_per_gpu: 100, dtype: bfloat16, optimizer: {learning_rate: 1e-5}}"
    recipe = load_recipe(small, ["model.dtype=float16", critic, *GAE])
    assert [recipe.dtype_of(section) for section in recipe.roles.values()] == ["float16", "bfloat16"]
    assert "actor.dtype" in refusal(small, "actor.dtype=float16")


def test_names_of_other_projects_mean_keys_that_there_are() -> None:
    known = set(known_keys())
    assert set(NAMES_HERE.values()) <= known
    assert not {*NAMES_HERE, *WITHOUT_SENSE} & {key.rpartition(".")[2] for key in known}


def test_plans_fill_the_memory_of_the_named_gpu(small: Path) -> None:
    def planned(*overrides: str) -> float:
        return load_rl(small, list(overrides)).cluster.planned_memory_gb

    assert planned() == planned("cluster.gpu=H100") == 80
    assert planned("cluster.gpu=L40S") == 45 and planned("cluster.gpu=B200") == 179
    assert planned("cluster.gpu=L40S", "cluster.gpu_memory_gb=44") == 44
    with pytest.raises(RecipeError, match="memory_reserve_gb=45 leaves nothing of gpu_memory_gb=45"):
        planned("cluster.gpu=L40S", "cluster.memory_reserve_gb=45")
    with pytest.raises(RecipeError, match="cluster.gpu: Input should be 'A100'"):
        planned("cluster.gpu=[L40S]")
    # Every GPU that may be named has a memory.
    kinds = get_args(get_args(ClusterSection.model_fields["gpu"].annotation)[0])
    assert {planned(f"cluster.gpu={kind}") for kind in kinds} == {45, 80, 96, 140, 179, 185}
