"""A killed run goes on as if nothing had happened: to the last bit in the same layout, to rounding in another."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from end_to_end.commands import Finished, python, torchrun
from end_to_end.runs import (
    LENGTH_REWARD,
    TRAIN,
    decisions,
    logged,
    make_model,
    make_sums,
    metrics_of,
    steps_of,
    wait_for,
)
from rlhf_megatron.rollout.vllm.process_environment import has_gpu

pytestmark = pytest.mark.skipif(has_gpu(), reason="the engine of this machine needs a GPU, which is hidden here")

STEPS = 4
NARROW = {"state_dtype": "bfloat16", "master_remainders": True}
# What each life does before its last step, and the steps that all of them together stay below.
KILLS = {4: ([0, 0, 1, 2], 10), 10: ([0, 0, 0, 0, 0, 0, 1, 1, 2, 2], 20)}
RECIPE: dict[str, Any] = {
    "name": "whole",
    "loop": "rl",
    "steps": STEPS,
    "deterministic": True,
    "model": {"path": "model", "dtype": "float32"},
    "data": {"train_files": ["train.parquet"], "validation_files": ["held_out.parquet"], "max_prompt_length": 64},
    "batch": {"prompts_per_step": 3, "responses_per_prompt": 4},
    "actor": {"layout": {"tensor": 2}, "tokens_per_gpu": 256, "optimizer": {"learning_rate": 1e-3, "warmup_steps": 3}},
    "reference": {"tokens_per_gpu": 256},
    # The queue's batches differ from run to run. Drafts change rounding, and what a resumed run drafts from is less.
    "rollout": {"max_response_length": 10, "scheduling": "static", "speculative": {"match": 1}},
    # Dynamic sampling with surplus, so that a checkpoint has to remember groups that wait.
    "algorithm": {
        "kl_coef": 0.01,
        "filter_groups": {"enable": True, "prompts_per_round": 4, "keep_surplus": True},
        "rollout_correction": {"type": "tis"},
    },
    "reward": {"function": "reward.py"},
    "evaluation": {"interval": 2, "at_start": False},
    "checkpoint": {"save_interval": 1, "keep_last_k": 3},
    "monitor": {"plots": False},
}
# All state that a run can have: a critic of another type, its warm-up, a scale of float16's losses, a KL controller,
# minibatches, groups that wait, an evaluation.
PPO: dict[str, Any] = {
    "name": "ppo",
    "model": {**RECIPE["model"], "dtype": "float16", "read_once": True},
    "batch": {"prompts_per_step": 4, "responses_per_prompt": 2, "minibatch_prompts": 2},
    "rollout": {"max_response_length": 10, "scheduling": "static"},
    "critic": {
        "layout": {"data": 2},
        "dtype": "bfloat16",
        "tokens_per_gpu": 256,
        "optimizer": {"learning_rate": 1e-3, "schedule": "cosine", **NARROW},
        "warmup_steps": 2,
    },
    "algorithm": {
        **RECIPE["algorithm"],
        "advantage": "gae",
        "kl_placement": "reward",
        "kl_estimator": "k1",
        "kl_controller": {"type": "adaptive", "target": 0.1, "horizon": 100},
    },
    "evaluation": {"interval": 5, "at_start": False},
    "checkpoint": {"save_interval": 1, "keep_last_k": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with random weights, and data."""
    path = tmp_path_factory.mktemp("resume")
    (path / "reward.py").write_text(LENGTH_REWARD)
    (path / "grpo.yaml").write_text(yaml.safe_dump(RECIPE))
    (path / "ppo.yaml").write_text(yaml.safe_dump(RECIPE | PPO))
    make_model(path, layers=2)
    make_sums(path, 6, "--seed=9", name="held_out")
    make_sums(path, 40, "--exclude=held_out.parquet")
    return path


@pytest.fixture(scope="module")
def train(folder: Path) -> Callable[..., Finished]:
    """Run the recipe on two ranks to its end."""

    def run(*arguments: str) -> Finished:
        with torchrun(2, TRAIN, "grpo.yaml", *arguments, folder=folder) as command:
            return command.finish().check()

    return run


@pytest.fixture(scope="module")
def whole(folder: Path, train: Callable[..., Finished]) -> dict[int, dict[str, float]]:
    """Return the run that nobody kills."""
    train()
    metrics = metrics_of(folder / "runs" / "whole")
    assert sorted(metrics) == [1, 2, 3, 4]
    assert any(metrics[step]["rollout/groups_carried_over"] for step in (2, 3, 4)), "groups did wait for a step"
    return metrics


