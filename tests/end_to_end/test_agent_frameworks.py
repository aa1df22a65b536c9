"""A whole run whose trajectories smolagents and verifiers play, unmodified."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from end_to_end.commands import torchrun
from end_to_end.runs import TRAIN, make_model, make_sums, metrics_of
from end_to_end.test_agents import RECIPE

pytestmark = pytest.mark.skipif(
    "AGENT_FRAMEWORKS_PYTHON" not in os.environ,
    reason="smolagents and verifiers need an older openai than vLLM: make an environment with both (pip install "
    "verifiers==0.4.0 smolagents==1.26.0) and name its Python by AGENT_FRAMEWORKS_PYTHON",
)


def test_frameworks_play_and_their_turns_are_trained(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).with_name("agent_frameworks.py"), tmp_path)
    recipe: dict[str, Any] = RECIPE | {"steps": 1, "data": RECIPE["data"] | {"max_prompt_length": 600}}
    agent = {"function": "agent_frameworks.py", "timeout_seconds": 500.0, "branches": "last"}
    recipe |= {"rollout": RECIPE["rollout"] | {"agent": agent, "max_response_length": 1200}}
    recipe |= {"actor": RECIPE["actor"] | {"tokens_per_gpu": 2048}}
    recipe |= {"batch": {"prompts_per_step": 4, "responses_per_prompt": 1}, "checkpoint": {"export_at_end": False}}
    recipe |= {"algorithm": {"advantage": "reinforce_plus_plus", "kl_coef": 0.0}}
    (tmp_path / "frameworks.yaml").write_text(yaml.safe_dump(recipe))
    make_model(tmp_path, 2, "--max-positions=2048")
    make_sums(tmp_path, 24, "--seed=1")
    with torchrun(2, TRAIN, "frameworks.yaml", folder=tmp_path) as command:
        command.finish().check()
    played = [json.loads(line) for line in (tmp_path / "frameworks.jsonl").read_text().splitlines()]
    assert {framework for framework, _ in played} == {"smolagents", "verifiers"}
    (metrics,) = metrics_of(tmp_path / "runs" / "whole").values()
    assert metrics["rollout/agent_failures"] == metrics["rollout/agent_refusals"] == 0
    assert metrics["rollout/agent_requests"] == 12
    assert metrics["train/mismatch_kl"] < 1e-9 and metrics["train/rollout_logprob_abs_diff"] < 1e-5
