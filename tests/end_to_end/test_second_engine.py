"""The whole loop over an engine that is not vLLM: weight sync, a shared queue, partial rollouts and evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from end_to_end.commands import torchrun
from end_to_end.runs import LENGTH_REWARD, make_model, make_sums, metrics_of
from rlhf_megatron.rollout.vllm.process_environment import has_gpu

pytestmark = pytest.mark.skipif(has_gpu(), reason="float32 on the CPU")

TRAIN_ON_IT = "tests/end_to_end/train_on_second_engine.py"
RECIPE: dict[str, Any] = {
    "name": "second_engine",
    "loop": "rl",
    "steps": 3,
    "model": {"path": "model", "dtype": "float32"},
    "data": {"train_files": ["train.parquet"], "validation_files": ["held_out.parquet"], "max_prompt_length": 64},
    "batch": {"prompts_per_step": 4, "responses_per_prompt": 2, "minibatch_prompts": 2},
    "actor": {"layout": {"tensor": 2}, "tokens_per_gpu": 256, "optimizer": {"learning_rate": 1e-2}},
    "rollout": {"max_response_length": 10, "partial": "resume"},
    "regather": {"verify": 1},
    "algorithm": {"old_logprobs": "recompute", "rollout_correction": {"type": "tis"}},
    "reward": {"function": "reward.py"},
    "evaluation": {"interval": 2, "at_start": False},
    "checkpoint": {"save_interval": 2, "export_at_end": False},
    "monitor": {"plots": False},
}


def test_a_run_learns_from_what_another_engine_generates(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(LENGTH_REWARD)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    make_model(tmp_path, layers=2)
    make_sums(tmp_path, 6, "--seed=9", name="held_out")
    make_sums(tmp_path, 40, "--exclude=held_out.parquet")
    with torchrun(2, TRAIN_ON_IT, "recipe.yaml", folder=tmp_path) as command:
        command.finish().check()
    found = metrics_of(tmp_path / "runs" / "second_engine")
    assert sorted(found) == [1, 2, 3]
    # How far the engine is ahead of a step, and so what each later step samples and teaches, is a matter of timing.
    assert found[1]["rollout/sampled_tokens"] > 0 and found[1]["train/grad_norm"] > 0
    assert all(metrics["rollout/response_length_mean"] > 0 for metrics in found.values())
    # Of weights that were brought in just before: the trainer computes the same logprobs in its own layout.
    assert found[1]["train/rollout_logprob_abs_diff"] < 1e-4
    assert any(name.startswith("eval/") for name in found[2])