def test_old_checkpoints_go_and_the_newest_is_named(folder: Path, whole: dict[int, dict[str, float]]) -> None:
    checkpoints = folder / "runs" / "whole" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step-2", "step-3", "step-4"]
    assert (checkpoints / "latest").read_text() == "step-4\n"


def test_a_finished_run_that_is_started_again_ends_without_its_models(
    folder: Path, train: Callable[..., Finished], whole: dict[int, dict[str, float]]
) -> None:
    run, model = folder / "runs" / "whole", folder / "model"
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    model.rename(folder / "away")
    try:
        again = train()
    finally:
        (folder / "away").rename(model)
    assert again.out.startswith(f"runs/whole: all {STEPS} steps are done, and nothing is left to write: for more raise")
    assert again.out.count("\n") == 1 and {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_a_checkpoint_becomes_the_exported_model(folder: Path, whole: dict[int, dict[str, float]]) -> None:
    convert = ["checkpoint-to-hf", f"--input=runs/whole/checkpoints/step-{STEPS}", "--dtype=float32"]
    python("tools/convert.py", *convert, "--output=converted", folder=folder).check()
    exported = folder / "runs" / "whole" / "export" / f"step-{STEPS}"
    expected = load_file(exported / "model.safetensors")
    found = load_file(folder / "converted" / "model.safetensors")
    assert sorted(found) == sorted(expected) and all((found[name] == expected[name]).all() for name in expected)
    for name in ("config.json", "tokenizer.json"):
        assert (folder / "converted" / name).read_bytes() == (exported / name).read_bytes()
    refused = python("tools/convert.py", *convert, "--output=other", "--role=critic", folder=folder)
    assert refused.only_error() == f"error: --role: runs/whole/checkpoints/step-{STEPS} has no critic, only actor"


def test_a_killed_run_goes_on_to_the_last_bit(
    folder: Path, whole: dict[int, dict[str, float]], train: Callable[..., Finished]
) -> None:
    run = folder / "runs" / "killed"
    with torchrun(2, TRAIN, "grpo.yaml", "name=killed", folder=folder) as command:
        wait_for(command, (run / "checkpoints" / "step-2" / "manifest.json").exists)
        command.rank(1).kill()
        assert command.finish().status != 0
    # And the newest checkpoint is damaged besides: the run must take the one before.
    newest = max((path for path in (run / "checkpoints").glob("step-?")), key=lambda path: path.name)
    tensors = newest / "rank-00001.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-8])
    # What is left goes on with memory that leaves the device, or streams through it, which is no part of the state.
    everything = "{parameters: true, gradients: true, optimizer: true, streamed_optimizer: 0.5}"
    finished = train("name=killed", f"actor.offload={everything}", "reference.offload={parameters: true}")
    before = f"step-{int(newest.name[-1]) - 1}"
    assert f"{newest}/rank-00001.safetensors: has ".removeprefix(f"{folder}/") in finished.out
    assert f"resuming from runs/killed/checkpoints/{before}, after step {before[-1]}" in finished.out
    assert metrics_of(run) == whole
    assert "\n  actor.offload.streamed_optimizer: 0.0 -> 0.5\n" in finished.out
    resumed = next(line for line in decisions(run) if line["what"] == "resume")
    assert resumed["changed"] == {
        **{f"actor.offload.{name}": [False, True] for name in ("parameters", "gradients", "optimizer")},
        "actor.offload.streamed_optimizer": [0.0, 0.5],
        "reference.offload.parameters": [False, True],
    }
    earlier = yaml.safe_load((run / f"recipe.until-{before}.yaml").read_text())
    assert earlier["actor"]["offload"]["streamed_optimizer"] == 0.0
    rows = [line.split()[0] for line in finished.out.splitlines() if re.match(" +[0-9]+  ", line)]
    assert list(dict.fromkeys(rows)) == [str(step) for step in range(1, STEPS + 1)], (
        "those of before stand above the new ones"
    )
    assert "Where the recipe has changed" in (run / "report.html").read_text()
    exported = load_file(run / "export" / f"step-{STEPS}" / "model.safetensors")
    expected = load_file(folder / "runs" / "whole" / "export" / f"step-{STEPS}" / "model.safetensors")
    assert all((exported[name] == expected[name]).all() for name in expected)


def lives(run: Path) -> int:
    """Return how often a run has begun or gone on."""
    return sum(line["what"] in ("start", "resume") for line in decisions(run))


@pytest.mark.parametrize("kills", [4, pytest.param(10, marks=pytest.mark.grid)])
def test_a_run_killed_at_random_moments_is_the_same_to_the_last_bit(kills: int, folder: Path) -> None:
    whole, run = (folder / "runs" / f"{name}-{kills}" for name in ("ppo", "often_killed"))
    steps_before_kills, steps = KILLS[kills]
    with torchrun(2, TRAIN, "ppo.yaml", f"name={whole.name}", f"steps={steps}", folder=folder) as command:
        command.finish().check()
    expected = metrics_of(whole)
    assert any(record["rollout/groups_carried_over"] for record in expected.values())
    times = [step.get("train/step_time_ms", 0.0) / 1e3 for step in steps_of(whole).values()]

    seed = time.time_ns()
    random, moments = Random(seed), []
    for further in random.sample(steps_before_kills, kills):
        before = lives(run)
        with torchrun(2, TRAIN, "ppo.yaml", f"name={run.name}", f"steps={steps}", folder=folder) as command:
            wait_for(command, lambda before=before: lives(run) > before)
            last = logged(run) + further
            wait_for(command, lambda last=last: logged(run) >= last)
            moment = time.time() + random.uniform(0.0, statistics.mean(times))
            wait_for(command, lambda last=last, moment=moment: time.time() > moment or logged(run) > last)
            for victim in command.family() if random.random() < 0.5 else [command.rank(random.randrange(2))]:
                victim.kill()
            assert command.finish().status != 0
        moments.append(max(steps_of(run), default=0))
    with torchrun(2, TRAIN, "ppo.yaml", f"name={run.name}", f"steps={steps}", folder=folder) as command:
        command.finish().check()
    told = f"seed {seed}, killed after steps {moments}"
    assert metrics_of(run) == expected, told
    one, other = (load_file(path / "export" / f"step-{steps}" / "model.safetensors") for path in (whole, run))
    assert all((one[name] == other[name]).all() for name in other), told


def test_another_layout_goes_on_to_rounding(
    folder: Path, whole: dict[int, dict[str, float]], train: Callable[..., Finished]
) -> None:
    # And whether the old logprobs come from the update itself or from a pass before it.
    for name, checkpoint in (("context", "whole/checkpoints/step-2"), ("pipeline", "context/checkpoints/step-3")):
        layout = ["actor.layout.tensor=1", f"actor.layout.{name}=2"]
        if name == "context":
            layout.append("algorithm.old_logprobs=recompute")
        train(f"name={name}", f"--resume=runs/{checkpoint}", *layout)
        metrics = metrics_of(folder / "runs" / name)
        assert (folder / "runs" / name / f"recipe.until-{checkpoint[-6:]}.yaml").exists(), "of the run before"
        assert sorted(metrics) == list(range(int(checkpoint[-1]) + 1, STEPS + 1))
        for step, found in metrics.items():
            assert of_any_layout(found) == pytest.approx(of_any_layout(whole[step]), rel=1e-3, abs=1e-6)


def test_roles_on_ranks_of_their_own_go_on_and_back(folder: Path) -> None:
    """From all roles on both ranks to actor and reference on one and the critic on the other, and back again."""
    apart = ["actor.ranks=0", "actor.layout.tensor=1", "reference.ranks=0", "critic.ranks=1", "critic.layout.data=1"]
    start = (
        "steps=3",
        "critic.warmup_steps=1",
        "model.dtype=float32",
        "critic.dtype=null",
        "critic.optimizer.master_remainders=false",
        "evaluation.interval=3",
        "checkpoint.keep_last_k=3",
    )
    found = {}
    for name, arguments in (
        ("together", []),
        ("apart", ["--resume=runs/together/checkpoints/step-1", *apart]),
        ("together_again", ["--resume=runs/apart/checkpoints/step-2"]),
    ):
        with torchrun(2, TRAIN, "ppo.yaml", f"name={name}", *start, *arguments, folder=folder) as command:
            command.finish().check()
        found[name] = metrics_of(folder / "runs" / name)
    assert [sorted(metrics) for metrics in found.values()] == [[1, 2, 3], [2, 3], [3]]
    assert found["together"][3]["critic/loss"] > 0 and found["together"][3]["train/grad_norm"] > 0
    for name in ("apart", "together_again"):
        for step, metrics in found[name].items():
            together = of_any_layout(found["together"][step])
            assert of_any_layout(metrics) == pytest.approx(together, rel=1e-3, abs=1e-6)


def test_a_checkpoint_that_is_not_there_is_told_in_one_line(folder: Path) -> None:
    with torchrun(1, TRAIN, "grpo.yaml", "actor.layout.tensor=1", "--resume=runs/no/step-1", folder=folder) as command:
        error = command.finish().only_error()
    assert error.startswith("error: --resume runs/no/step-1: runs/no/step-1/manifest.json: cannot be read")


def of_any_layout(metrics: dict[str, float]) -> dict[str, float]:
    """Return metrics without how evenly the layout's ranks share the work."""
    return {name: value for name, value in metrics.items() if "/imbalance" not in name}
