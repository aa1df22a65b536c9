"""Runs for whose policy a head in EAGLE-3's form drafts: it learns, is kept, exported, and changes no token."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from end_to_end.commands import python
from end_to_end.draft_runs import train, write_recipe
from end_to_end.runs import TRAIN, make_model, make_sums
from hugging_face import stored_tensors
from rlhf_megatron.models.architecture import read_architecture
from rlhf_megatron.models.draft_heads import read_head
from rlhf_megatron.models.draft_vocabulary import read_draft_vocabulary
from rlhf_megatron.monitor.metrics import comparable
from rlhf_megatron.rollout.vllm.process_environment import has_gpu
from small_heads import make_head

pytestmark = pytest.mark.skipif(has_gpu(), reason="the engine of this machine needs a GPU, which is hidden here")


def test_a_head_that_drafts_learns_and_changes_nothing(tmp_path: Path) -> None:
    write_recipe(tmp_path, "eagle", 3, method="eagle3", path="head")
    make_model(tmp_path, 4)
    make_sums(tmp_path, 16, "--seed=1")
    target = read_architecture(tmp_path / "model")
    make_head(tmp_path / "head", tmp_path / "model", target.vocabulary // 2, (1, 2, 3))
    plan = python(TRAIN, "eagle.yaml", "--dry-run", "--world=2", folder=tmp_path).check().out
    assert "draft: tensor 2 x data 1 on the actor's last stage" in plan

    of_text = [f"rollout.speculative.{key}=null" for key in ("path", "optimizer")]
    plain = train(tmp_path, "eagle", "name=plain", "rollout.speculative.method=suffix", *of_text)
    steps = train(tmp_path, "eagle")
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
    assert comparable(train(tmp_path, "eagle"))[3] == comparable(steps)[3]

    keys = ("name=drawn", "steps=1", "rollout.speculative.path=null", "actor.layout.tensor=1")
    drawn = train(tmp_path, "eagle", *keys)[1]
    assert drawn["train/draft_loss"] > 0 == drawn["train/draft_skipped"]
    head = tmp_path / "runs/drawn/export/step-1/draft_head"
    assert read_head(head, target).vocabulary == target.vocabulary and stored_tensors(head)
