"""Runs whose policy's layer for multi-token prediction drafts: it learns, is kept, exported, and changes no token."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from end_to_end.commands import python
from end_to_end.draft_runs import train, write_recipe
from end_to_end.runs import TRAIN, make_model, make_sums
from hugging_face import load_model, stored_tensors
from rlhf_megatron.monitor.metrics import comparable
from rlhf_megatron.rollout.vllm.process_environment import has_gpu
from small_predictions import make_predicting_model

pytestmark = pytest.mark.skipif(has_gpu(), reason="the engine of this machine needs a GPU, which is hidden here")


def make_files(folder: Path, family: str) -> None:
    """Write a model with a prediction layer, its data, a reward and the recipe."""
    write_recipe(folder, "mtp", 4, method="mtp")
    make_model(folder, layers=1, name="small")  # for its tokenizer
    vocabulary = len(load_model(folder / "small").get_input_embeddings().weight)
    # Of sizes that vLLM's attention has.
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64}
    sizes = {"hidden_size": 128, **({"head_dim": 32} if family == "glm4_moe" else latent)}
    make_predicting_model(folder / "model", family, layers=2, tied=False, vocabulary=vocabulary, **sizes)
    for file in (folder / "small").iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copy(file, folder / "model" / file.name)
    make_sums(folder, 16, "--seed=1")


def test_a_layer_that_drafts_learns_and_changes_nothing(tmp_path: Path) -> None:
    make_files(tmp_path, "glm4_moe")
    plan = python(TRAIN, "mtp.yaml", "--dry-run", "--world=2", folder=tmp_path).check().out
    assert "draft: tensor 2 x data 1 on the actor's last stage" in plan
    of_text = ("rollout.speculative.method=suffix", "rollout.speculative.optimizer=null")
    steps, plain = train(tmp_path, "mtp"), train(tmp_path, "mtp", "name=plain", *of_text)
    for step, metrics in steps.items():
        assert metrics["train/rollout_logprob_abs_diff_max"] < 1e-4
        assert metrics["train/draft_skipped"] == 0 < metrics["train/draft_grad_norm"]
        assert metrics["reward/mean"] == plain[step]["reward/mean"], "drafts change no token"
        assert metrics["train/loss"] == pytest.approx(plain[step]["train/loss"], abs=1e-5)
    losses = [metrics["train/draft_loss"] for metrics in steps.values()]
    assert losses[-1] < losses[0]
    given, exported = stored_tensors(tmp_path / "model"), stored_tensors(tmp_path / "runs/mtp/export/step-4")
    assert exported.keys() == given.keys()
    layer = {name for name in given if name.startswith("model.layers.2.")}
    assert {name for name in layer if not exported[name].equal(given[name])} >= {
        "model.layers.2.eh_proj.weight", "model.layers.2.shared_head.norm.weight",
    }  # fmt: skip

    shutil.rmtree(tmp_path / "runs/mtp/checkpoints/step-4")
    resumed = train(tmp_path, "mtp")
    assert comparable(resumed)[4] == comparable(steps)[4]


@pytest.mark.grid
def test_a_layer_that_stands_still_is_beside_the_last_of_several_stages(tmp_path: Path) -> None:
    make_files(tmp_path, "deepseek_v3")
    keys = ("steps=1", "rollout.speculative.optimizer=null", "actor.layout.tensor=1", "actor.layout.pipeline=2")
    plan = python(TRAIN, "mtp.yaml", *keys, "--dry-run", "--world=2", folder=tmp_path).check().out
    assert "draft: tensor 1 x data 1 on the actor's last stage" in plan
    metrics = train(tmp_path, "mtp", *keys)[1]
    assert metrics["train/rollout_logprob_abs_diff_max"] < 1e-4 and "train/draft_loss" not in metrics
    given, exported = stored_tensors(tmp_path / "model"), stored_tensors(tmp_path / "runs/mtp/export/step-1")
    layer = {name for name in given if name.startswith("model.layers.2.")}
    assert exported.keys() == given.keys() and all(exported[name].equal(given[name]) for name in layer)
