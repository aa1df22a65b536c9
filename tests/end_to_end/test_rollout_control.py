"""Over-sampling in whole runs: what is given up waits, survives a kill, and no prompt is lost or trained on twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from end_to_end.commands import torchrun
from end_to_end.runs import LENGTH_REWARD, TRAIN, logged, make_model, make_sums, metrics_of, wait_for
from rlhf_megatron.rollout.vllm.process_environment import has_gpu

pytestmark = pytest.mark.skipif(has_gpu(), reason="the engine of this machine needs a GPU, which is hidden here")

STEPS, PROMPTS, ROWS = 4, 4, 40
RECIPE: dict[str, Any] = {
    "name": "whole",
    "loop": "rl",
    "steps": STEPS,
    "model": {"path": "model", "dtype": "float32"},
    "data": {"train_files": ["train.parquet"], "max_prompt_length": 64},
    "batch": {"prompts_per_step": PROMPTS, "responses_per_prompt": 3},
    "actor": {"tokens_per_gpu": 512, "optimizer": {"learning_rate": 1e-3}},
    "rollout": {"max_response_length": 60, "max_num_seqs": 8, "oversample": 1.75, "partial": "resume"},
    "algorithm": {"rollout_correction": {"type": "tis"}},
    "reward": {"function": "reward.py"},
    "evaluation": {"at_start": False, "at_end": False},
    "checkpoint": {"save_interval": 2},
    "monitor": {"plots": False},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with random weights, whose answers end at random, and data."""
    path = tmp_path_factory.mktemp("control")
    (path / "reward.py").write_text(LENGTH_REWARD)
    (path / "grpo.yaml").write_text(yaml.safe_dump(RECIPE))
    make_model(path, layers=2)
    make_sums(path, ROWS)
    return path


def check_prompts(metrics: dict[int, dict[str, float]]) -> None:
    """Check that every prompt that was drawn has been trained on or waits."""
    for step, found in metrics.items():
        assert found["data/epoch"] * ROWS == pytest.approx(PROMPTS * step + found["rollout/groups_waiting"])
        assert found["rollout/groups_waiting"] == 3


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.grid)])
def test_a_killed_run_goes_on_with_the_groups_that_wait(folder: Path, replicas: int) -> None:
    """One replica of two ranks, whose cache says how many groups it runs; or two with fixed shares."""
    cache = ("rollout.kv_cache_gb=0.0003", "rollout.max_num_seqs=24")
    layouts = {1: ("rollout.layout.tensor=2", "actor.layout.tensor=2", *cache), 2: ("rollout.scheduling=static",)}
    recipe = ("grpo.yaml", *layouts[replicas])
    whole, killed = (folder / "runs" / f"{name}{replicas}" for name in ("whole", "killed"))
    with torchrun(2, TRAIN, *recipe, f"name={whole.name}", folder=folder) as command:
        command.finish().check()
    metrics = metrics_of(whole)
    check_prompts(metrics)
    assert all(found["rollout/paused"] and not found["rollout/aborted"] for found in metrics.values())
    assert sum(found["rollout/resumed"] for found in metrics.values()) > 0
    assert metrics[1]["rollout/staleness_max"] == 0
    assert max(found["rollout/staleness_max"] for found in metrics.values()) == 1
    with torchrun(2, TRAIN, *recipe, f"name={killed.name}", folder=folder) as command:
        wait_for(command, lambda: (killed / "checkpoints" / "step-2" / "manifest.json").exists() or logged(killed) > 3)
        command.rank(1).kill()
        assert command.finish().status != 0
    with torchrun(2, TRAIN, *recipe, f"name={killed.name}", folder=folder) as command:
        assert f"resuming from runs/{killed.name}/checkpoints/step-" in command.finish().check().out
    assert metrics_of(killed) == metrics
    one, other = (load_file(run / "export/step-4/model.safetensors") for run in (whole, killed))
    assert all((one[name] == other[name]).all() for name in one)


@pytest.mark.parametrize("partial", ["resume", "discard"])
def test_replicas_stop_together_when_enough_is_done(folder: Path, partial: str) -> None:
    overrides = (f"name={partial}", f"rollout.partial={partial}", "steps=3", "checkpoint.save_interval=0")
    with torchrun(2, TRAIN, "grpo.yaml", *overrides, folder=folder) as command:
        command.finish().check()
    metrics = metrics_of(folder / "runs" / partial)
    assert sorted(metrics) == [1, 2, 3]
    check_prompts(metrics)
    given_up = "rollout/aborted" if partial == "discard" else "rollout/paused"
    assert sum(found[given_up] for found in metrics.values()) > 0
    if partial == "discard":
        assert all(found["rollout/resumed"] == found["rollout/staleness_max"] == 0 for found in metrics.values())
    else:
        assert sum(found["rollout/resumed"] for found in metrics.values()) > 0
        assert metrics[1]["rollout/staleness_max"] == 0
