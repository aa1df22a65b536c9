"""A model that is not finite is not read, not saved and not exported: one line, and what was good before stays."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from end_to_end.commands import Finished, python, torchrun
from end_to_end.runs import SUPERVISED, TRAIN, decisions, make_model, make_sums
from rlhf_megatron.checkpoint.storage import TensorFile, publish, read_manifest, write_tensors
from rlhf_megatron.rollout.vllm.process_environment import has_gpu
from rlhf_megatron.runtime.faults import VARIABLE

SECONDS_TO_END = 60.0
NORM = "decoder.final_layernorm.weight"
QUERIES = "model.layers.0.self_attn.q_proj.weight"
RECIPE = SUPERVISED | {
    "name": "run",
    "steps": 2,
    "batch": {"prompts_per_step": 4},
    "actor": {"tokens_per_gpu": 512, "optimizer": {"learning_rate": 1e-3}},
    "checkpoint": {"save_interval": 1, "keep_last_k": 1, "export_at_end": False},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model, copies of it with bad weights in the part of rank 1 alone, and data."""
    path = tmp_path_factory.mktemp("not_finite")
    make_model(path, layers=1)
    make_sums(path, 20)
    (path / "sft.yaml").write_text(yaml.safe_dump(RECIPE))
    weights = load_file(path / "model" / "model.safetensors")
    infinite = weights[QUERIES].clone()
    infinite[-1, -2:] = math.inf
    for name, changed in {"infinite": infinite, "whole": weights[QUERIES].to(torch.int32)}.items():
        shutil.copytree(path / "model", path / name)
        save_file(weights | {QUERIES: changed}, path / name / "model.safetensors")
    return path


@pytest.fixture
def train(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Finished]:
    """Run the recipe on two ranks to its end."""

    def run(*overrides: str, fault: str = "") -> Finished:
        monkeypatch.setenv(VARIABLE, fault)
        with torchrun(2, TRAIN, "sft.yaml", f"run_root={tmp_path}", *overrides, folder=folder) as command:
            return command.finish()

    return run


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ("infinite", "holds 2 values that are not finite (NaN or infinity); download the model again"),
        (
            "whole",
            "has numbers of type I32, and weights are F64, F32, F16, BF16; take a model that is not quantised, or "
            "download it again",
        ),
    ],
)
def test_a_model_of_bad_weights_is_refused_on_all_ranks(train: Callable[..., Finished], model: str, line: str) -> None:
    began = time.time()
    finished = train(f"model.path={model}", "model.tokenizer=model", "actor.layout.tensor=2")
    expected = f"error: {model}/model.safetensors: {QUERIES} {line}"
    assert finished.only_error().removeprefix("[rank 1] ") == expected
    assert finished.ended - began < SECONDS_TO_END
    assert "exitcode  : 2" in finished.err


def test_a_run_that_diverges_ends_and_its_good_checkpoint_stays(
    train: Callable[..., Finished], folder: Path, tmp_path: Path
) -> None:
    train().check()
    checkpoints = tmp_path / "run" / "checkpoints"
    before = (checkpoints / "step-2" / "manifest.json").read_bytes()
    finished = train(
        "steps=4", "checkpoint.export_at_end=true", "checkpoint.export_interval=4", fault="overflow@update:3"
    )
    line = finished.only_error().removeprefix("[rank 1] ")
    assert line.startswith("error: step 3: actor is not finite, and not saved: ")
    assert line.endswith("; lower actor.optimizer.learning_rate, and the same command resumes from step 2")
    assert "on ranks 0-1" in line
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step-2"]
    assert (checkpoints / "latest").read_text() == "step-2\n"
    assert (checkpoints / "step-2" / "manifest.json").read_bytes() == before
    assert not list((tmp_path / "run" / "export").glob("*"))
    assert decisions(tmp_path / "run")[-1]["what"] == "fault"
    train("steps=3").check()


def test_a_run_without_checkpoints_does_not_end_well_with_weights_that_are_not_finite(
    train: Callable[..., Finished],
) -> None:
    finished = train("steps=1", "checkpoint.save_interval=0", fault="overflow@update:1")
    line = finished.only_error()
    assert "step 1: actor is not finite" in line and line.endswith("resumes from the beginning")


