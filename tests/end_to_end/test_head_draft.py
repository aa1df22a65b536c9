"""Runs for whose policy a head in EAGLE-3's form drafts: it learns, is kept, exported, and changes no token."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from end_to_end.commands import python, torchrun
from end_to_end.runs import LENGTH_REWARD, TRAIN, make_model, make_sums, steps_of
from hugging_face import stored_tensors
from rlhf_megatron.models.architecture import read_architecture
from rlhf_megatron.models.draft_heads import read_head
from rlhf_megatron.models.draft_vocabulary import read_draft_vocabulary
from rlhf_megatron.monitor.metrics import comparable
from rlhf_megatron.rollout.vllm.process_environment import has_gpu
from small_heads import make_head

pytestmark = pytest.mark.skipif(has_gpu(), reason="the engine of this machine needs a GPU, which is hidden here")

RECIPE: dict[str, Any] = {
    "name": "eagle",
    "loop": "rl",
    "steps": 3,
    "model": {"path": "model", "dtype": "float32"},
    "data": {"train_files": ["train.parquet"], "max_prompt_length": 64},
    "batch": {"prompts_per_step": 4, "responses_per_prompt": 4, "minibatch_prompts": 2},
    "actor": {"tokens_per_gpu": 256, "layout": {"tensor": 2}, "optimizer": {"learning_rate": 1e-4}},
    "rollout": {
        "max_response_length": 12,
        "scheduling": "static",
        "speculative": {
            "method": "eagle3",
            "path": "head",
            "num_speculative_tokens": 2,
            "optimizer": {"learning_rate": 1e-3},
        },
    },
    "regather": {"verify": 2},
    "evaluation": {"at_start": False, "at_end": False},
    "reward": {"function": "reward.py"},
    "checkpoint": {"save_interval": 2},
    "monitor": {"plots": False},
}


def train(folder: Path, *keys: str) -> dict[int, dict[str, float]]:
    """Run to the end on two ranks; return the metrics of the steps."""
    with torchrun(2, TRAIN, "eagle.yaml", *keys, folder=folder) as command:
        command.finish().check()
    name = next((key.partition("=")[2] for key in keys if key.startswith("name=")), "eagle")
    return steps_of(folder / "runs" / name)


def test_a_head_that_drafts_learns_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(LENGTH_REWARD)
    (tmp_path / "eagle.yaml").write_text(yaml.safe_dump(RECIPE))
    make_model(tmp_path, 4)
    make_sums(tmp_path, 16, "--seed=1")
    target = read_architecture(tmp_path / "model")
    make_head(tmp_path / "head", tmp_path / "model", target.vocabulary // 2, (1, 2, 3))
    plan = python(TRAIN, "eagle.yaml", "--dry-run", "--world=2", folder=tmp_path).check().out
    assert "draft: tensor 2 x data 1 on the actor's last stage" in plan

    of_text = [f"rollout.speculative.{key}=null" for key in ("path", "optimizer")]
    plain = train(tmp_path, "name=plain", "rollout.speculative.method=suffix", *of_text)
    steps = train(tmp_path)
    for step, metrics in steps.items():
        assert metrics["train/rollout_logprob_abs_diff_max"] < 1e-4
        assert metrics["train/draft_skipped"] == 0 < metrics["train/draft_grad_norm"]
        assert metrics["reward/mean"] == plain[step]["reward/mean"], "drafts change no token"
        assert metrics["train/loss"] == pytest.approx(plain[step]["train/loss"], abs=1e-5)
    losses = [metrics["train/draft_loss"] for metrics in steps.values()]
    assert losses[-1] < losses[0]
    exported = tmp_path / "runs/eagle/export/step-3/draft_head"
    given, written = stored_tensors(tmp_path / "head"), stored_tensors(exported)
    assert given.keys() == written.keys()
    assert all(given[name].equal(written[name]) == (name in ("d2t", "t2d")) for name in given)
    read_draft_vocabulary(exported, read_head(exported, target))

    shutil.rmtree(tmp_path / "runs/eagle/checkpoints/step-3")
    assert comparable(train(tmp_path))[3] == comparable(steps)[3]

    drawn = train(tmp_path, "name=drawn", "steps=1", "rollout.speculative.path=null", "actor.layout.tensor=1")[1]
    assert drawn["train/draft_loss"] > 0 == drawn["train/draft_skipped"]
    head = tmp_path / "runs/drawn/export/step-1/draft_head"
    assert read_head(head, target).vocabulary == target.vocabulary and stored_tensors(head)
