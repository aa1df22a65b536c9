"""Whole runs that learn adapters: the reference is the model without them, and a killed run goes on to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file

from end_to_end.commands import Finished, python, torchrun
from end_to_end.runs import LENGTH_REWARD, TRAIN, logged, make_model, make_sums, metrics_of, on_two_ranks, wait_for
from hugging_face import load_model, row_logits
from rlhf_megatron.rollout.vllm.process_environment import has_gpu

pytestmark = pytest.mark.skipif(has_gpu(), reason="the engine of this machine needs a GPU, which is hidden here")

STEPS = 4
RECIPE: dict[str, Any] = {
    "name": "whole",
    "loop": "rl",
    "steps": STEPS,
    "deterministic": True,
    "model": {"path": "model", "dtype": "float32"},
    "data": {"train_files": ["train.parquet"], "max_prompt_length": 64},
    "batch": {"prompts_per_step": 4, "responses_per_prompt": 4, "minibatch_prompts": 2},
    "actor": {
        "layout": {"tensor": 2},
        "tokens_per_gpu": 256,
        "lora": {"rank": 4, "alpha": 8},
        "optimizer": {"learning_rate": 1e-2},
    },
    "rollout": {"max_response_length": 10, "scheduling": "static", "layout": {"tensor": 2}},
    "regather": {"verify": 1},
    "algorithm": {"kl_coef": 0.01},
    "reward": {"function": "reward.py"},
    "evaluation": {"at_start": False, "at_end": False},
    "checkpoint": {"save_interval": 1, "keep_last_k": 2},
    "monitor": {"plots": False},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapters")
    (path / "reward.py").write_text(LENGTH_REWARD)
    (path / "lora.yaml").write_text(yaml.safe_dump(RECIPE))
    make_model(path, layers=2)
    make_sums(path, 32, "--seed=1")
    return path


@pytest.fixture(scope="module")
def train(folder: Path) -> Callable[..., Finished]:
    return on_two_ranks(folder, "lora.yaml")


@pytest.fixture(scope="module")
def whole(folder: Path, train: Callable[..., Finished]) -> dict[int, dict[str, float]]:
    """Return the run that nobody kills."""
    finished = train().check()
    said = " ".join((finished.out + finished.err).split()).partition("rollout weights: ")[2].split()
    assert said[0] == said[2], "the rollout has the merged weights as they are, in the actor's memory"
    return metrics_of(folder / "runs" / "whole")


def test_the_reference_is_the_model_without_adapters(whole: dict[int, dict[str, float]]) -> None:
    assert sorted(whole) == [1, 2, 3, 4]
    # The first of two updates has a policy that is the reference, the second one no more.
    assert 0 < whole[1]["train/kl"] < whole[2]["train/kl"] < whole[4]["train/kl"]
    for metrics in whole.values():
        assert metrics["train/mismatch_kl"] < 1e-9
        assert metrics["train/rollout_logprob_abs_diff"] < 1e-5


def test_a_killed_run_goes_on_to_the_last_bit(
    folder: Path, whole: dict[int, dict[str, float]], train: Callable[..., Finished]
) -> None:
    with torchrun(2, TRAIN, "lora.yaml", "name=killed", folder=folder) as command:
        wait_for(command, lambda: logged(folder / "runs" / "killed") >= 2)
        command.rank(1).kill()
        command.finish()
    train("name=killed").check()
    assert metrics_of(folder / "runs" / "killed") == whole


def test_other_layouts_change_nothing_but_rounding(
    folder: Path, whole: dict[int, dict[str, float]], train: Callable[..., Finished]
) -> None:
    overrides = ("actor.layout={tensor: 1, pipeline: 2}", "rollout.layout.tensor=1", "actor.lora.offload_base=true")
    train("name=other", *overrides).check()
    other = metrics_of(folder / "runs" / "other")
    for step, metrics in whole.items():
        for name in ("reward/mean", "train/loss", "train/kl", "train/grad_norm", "rollout/response_length_mean"):
            assert other[step][name] == pytest.approx(metrics[name], rel=1e-3, abs=1e-6), (step, name)


def test_what_is_exported_is_peft_s_adapter_and_the_merged_model(
    folder: Path, whole: dict[int, dict[str, float]]
) -> None:
    exported = folder / "runs" / "whole" / "export" / f"step-{STEPS}"
    merged, row = load_model(exported), ([5, 7, 11], [13, 17, 19, 23])
    adapted = PeftModel.from_pretrained(load_model(folder / "model"), exported / "adapter")
    with torch.no_grad():
        difference = row_logits(merged, *row) - row_logits(adapted, *row)
        trained = row_logits(merged, *row) - row_logits(load_model(folder / "model"), *row)
    assert difference.abs().max() < 1e-4 < 1e-2 < trained.abs().max()


def test_a_checkpoint_is_the_adapters_and_becomes_one_of_peft_s(
    folder: Path, whole: dict[int, dict[str, float]]
) -> None:
    checkpoint = folder / "runs" / "whole" / "checkpoints" / f"step-{STEPS}"
    weights = [name for file in checkpoint.glob("*.safetensors") for name in load_file(file) if "/weights/" in name]
    assert weights and all("lora_" in name for name in weights)
    command = ("checkpoint-to-hf", f"--input={checkpoint}", "--output=converted", "--dtype=float32")
    python("tools/convert.py", *command, folder=folder).check()
    found = load_file(folder / "converted" / "adapter_model.safetensors")
    exported = load_file(folder / "runs/whole/export" / f"step-{STEPS}" / "adapter" / "adapter_model.safetensors")
    assert found.keys() == exported.keys() and all(torch.equal(found[name], exported[name]) for name in found)


def test_a_run_starts_from_an_adapter(
    folder: Path, whole: dict[int, dict[str, float]], train: Callable[..., Finished]
) -> None:
    adapter = f"runs/whole/export/step-{STEPS}/adapter"
    train("name=second", "steps=1", f"actor.lora.path={adapter}", "checkpoint.export_at_end=false").check()
    second = metrics_of(folder / "runs" / "second")
    assert second[1]["train/kl"] > 10 * whole[1]["train/kl"], "the reference is the model without any adapter"
    assert second[1]["train/mismatch_kl"] < 1e-9
    refused = train("name=third", f"actor.lora={{rank: 2, path: {adapter}}}")
    assert "rank 4 and scale 2, but actor.lora has rank 2 and scale 1" in refused.only_error()


def test_adapters_of_another_model_are_refused(
    folder: Path, whole: dict[int, dict[str, float]], train: Callable[..., Finished]
) -> None:
    make_model(folder, 2, "--seed=7", name="other")
    assert "belong to other weights than those of model.path" in train("model.path=other", "steps=5").only_error()


EXPERTS = ("model.path=mixture", "actor.layout={tensor: 1, expert: 2}", "rollout.layout.tensor=1")


@pytest.fixture(scope="module")
def of_experts(folder: Path, train: Callable[..., Finished]) -> dict[int, dict[str, float]]:
    """Return a run that nobody kills, of a mixture with adapters on its experts too, over two ranks."""
    make_model(folder, 2, "--experts=4", "--expert-size=32", name="mixture")
    train(*EXPERTS, "name=experts").check()
    return metrics_of(folder / "runs" / "experts")


@pytest.mark.grid
def test_a_mixture_goes_on_to_the_last_bit(
    folder: Path, of_experts: dict[int, dict[str, float]], train: Callable[..., Finished]
) -> None:
    with torchrun(2, TRAIN, "lora.yaml", *EXPERTS, "name=killed-experts", folder=folder) as command:
        wait_for(command, lambda: logged(folder / "runs" / "killed-experts") >= 2)
        command.rank(1).kill()
        command.finish()
    train(*EXPERTS, "name=killed-experts").check()
    assert metrics_of(folder / "runs" / "killed-experts") == of_experts


@pytest.mark.grid
def test_a_mixture_goes_on_in_another_layout(
    folder: Path, of_experts: dict[int, dict[str, float]], train: Callable[..., Finished]
) -> None:
    train(*EXPERTS, "name=moved", "steps=2", "checkpoint.export_at_end=false").check()
    train(*EXPERTS, "name=moved", "actor.layout={pipeline: 2}").check()
    moved = metrics_of(folder / "runs" / "moved")
    assert sorted(moved) == sorted(of_experts)
    for step, metrics in of_experts.items():
        for name in ("reward/mean", "train/loss", "train/kl", "train/grad_norm", "rollout/response_length_mean"):
            assert moved[step][name] == pytest.approx(metrics[name], rel=1e-3, abs=1e-6), (step, name)
    text = train(*EXPERTS, "name=moved", "steps=5", "actor.lora.target_modules=[q_proj]").only_error()
    assert "on q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj of actor, and the recipe asks for" in text


def test_a_checkpoint_of_other_adapters_is_refused(
    whole: dict[int, dict[str, float]], train: Callable[..., Finished]
) -> None:
    text = train("actor.lora.rank=8", "steps=5").only_error()
    assert "the checkpoint has adapters of rank 4 and scale 2 on q_proj" in text
    assert "and the recipe asks for adapters of rank 8 and scale 1 on q_proj" in text
