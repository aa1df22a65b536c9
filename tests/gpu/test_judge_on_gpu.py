"""A judge beside the policy's engine on one GPU: what one does, CUDA graphs and sleep included, leaves the other be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from end_to_end.commands import ROOT
from end_to_end.runs import TRAIN, make_model, metrics_of, steps_of, write_digits
from parallel.ranks import run_ranks

STEPS = 4
RECIPE: dict[str, Any] = {
    "name": "judged",
    "loop": "rl",
    "steps": STEPS,
    "model": {"path": "model", "dtype": "bfloat16"},
    "data": {"train_files": ["train.parquet"], "validation_files": ["train.parquet"], "max_prompt_length": 64},
    "batch": {"prompts_per_step": 16, "responses_per_prompt": 4},
    # The policy stays the same: so must the verdicts on its answers.
    "actor": {"tokens_per_gpu": 8192, "optimizer": {"learning_rate": 1e-12, "weight_decay": 0.0}},
    "rollout": {"max_response_length": 64, "gpu_memory_utilization": 0.4, "scheduling": "static"},
    "judge": {
        "path": "judge",
        "prompt": "{question} {response} {ground_truth}",
        "verdict": "([0-9])",
        "score_range": [0, 9],
        "unparsable_score": -1.0,
        "max_prompt_length": 400,
        "max_response_length": 48,
        "temperature": 1.0,
        "kv_cache_gb": 1.0,
    },
    "algorithm": {"kl_coef": 0.0},
    "reward": {"rule": "none"},
    "evaluation": {"interval": 1, "at_start": True},
    "checkpoint": {"export_at_end": False},
    "monitor": {"plots": False},
}


def test_verdicts_stay_the_same_while_the_policys_engine_sleeps_and_wakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    make_model(tmp_path, 4)
    make_model(tmp_path, 4, "--seed=10", "--untied-embeddings", name="judge")
    write_digits(tmp_path, (" ".join(str(number)) for number in range(1000, 1064)))
    monkeypatch.chdir(tmp_path)
    run_ranks(ROOT / TRAIN, 1, ["recipe.yaml"], timeout=500.0)
    scores = [steps_of(tmp_path / "runs" / "judged")[step]["eval/digits/score"] for step in range(STEPS + 1)]
    assert scores[0] > -1.0 and scores == [pytest.approx(scores[0], abs=1e-6)] * (STEPS + 1)
    found = metrics_of(tmp_path / "runs" / "judged")
    assert found[1]["train/rollout_logprob_abs_diff"] < 1e-2, "the policy's engine has the actor's weights"
    assert found[STEPS]["train/rollout_logprob_abs_diff"] < 1e-2
    assert 0 < found[1]["judge/unparsable_fraction"] < 1
