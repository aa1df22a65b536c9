"""With deterministic kernels, a run on a GPU that ended half-way gives the bits of one that did not."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from end_to_end.commands import ROOT
from end_to_end.runs import LENGTH_REWARD, TRAIN, metrics_of, write_digits
from rlhf_megatron.monitor.metrics import read_records

STEPS, HALF = 4, 2
# Rows are long enough for the backward pass of attention to be split, where kernels may add in any order.
RECIPE: dict[str, Any] = {
    "name": "whole",
    "loop": "rl",
    "steps": STEPS,
    "deterministic": True,
    "model": {"path": "model", "dtype": "bfloat16"},
    "data": {"train_files": ["train.parquet"], "max_prompt_length": 224},
    "batch": {"prompts_per_step": 8, "responses_per_prompt": 8, "minibatch_prompts": 4},
    "actor": {"tokens_per_gpu": 8192, "optimizer": {"learning_rate": 1e-3, "warmup_steps": 0}},
    "reference": {"tokens_per_gpu": 8192},
    "rollout": {"max_response_length": 256, "scheduling": "static", "kv_cache_gb": 2.0},
    "algorithm": {"kl_coef": 0.01},
    "reward": {"function": "reward.py"},
    "evaluation": {"at_start": False, "at_end": False},
    "checkpoint": {"save_interval": HALF},
    "monitor": {"plots": False},
}


def command(folder: Path, *arguments: str) -> None:
    """Run a script of the repository with this Python in ``folder``; raises where it fails."""
    subprocess.run([sys.executable, "-P", *arguments], cwd=folder, check=True)


def train(folder: Path, *arguments: str) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1")
    command(folder, *torchrun, str(ROOT / TRAIN), "recipe.yaml", *arguments)


@pytest.mark.parametrize("optimizer", [{}, {"state_dtype": "bfloat16"}, {"master_remainders": True}])
def test_a_run_that_goes_on_has_the_same_bits(optimizer: dict[str, Any], tmp_path: Path) -> None:
    check_resume(tmp_path, *(f"actor.optimizer.{key}={value}" for key, value in optimizer.items()))


def check_resume(tmp_path: Path, *overrides: str) -> None:
    """Compare a run with one in two parts, both with these values of the recipe."""
    sizes = ("--layers=4", "--hidden-size=256", "--intermediate-size=512", "--heads=4", "--kv-heads=2")
    command(tmp_path, str(ROOT / "tools" / "make_tiny_model.py"), "--output=model", *sizes)
    digits = random.Random(1)
    write_digits(tmp_path, ("".join(digits.choices("0123456789", k=digits.randint(50, 180))) for _ in range(64)))
    (tmp_path / "reward.py").write_text(LENGTH_REWARD)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    train(tmp_path, *overrides)
    train(tmp_path, "name=parts", f"steps={HALF}", *overrides)
    train(tmp_path, "name=parts", *overrides)
    whole, parts = (tmp_path / "runs" / name for name in ("whole", "parts"))
    assert sorted(metrics_of(whole)) == list(range(1, STEPS + 1))
    trained = [record["step"] for record in read_records(parts / "metrics.jsonl") if "train/loss" in record]
    assert trained == list(range(1, STEPS + 1)), "no step was taken twice"
    assert metrics_of(parts) == metrics_of(whole)
    expected, found = (load_file(run / "export" / f"step-{STEPS}" / "model.safetensors") for run in (whole, parts))
    assert sorted(found) == sorted(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