def test_an_export_that_would_not_be_finite_leaves_the_older_one(
    train: Callable[..., Finished], folder: Path, tmp_path: Path
) -> None:
    exporting = ("checkpoint.save_interval=0", "checkpoint.export_interval=1", "checkpoint.export_at_end=true")
    train(*exporting, "steps=1").check()
    exported = tmp_path / "run" / "export" / "step-1" / "model.safetensors"
    before = exported.read_bytes()
    finished = train(*exporting, "steps=2", fault="overflow@update:1")
    assert "step 1: the actor is not finite, and not exported: " in finished.only_error()
    assert exported.read_bytes() == before
    assert [path.name for path in exported.parents[1].iterdir()] == ["step-1"]


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Path:
    """Return one whose files say nothing of their damage, a weight is nan; beside it a copy as it was, and one of step
    1."""
    with torchrun(2, TRAIN, "sft.yaml", "name=spoiled", "checkpoint.keep_last_k=2", folder=folder) as command:
        command.finish().check()
    spoiled = folder / "runs" / "spoiled" / "checkpoints" / "step-2"
    sound = shutil.copytree(spoiled, spoiled.with_name("sound") / "step-2")
    manifest, written = read_manifest(sound), []
    for file in manifest.files:
        with TensorFile(sound / file.name) as opened:
            about = opened.about
        tensors = load_file(sound / file.name)
        tensors.get(f"actor/weights/{NORM}", torch.empty(0))[:1] = math.nan  # one rank or both own it
        written.append(write_tensors(spoiled, file.name, tensors, about))
    publish(spoiled, written, manifest.state, 2)
    return spoiled


def test_a_checkpoint_that_is_not_finite_becomes_no_model(folder: Path, checkpoint: Path) -> None:
    options = (f"--input={checkpoint}", "--output=converted", "--dtype=float32")
    finished = python("tools/convert.py", "checkpoint-to-hf", *options, folder=folder)
    assert finished.status == 2
    assert finished.only_error().startswith(f"error: {checkpoint}: actor: model.norm.weight holds ")
    assert finished.only_error().endswith(
        " values that are not finite (NaN or infinity) as float32; take an older checkpoint"
    )
    assert not (folder / "converted").exists() and not (folder / "converted.partial").exists()


def test_a_run_passes_over_a_checkpoint_that_is_not_finite(folder: Path, checkpoint: Path) -> None:
    longer = ("steps=3", "checkpoint.keep_last_k=2")  # with its own steps the run would be finished
    with torchrun(2, TRAIN, "sft.yaml", "name=spoiled", *longer, folder=folder) as command:
        out = command.finish().check().out
    assert "warning: runs/spoiled/checkpoints/step-2: actor is not finite: " in out
    assert f"{NORM} (1 nan of 64) on ranks 0-1" in out
    assert out.count("this checkpoint is passed over") == 1
    assert "resuming from runs/spoiled/checkpoints/step-1, after step 1" in out
    again, whole = read_manifest(checkpoint), read_manifest(checkpoint.with_name("sound") / "step-2")
    assert again.files == whole.files, "nothing of it is left, to the last bit"


@pytest.mark.skipif(has_gpu(), reason="the engine of this machine needs a GPU, which is hidden here")
@pytest.mark.parametrize("model", ["infinite", "whole"])
def test_a_model_of_bad_weights_is_not_evaluated(folder: Path, model: str) -> None:
    asked = ("rollout.max_response_length=4", "data.validation_files=[train.parquet]", "model.tokenizer=model")
    with torchrun(1, "launch/evaluate.py", "sft.yaml", f"model.path={model}", *asked, folder=folder) as command:
        line = command.finish().only_error()
    expected = {
        "infinite": "qkv_proj.weight holds 2 values that are not finite",
        "whole": f"{QUERIES} has numbers of type",
    }
    assert line.startswith(f"error: {model}") and expected[model] in line
