"""Whole runs whose rollout reads the actor's memory, beside runs with copies: every metric is the same.

And one whose rollout multiplies in 8 bits, beside these.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from end_to_end.commands import torchrun
from end_to_end.runs import LENGTH_REWARD, TRAIN, make_model, make_sums, metrics_of
from rlhf_megatron.rollout.vllm.process_environment import has_gpu

pytestmark = pytest.mark.skipif(has_gpu(), reason="the engine of this machine needs a GPU, which is hidden here")

RECIPE: dict[str, Any] = {
    "loop": "rl",
    "steps": 3,
    "model": {"path": "model", "dtype": "float32"},
    "data": {"train_files": ["train.parquet"], "max_prompt_length": 64},
    "batch": {"prompts_per_step": 4, "responses_per_prompt": 4, "minibatch_prompts": 2},
    "actor": {"layout": {"tensor": 2}, "tokens_per_gpu": 256, "optimizer": {"learning_rate": 1e-3}},
    "rollout": {"max_response_length": 12, "layout": {"tensor": 2}},
    "regather": {"verify": 1},
    "reward": {"function": "reward.py"},
    "evaluation": {"at_start": False, "at_end": False},
    "checkpoint": {"export_at_end": False},
    "monitor": {"plots": False},
}
RUNS = {
    # Memory that comes and goes around the weights leaves them where they are.
    "shared": (("actor.offload={gradients: true, optimizer: true}",), " are the actor's own memory"),
    "never": (("rollout.share_weights=never",), "all are copies, since rollout.share_weights is never"),
    "offloaded": (
        ("actor.offload.parameters=true",),
        "all are copies, since actor.offload.parameters takes the actor's off the GPU",
    ),
    "fp8": (
        ("rollout.quantization=fp8", "algorithm.rollout_correction={type: tis, level: sequence}"),
        " are the actor's own memory",
    ),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, dict[int, dict[str, float]]]]:
    """Return what each run said, and its metrics by step. The first is started as a person starts it."""
    folder: Path = tmp_path_factory.mktemp("shared")
    (folder / "reward.py").write_text(LENGTH_REWARD)
    make_model(folder, 2)
    make_sums(folder, 24, "--seed=1")
    found = {}
    for name, (overrides, _) in RUNS.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(RECIPE | {"name": name}))
        with torchrun(2, TRAIN, f"{name}.yaml", *overrides, folder=folder, warm=bool(found)) as command:
            finished = command.finish().check()
        found[name] = finished.out + finished.err, metrics_of(folder / "runs" / name)
    return found


@pytest.mark.parametrize("name", RUNS)
def test_a_run_says_what_it_shares(name: str, runs: dict[str, tuple[str, dict[int, dict[str, float]]]]) -> None:
    said = " ".join(runs[name][0].split()).partition("rollout weights: ")[2]
    assert RUNS[name][1] in said[:200]
    if name == "shared":
        count, total = said.split()[0], said.split()[2]
        assert count == total, "in equal layouts it is all of them"


def test_a_run_shows_no_warnings(runs: dict[str, tuple[str, dict[int, dict[str, float]]]]) -> None:
    said = runs["shared"][0]
    assert "Warning" not in said and "WARNING" not in said, said


def test_a_run_that_shares_weights_is_the_same_to_the_bit(
    runs: dict[str, tuple[str, dict[int, dict[str, float]]]],
) -> None:
    steps = {name: metrics for name, (_, metrics) in runs.items()}
    assert sorted(steps["shared"]) == [1, 2, 3]
    assert all(metrics["train/grad_norm"] > 0 for metrics in steps["shared"].values())
    assert steps["shared"] == steps["never"] == steps["offloaded"]


def test_the_mismatch_of_8_bits_is_told_and_corrected(runs: dict[str, tuple[str, dict[int, dict[str, float]]]]) -> None:
    in_full, quantized = runs["shared"][1], runs["fp8"][1]
    for step, metrics in quantized.items():
        assert metrics["train/rollout_logprob_abs_diff_median"] > 1e-4
        assert in_full[step]["train/rollout_logprob_abs_diff_median"] < 1e-5
        assert abs(metrics["train/correction_weight_max"] - 1) > 1e-3
