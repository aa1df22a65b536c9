"""The time that a step is expected to take, against whole steps on H200s and what has to follow from the arithmetic."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from end_to_end.commands import ROOT
from rlhf_megatron.models.architecture import Architecture, read_architecture
from rlhf_megatron.planning.generation_time import _in_flight
from rlhf_megatron.planning.model_folders import role_architectures
from rlhf_megatron.planning.row_lengths import lengths
from rlhf_megatron.planning.step_time import ExpectedTime, expected_time
from rlhf_megatron.recipe import Recipe, RLRecipe, load_recipe

MEASURED = [
    row
    for name in ("step", "step_lora", "step_levers")
    for row in json.loads((ROOT / f"docs/results/{name}.json").read_text())["rows"]
    if "failed" not in row and "informative" not in row
]
MEASURED.append(json.loads((ROOT / "docs/results/step_experts.json").read_text())["rows"][-1])

KEPT = "actor.kept_logits_gb=100"  # then an update is three forward passes
PARAMETERS = 7_615_616_512  # of 7B


def architecture_of(model: str) -> Architecture:
    """Return the architecture of a shape of the benchmark, such as 7B-resume."""
    if model == "30B-A3B-8-layers":
        return dataclasses.replace(read_architecture(ROOT / "recipes/models/qwen3-30b-a3b"), layers=8)
    return read_architecture(ROOT / f"recipes/models/qwen2.5-{model.partition('-')[0].lower()}")


def recipe_of(folder: Path, *overrides: str, **values: Any) -> Recipe:
    """Return the benchmark's recipe on H200s with these sections besides."""
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({"defaults": [str(ROOT / "tools/bench/step_recipe.yaml")], **values}))
    return load_recipe(path, ["cluster.gpu=H200", "cluster.gpu_memory_gb=140", *overrides])


def time_of(recipe: Recipe, model: str = "7B", world: int = 2) -> ExpectedTime:
    found = expected_time(recipe, role_architectures(recipe, architecture_of(model)), world)
    assert found is not None
    return found


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row['model']} on {row['gpus']}")
def test_whole_steps_that_were_measured_are_met_within_a_sixth(tmp_path: Path, row: dict[str, Any]) -> None:
    found = time_of(recipe_of(tmp_path, **row["recipe"]), row["model"], row["gpus"])
    phases = {phase: seconds["median"] for phase, seconds in row["phase_seconds"].items()}
    assert found.phases["generate"] == pytest.approx(phases["generate"] + phases["score"], rel=1 / 6)
    assert found.phases["update"] == pytest.approx(phases["update"], rel=1 / 6)
    assert found.seconds == pytest.approx(row["step_seconds"]["median"], rel=1 / 6)
    assert found.tokens / found.seconds / row["gpus"] == pytest.approx(
        row["tokens_per_gpu_per_second"]["median"], rel=1 / 5
    )


def test_as_much_work_for_each_gpu_takes_as_long_on_more(tmp_path: Path) -> None:
    few = time_of(recipe_of(tmp_path, "batch.prompts_per_step=64"), world=2)
    many = time_of(recipe_of(tmp_path, "batch.prompts_per_step=2048"), world=64)
    assert many.seconds == pytest.approx(few.seconds, rel=0.02)


def computing(time: ExpectedTime) -> float:
    """Return the seconds of the actor's updates without those between data-parallel ranks."""
    return time.phases["update"] - time.exchange


def test_a_reference_takes_a_forward_pass_and_full_recomputation_another_one(tmp_path: Path) -> None:
    plain = time_of(recipe_of(tmp_path, KEPT))
    recipe = recipe_of(
        tmp_path,
        KEPT,
        "algorithm.kl_coef=0.01",
        "actor.recompute.granularity=full",
        reference={"tokens_per_gpu": 4096},
    )
    both = time_of(recipe)
    assert "logprobs" not in plain.phases
    assert both.phases["logprobs"] == pytest.approx(computing(plain) / 3)
    assert computing(both) == pytest.approx(computing(plain) * 4 / 3)


@pytest.mark.parametrize(
    ("layout", "layers", "share"),
    [
        ("{pipeline: 1}", 7, 1 / 4),
        ("{pipeline: 2}", 7, 1 / 2),
        ("{pipeline: 2}", 14, 1.0),
        ("{pipeline: 2}", 99, 1.0),
        ("{pipeline: 2, virtual_pipeline: 2}", 7, 1.0),
    ],
)
def test_recomputed_layers_are_counted_on_each_chunk_of_each_stage(
    tmp_path: Path, layout: str, layers: int, share: float
) -> None:
    plain, some = (
        computing(time_of(recipe_of(tmp_path, KEPT, f"actor.layout={layout}", *more)))
        for more in ([], [f"actor.recompute={{granularity: full, layers: {layers}}}"])
    )
    assert some / plain == pytest.approx(1 + share / 3)


