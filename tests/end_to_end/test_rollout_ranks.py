"""Rollout on GPUs of its own: the run is the same; a step ahead of learning, each batch is of the policy before."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import yaml

from end_to_end.commands import torchrun
from end_to_end.runs import LENGTH_REWARD, TRAIN, make_model, make_sums, metrics_of, steps_of, wait_for
from hugging_face import make_model as make_hugging_face_model
from rlhf_megatron.rollout.vllm.process_environment import has_gpu

pytestmark = pytest.mark.skipif(has_gpu(), reason="the engine of this machine needs a GPU, which is hidden here")

STEPS, WARMUP = 4, 2
RECIPE: dict[str, Any] = {
    "name": "together",
    "loop": "rl",
    "steps": STEPS,
    "deterministic": True,
    "model": {"path": "model", "dtype": "float32"},
    "data": {"train_files": ["train.parquet"], "validation_files": ["held_out.parquet"], "max_prompt_length": 64},
    "batch": {"prompts_per_step": 4, "responses_per_prompt": 2, "minibatch_prompts": 2},
    "actor": {"tokens_per_gpu": 256, "optimizer": {"learning_rate": 1e-2}},
    "reference": {"tokens_per_gpu": 256},
    # While it warms up alone, the actor stays the policy that answered, however long ago that was.
    "critic": {"tokens_per_gpu": 256, "optimizer": {"learning_rate": 1e-3}, "warmup_steps": WARMUP},
    "reward_model": {"path": "judge", "tokens_per_gpu": 256},
    "rollout": {"max_response_length": 10, "scheduling": "static"},
    "regather": {"verify": 1},
    "algorithm": {
        "advantage": "gae",
        "kl_coef": 0.01,
        "kl_placement": "reward",
        "kl_controller": {"type": "adaptive", "target": 0.1, "horizon": 100},
        "rollout_correction": {"type": "tis"},
    },
    "reward": {"function": "reward.py"},
    "evaluation": {"interval": 2, "at_start": False},
    "checkpoint": {"save_interval": 1, "keep_last_k": STEPS, "export_at_end": False},
    "monitor": {"plots": False, "timeline": {"every": 1}, "rollouts": {"every": 1}},
}
APART = ("actor.ranks=0", "reference.ranks=0", "critic.ranks=0")
AHEAD = (*APART, "rollout.ranks=1", "reward_model.ranks=1", "rollout.steps_ahead=1")
# How evenly ranks share the work, and how long ago the batch was generated.
_OF_PLACEMENT = ("imbalance", "staleness", "weight_version")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a policy and a reward model with random weights, and data."""
    path = tmp_path_factory.mktemp("rollout_ranks")
    (path / "reward.py").write_text(LENGTH_REWARD)
    (path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    make_model(path, layers=2)
    vocabulary = json.loads((path / "model" / "config.json").read_text())["vocab_size"]
    make_hugging_face_model(path / "judge", classifier=True, vocabulary=vocabulary)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(path / "model" / name, path / "judge")
    make_sums(path, 6, "--seed=9", name="held_out")
    make_sums(path, 40, "--exclude=held_out.parquet")
    return path


@pytest.fixture(scope="module")
def together(folder: Path) -> dict[int, dict[str, float]]:
    """Return the run whose two ranks both do everything."""
    with torchrun(2, TRAIN, "recipe.yaml", folder=folder) as command:
        command.finish().check()
    return metrics_of(folder / "runs" / "together")


@pytest.fixture(scope="module")
def ahead(folder: Path) -> dict[int, dict[str, float]]:
    """Return the run of which one rank learns and the other generates, at the same time."""
    with torchrun(2, TRAIN, "recipe.yaml", "name=ahead", *AHEAD, folder=folder) as command:
        command.finish().check()
    return metrics_of(folder / "runs" / "ahead")


def of_any_placement(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not any(part in name for part in _OF_PLACEMENT)}


def test_ranks_of_its_own_change_nothing_but_rounding(folder: Path, together: dict[int, dict[str, float]]) -> None:
    """One rank learns, a replica of two generates and judges with it; vLLM's world is smaller than the run's."""
    rollout = ("rollout.ranks=1-2", "rollout.layout.tensor=2", "steps=3")
    with torchrun(3, TRAIN, "recipe.yaml", "name=apart", *APART, *rollout, folder=folder) as command:
        command.finish().check()
    found = metrics_of(folder / "runs" / "apart")
    assert sorted(found) == [1, 2, 3]
    for step, metrics in found.items():
        same = {name: value for name, value in together[step].items() if step != 3 or not name.startswith("eval/")}
        assert of_any_placement(metrics) == pytest.approx(
            of_any_placement(same) | {name: value for name, value in metrics.items() if name.startswith("eval/")},
            rel=1e-3,
            abs=1e-5,
        )


def test_each_batch_is_of_the_policy_before(
    together: dict[int, dict[str, float]], ahead: dict[int, dict[str, float]]
) -> None:
    assert [ahead[step]["rollout/staleness_mean"] for step in range(1, STEPS + 1)] == [0, 1, 1, 1]
    # The actor learns first in step 3, whose batch and the next one were begun before.
    for step in range(1, WARMUP + 2):
        assert of_any_placement(ahead[step]) == pytest.approx(of_any_placement(together[step]), rel=1e-3, abs=1e-5)
    last = WARMUP + 2
    assert together[last]["train/mismatch_kl"] < 1e-9 < 1e-6 < ahead[last]["train/mismatch_kl"]
    assert ahead[last]["train/correction_weight_mean"] != pytest.approx(1.0, abs=1e-4)


def test_kept_rows_have_what_either_team_knows(folder: Path, ahead: dict[int, dict[str, float]]) -> None:
    for step in ahead:
        rows = pyarrow.parquet.read_table(folder / "runs" / "ahead" / "rollouts" / f"step-{step}.parquet").to_pylist()
        assert rows and all(row["data_source"] and row["advantages"] is not None for row in rows)
        differences = [abs(value) for row in rows for value in row["logprob_differences"] or ()]
        assert (differences and max(differences) < 1e-4) or step > WARMUP + 1, "one policy until the actor has learned"


def test_generating_and_learning_overlap(folder: Path, ahead: dict[int, dict[str, float]]) -> None:
    events = json.loads((folder / "runs" / "ahead" / "timeline" / "step-3.json").read_text())["traceEvents"]
    spans = [
        {event["name"]: event for event in events if event["ph"] == "X" and event["pid"] == rank} for rank in (0, 1)
    ]
    assert "generate" not in spans[0] and "update" not in spans[1]
    update_ends, generation_begins = spans[0]["update"]["ts"] + spans[0]["update"]["dur"], spans[1]["generate"]["ts"]
    assert generation_begins < update_ends, "the next batch waits for the update"
    step = steps_of(folder / "runs" / "ahead")[3]
    assert {"time/generate", "time/update", "time/wait_for_rollout", "time/wait_for_update"} <= set(step)
    assert "time/generate" not in steps_of(folder / "runs" / "ahead")[STEPS], "nothing follows"


def test_a_killed_run_goes_on_with_the_batch_that_was_ready(folder: Path, ahead: dict[int, dict[str, float]]) -> None:
    run = folder / "runs" / "killed"
    with torchrun(2, TRAIN, "recipe.yaml", "name=killed", *AHEAD, folder=folder) as command:
        wait_for(command, (run / "checkpoints" / "step-2" / "manifest.json").exists)
        command.rank(1).kill()
        assert command.finish().status != 0
    for later in ("step-3", "step-4"):  # where the ranks were faster than the kill
        shutil.rmtree(run / "checkpoints" / later, ignore_errors=True)
    with torchrun(2, TRAIN, "recipe.yaml", "name=killed", *AHEAD, folder=folder) as command:
        finished = command.finish().check()
    assert "after step 2" in finished.out
    assert metrics_of(run) == ahead