def test_of_uneven_stages_the_one_that_is_slowest_with_what_it_recomputes_counts(tmp_path: Path) -> None:
    layout = "actor.layout={pipeline: 2, first_stage_layers: 18, last_stage_layers: 10}"
    plain, some = (
        time_of(recipe_of(tmp_path, KEPT, layout, *more)).phases["update"]
        for more in ([], ["actor.recompute={granularity: full, layers: 9}"])
    )
    assert some / plain == pytest.approx(1 + 9 / 18 / 3)


def test_logits_that_are_kept_are_not_made_again(tmp_path: Path) -> None:
    twice, kept = time_of(recipe_of(tmp_path)), time_of(recipe_of(tmp_path, KEPT))
    model = architecture_of("7B")
    parameters, head = 7.07e9, model.vocabulary * model.hidden  # without the embedding
    assert twice.phases["update"] / kept.phases["update"] == pytest.approx(1 + head / parameters / 3, rel=0.01)


def test_a_reward_model_takes_a_forward_pass_while_scoring(tmp_path: Path) -> None:
    plain = time_of(recipe_of(tmp_path, KEPT))
    reward_model = {"path": str(ROOT / "recipes/models/qwen2.5-7b"), "tokens_per_gpu": 4096}
    scored = time_of(recipe_of(tmp_path, KEPT, reward_model=reward_model))
    # Its head has one column instead of the vocabulary's.
    assert 0.8 * plain.phases["update"] / 3 < scored.phases["score"] < plain.phases["update"] / 3
    assert list(scored.phases) == ["generate", "score", "update"]


def test_roles_on_gpus_of_their_own_compute_at_the_same_time(tmp_path: Path) -> None:
    critic: dict[str, Any] = {
        "critic": {"tokens_per_gpu": 4096, "optimizer": {"learning_rate": 1e-6}},
        "algorithm": {"advantage": "gae"},
    }
    together = time_of(recipe_of(tmp_path, **critic), world=4)
    apart = time_of(recipe_of(tmp_path, "actor.ranks=node0:0-1", "critic.ranks=node0:2-3", **critic), world=4)
    assert apart.phases["update"] == pytest.approx(together.phases["update"], rel=0.2)


def test_epochs_repeat_the_update_and_a_pipeline_waits_for_its_ends(tmp_path: Path) -> None:
    once, twice = (time_of(recipe_of(tmp_path, f"batch.epochs_per_step={count}")) for count in (1, 2))
    assert twice.phases["update"] == pytest.approx(2 * once.phases["update"])
    few, many = (
        time_of(recipe_of(tmp_path, "actor.layout.pipeline=2", f"actor.tokens_per_gpu={tokens}"))
        for tokens in (65536, 8192)
    )
    assert few.phases["update"] > many.phases["update"] > once.phases["update"]


def test_a_pipeline_is_as_fast_as_its_slowest_stage(tmp_path: Path) -> None:
    stages = "actor.layout={{pipeline: 2, first_stage_layers: {}, last_stage_layers: {}}}"
    even, better, worse = (
        time_of(recipe_of(tmp_path, KEPT, stages.format(first, 48 - first)), "14B") for first in (24, 25, 30)
    )
    model = architecture_of("14B")
    hidden, keys = model.hidden, model.hidden * model.key_value_heads // model.heads
    layer = hidden * (2 * hidden + 2 * keys + 3 * model.feed_forward)
    head = model.vocabulary * hidden / layer * 1020 / 1276  # of responses only; attention itself is left out
    assert 24 + head > 25, "a layer less on the last stage helps"
    assert even.phases["update"] / better.phases["update"] == pytest.approx((24 + head) / (23 + head), rel=0.02)
    assert worse.phases["update"] / better.phases["update"] == pytest.approx(30 / (23 + head), rel=0.02)


def test_a_cache_for_few_sequences_lets_the_others_wait(tmp_path: Path) -> None:
    wide, narrow = (time_of(recipe_of(tmp_path, f"rollout.kv_cache_gb={size}")) for size in (40, 0.5))
    assert narrow.phases["generate"] > 1.5 * wide.phases["generate"]


def test_responses_are_half_as_long_as_they_may_be_where_nothing_is_known(tmp_path: Path) -> None:
    prompt, responses = lengths(recipe_of(tmp_path, "rollout.drawn_lengths=null"), 1000)
    assert prompt == 128
    assert sum(responses) / 1000 == pytest.approx(2048, rel=0.1)
    assert max(responses) == 4096


def test_tokens_travel_to_experts_of_other_ranks_and_farther_to_other_nodes(tmp_path: Path) -> None:
    own, node, nodes = (
        computing(time_of(recipe_of(tmp_path, KEPT, f"actor.layout={layout}"), "30B-A3B-8-layers", 16))
        for layout in ("{}", "{expert: 8, expert_tensor: 1}", "{expert: 16, expert_tensor: 1}")
    )
    # Eight of 128 experts of 2,048 numbers for each token, seven of which are elsewhere, there and back, thrice in all.
    tokens = time_of(recipe_of(tmp_path), "30B-A3B-8-layers", 16).tokens / 16
    assert node - own == pytest.approx(tokens * 3 * 8 * (8 * 7 / 8) * 2048 * 2 * 2 / 275e9, rel=0.02)
    assert nodes - own > 3 * (node - own)


def test_what_data_parallel_ranks_exchange_is_hidden_where_it_may_be(tmp_path: Path) -> None:
    few = time_of(recipe_of(tmp_path), world=8)
    assert few.exchange == pytest.approx(7 / 8 * 6 * PARAMETERS / 275e9, rel=0.01)
    several = ["batch.prompts_per_step=32768", "batch.minibatch_prompts=16384"]
    plain, gradients, both = (
        time_of(recipe_of(tmp_path, *several, *(f"actor.optimizer.{key}=true" for key in keys)), world=1024)
        for keys in ([], ["overlap_grad_reduce"], ["overlap_grad_reduce", "overlap_param_gather"])
    )
    # Two updates over the links of all GPUs of a node; the last one's weights are read at once.
    assert plain.exchange == pytest.approx(2 * 6 * PARAMETERS / 275e9, rel=0.01)
    slow = time_of(recipe_of(tmp_path, *several, "cluster.link_gb_per_sec=10"), world=1024)
    assert slow.exchange == pytest.approx(2 * 6 * PARAMETERS / 80e9, rel=0.01)
    weights = 2 * PARAMETERS / 275e9
    assert gradients.exchange == pytest.approx(2 * weights + 2 * 2 * weights / 8, rel=0.01)
    assert both.exchange == pytest.approx(gradients.exchange - weights * 7 / 8, rel=0.01)
    assert plain.least_exchange == both.least_exchange == both.exchange
    assert plain.phases["update"] - both.phases["update"] == pytest.approx(plain.exchange - both.exchange)


def test_sequences_read_more_experts_than_one_reaches(tmp_path: Path) -> None:
    model = architecture_of("30B-A3B-8-layers")
    few = dataclasses.replace(model, experts=dataclasses.replace(model.experts, count=8))  # then each reaches all
    recipe = recipe_of(tmp_path, "rollout.max_num_seqs=64")
    of_all, of_eight = (
        expected_time(recipe, role_architectures(recipe, each), 1).phases["generate"] for each in (model, few)
    )
    assert of_all > 1.5 * of_eight


@pytest.mark.parametrize("override", ["cluster.gpu=null", "model.dtype=float32"])
def test_nothing_is_said_without_figures_to_say_it_by(tmp_path: Path, override: str) -> None:
    recipe = recipe_of(tmp_path, override)
    assert expected_time(recipe, role_architectures(recipe, architecture_of("7B")), 2) is None


def test_generating_ahead_takes_as_long_as_the_slower_half(tmp_path: Path) -> None:
    apart = ["actor.ranks=0-1", "rollout.ranks=2-3"]
    ahead = [*apart, "rollout.steps_ahead=1", "algorithm.rollout_correction={type: tis}"]
    one_by_one = time_of(recipe_of(tmp_path, *apart), world=4)
    beside = time_of(recipe_of(tmp_path, *ahead), world=4)
    learning = sum(seconds for name, seconds in beside.phases.items() if name != "generate")
    assert {name for name in beside.phases if name != "generate"} >= {"update"}
    assert one_by_one.seconds == pytest.approx(beside.phases["generate"] + learning)
    assert beside.seconds == pytest.approx(max(beside.phases["generate"], learning))


def test_responses_in_flight_over_updates_leave_no_tail(tmp_path: Path) -> None:
    one, section = recipe_of(tmp_path), {"max_num_seqs": 256, "kv_cache_gb": 14}
    wait = time_of(recipe_of(tmp_path, rollout=section), world=1).phases["generate"]
    corrected = {"rollout_correction": {"type": "tis"}}
    resumed = section | {"partial": "resume", "max_staleness": 3, "oversample": 2.2}
    flying = recipe_of(tmp_path, rollout=resumed, algorithm=corrected)
    assert isinstance(one, RLRecipe) and isinstance(flying, RLRecipe)
    # 204 of 256 where steps of the same lengths were played one token after the other.
    assert _in_flight(flying, lengths(one, 256)[1]) == pytest.approx(204, rel=0.05)
    seconds = time_of(flying, world=1).phases["generate"]
    assert 0.3 * wait < seconds < 0.75 * wait
    stays = recipe_of(tmp_path, rollout=resumed | {"sleep": False}, algorithm=corrected)
    assert seconds - time_of(stays, world=1).phases["generate"] == pytest.approx(2 * 14 * 2**30 / 40e9)
