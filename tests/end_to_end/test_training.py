"""Whole runs of launch/train.py: supervised warm-up, then GRPO on two ranks, in several layouts; what they leave."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
import yaml

from end_to_end.commands import python, torchrun
from end_to_end.runs import LENGTH_REWARD, TRAIN, make_model, make_sums, steps_of
from hugging_face import load_model, row_logprobs
from rlhf_megatron.rollout.vllm.process_environment import has_gpu

pytestmark = pytest.mark.skipif(has_gpu(), reason="the engine of this machine needs a GPU, which is hidden here")

RECIPE: dict[str, Any] = {
    "name": "grpo",
    "loop": "rl",
    "steps": 2,
    "model": {"path": "runs/warm/export/step-2", "dtype": "float32"},
    "data": {"train_files": ["train.parquet"], "validation_files": ["held_out.parquet"], "max_prompt_length": 64},
    "batch": {"prompts_per_step": 4, "responses_per_prompt": 4, "minibatch_prompts": 2},
    "actor": {"layout": {"tensor": 2}, "tokens_per_gpu": 256, "optimizer": {"learning_rate": 1e-3}},
    "reference": {"tokens_per_gpu": 256},
    "rollout": {"max_response_length": 12},
    "algorithm": {"kl_coef": 0.01},
    "reward": {"function": "reward.py"},
    "monitor": {"timeline": {"every": 2}, "profile": {"steps": [2], "ranks": [1]}, "rollouts": {"every": 1, "rows": 9}},
}
WARM: dict[str, Any] = {
    **{key: RECIPE[key] for key in ("steps", "data")},
    "name": "warm",
    "loop": "sft",
    "model": {"path": "model", "dtype": "float32"},
    "data": RECIPE["data"] | {"response_column": "response"},
    "batch": {"prompts_per_step": 8},
    "actor": {"layout": {"data": 2}, "tokens_per_gpu": 256, "optimizer": {"learning_rate": 1e-3}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of two layers, its data, and a supervised run of two steps on two ranks, all by the real
    commands."""
    path = tmp_path_factory.mktemp("training")
    (path / "reward.py").write_text(LENGTH_REWARD)
    (path / "grpo.yaml").write_text(yaml.safe_dump(RECIPE))
    (path / "warm.yaml").write_text(yaml.safe_dump(WARM))
    make_model(path, layers=2)
    make_sums(path, 10, "--seed=9", name="held_out_plain")
    make_sums(path, 24, "--seed=1", "--exclude=held_out_plain.parquet", name="train_plain")
    for name in ("held_out", "train"):
        worked = ("demonstrations", f"--input={name}_plain.parquet", f"--output={name}.parquet")
        python("tools/prepare_data.py", *worked, folder=path).check()
    with torchrun(2, TRAIN, "warm.yaml", folder=path) as command:
        finished = command.finish().check()
    assert "held-out loss" in finished.out
    return path


@pytest.fixture(scope="module")
def grpo(folder: Path) -> Callable[..., dict[int, dict[str, float]]]:
    """Run the GRPO recipe on two ranks and return its metrics by step."""

    def run(name: str, *overrides: str) -> dict[int, dict[str, float]]:
        with torchrun(2, TRAIN, "grpo.yaml", f"name={name}", *overrides, folder=folder) as command:
            finished = command.finish().check()
        assert "held-out accuracy" in finished.out
        return steps_of(folder / "runs" / name)

    return run


@pytest.fixture(scope="module")
def tensor_parallel(grpo: Callable[..., dict[int, dict[str, float]]]) -> dict[int, dict[str, float]]:
    """Return the run with an actor of TP2 and two replicas of TP1."""
    return grpo("tensor")


def test_a_run_leaves_recipe_metrics_picture_samples_and_model(
    folder: Path, tensor_parallel: dict[int, dict[str, float]]
) -> None:
    run = folder / "runs" / "tensor"
    assert sorted(tensor_parallel) == [0, 1, 2]
    for step in (1, 2):
        metrics = tensor_parallel[step]
        assert metrics["train/rollout_logprob_abs_diff_max"] < 1e-4, "vLLM and the trainer are one model in float32"
        assert metrics["train/skipped"] == metrics["reward/timeouts"] == metrics["reward/failures"] == 0
        assert metrics["train/grad_norm"] > 0
    assert tensor_parallel[2]["train/kl"] > 0
    resolved = yaml.safe_load((run / "recipe.yaml").read_text())
    assert resolved["actor"]["optimizer"]["weight_decay"] is not None, "every default is written out"
    assert (run / "plots" / "run.png").read_bytes().startswith(b"\x89PNG")
    assert pyarrow.parquet.read_table(run / "samples" / "step-2.parquet").num_rows == 8, "monitor.sample_rows"
    assert json.loads((run / "environment.json").read_text())["packages"]["torch"]


def test_rows_of_a_step_are_kept_with_the_logprobs_of_both_sides(
    folder: Path, tensor_parallel: dict[int, dict[str, float]]
) -> None:
    run = folder / "runs" / "tensor"
    assert sorted(path.name for path in (run / "rollouts").iterdir()) == ["step-1.parquet", "step-2.parquet"]
    rows = pyarrow.parquet.read_table(run / "rollouts" / "step-1.parquet").to_pylist()
    assert [row["row_id"] for row in rows] == list(range(8)), "whole groups of 4, of at most 9 rows"
    model = load_model(folder / RECIPE["model"]["path"])
    for row in rows:
        prompt, response = row["tokens"][: row["prompt_tokens"]], row["tokens"][row["prompt_tokens"] :]
        assert row["sampled"] == [False] * len(prompt) + [True] * len(response)
        with torch.no_grad():
            expected = row_logprobs(model, prompt, response)
        assert torch.allclose(torch.tensor(row["trainer_logprobs"][len(prompt) :]), expected, atol=1e-5)
        assert torch.allclose(torch.tensor(row["rollout_logprobs"][len(prompt) :]), expected, atol=1e-4)
        assert max(map(abs, row["logprob_differences"])) < 1e-4
        assert row["turns"] == [{"sampled": True, "text": row["response"], "reward": None}]
        assert row["data_source"] and row["ground_truth"] and row["ground_truth"] not in ("None", "")
    for first in (0, 4):
        group = rows[first : first + 4]
        rewards = torch.tensor([row["reward"] for row in group])
        expected = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        assert torch.allclose(torch.tensor([row["advantage"] for row in group]), expected, atol=1e-4)
        assert len({row["prompt"] for row in group}) == 1


def test_a_timeline_shows_what_all_ranks_did(folder: Path, tensor_parallel: dict[int, dict[str, float]]) -> None:
    timelines = folder / "runs" / "tensor" / "timeline"
    assert sorted(path.name for path in timelines.iterdir()) == ["step-0.json", "step-2.json"]
    start, step = (json.loads((timelines / f"step-{number}.json").read_text())["traceEvents"] for number in (0, 2))
    phases = {"generate", "score", "sleep", "logprobs", "update", "regather"}
    for rank in (0, 1):
        assert {"launch", "data", "actor", "reference", "engine", "evaluate"} <= {
            span["name"] for span in spans_of(start, rank)
        }
        spans = spans_of(step, rank)
        whole, *parts = spans
        assert whole["name"] == "step 2"
        inner = {"minibatch", "gradients", "optimizer", "wait"}
        assert phases | inner | {"evaluate", "save"} <= {span["name"] for span in parts}
        for part in parts:
            around = [span for span in spans if span is not part and contains(span, part)]
            assert whole in around
            if part["name"] == "minibatch":
                assert [span["name"] for span in around] == ["step 2", "update"]
            if part["name"] in ("gradients", "optimizer"):
                assert [span["name"] for span in around] == ["step 2", "update", "minibatch"]
        for earlier, later in itertools.pairwise(span for span in parts if span["name"] in phases):
            assert earlier["ts"] + earlier["dur"] <= later["ts"] + 1e-3, "phases of the loop follow each other"
    of_ranks = [{span["name"]: span for span in spans_of(step, rank)} for rank in (0, 1)]
    for rank, other in ((0, 1), (1, 0)):
        generate, others = of_ranks[rank]["generate"], of_ranks[other]["generate"]
        wait = next(span for span in spans_of(step, other) if span["name"] == "wait" and contains(others, span))
        assert generate["ts"] + generate["dur"] >= wait["ts"], "generate ends with the slowest replica"
    for phase in phases:
        assert of_ranks[0][phase]["dur"] / 1e6 == pytest.approx(tensor_parallel[2][f"time/{phase}"], abs=1e-6)
    assert any(event["ph"] == "C" and event["pid"] == 1 for event in step)


def test_a_profile_has_the_kernels_of_the_steps_and_ranks_that_were_asked_for(
    folder: Path, tensor_parallel: dict[int, dict[str, float]]
) -> None:
    profile = folder / "runs" / "tensor" / "profile"
    phases, endings = ("logprobs", "update", "regather"), ("json.gz", "txt")
    names = {f"step-2-{phase}-rank-1.{ending}" for phase in phases for ending in endings}
    assert {path.name for path in profile.iterdir()} == names
    with gzip.open(profile / "step-2-update-rank-1.json.gz", "rt") as file:
        recorded = {event.get("name", "") for event in json.load(file)["traceEvents"]}
    assert {"minibatch", "aten::mm"} <= recorded
    assert any(name.startswith("autograd::engine") for name in recorded), "the backward pass has threads of its own"
    assert "aten::mm" in (profile / "step-2-update-rank-1.txt").read_text()


def spans_of(events: list[dict[str, Any]], rank: int) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X" and event["pid"] == rank]


def contains(outer: dict[str, Any], inner: dict[str, Any]) -> bool:
    ends = (span["ts"] + span["dur"] for span in (outer, inner))
    return outer["ts"] <= inner["ts"] and next(ends) >= next(ends) - 1e-3


def test_memory_balance_and_speed_are_logged(tensor_parallel: dict[int, dict[str, float]]) -> None:
    for step in (1, 2):
        metrics = tensor_parallel[step]
        for phase in ("generate", "score", "logprobs", "update", "regather"):
            assert 0.1 < metrics[f"memory/{phase}_gb"] < 100
        assert metrics["memory/host_gb"] == pytest.approx(metrics["memory/regather_gb"], rel=0.2)
        assert 1.0 <= metrics["train/imbalance"] <= metrics["train/imbalance_micro_batch"] * 1.001
        trained = metrics["perf/tokens_per_gpu_per_sec_training"] * metrics["time/update"]
        stepped = metrics["perf/tokens_per_gpu_per_sec"] * metrics["train/step_time_ms"] / 1000
        assert trained == pytest.approx(stepped), "every token that was generated is trained on, once"
        assert "perf/mfu_training" not in metrics, "a CPU has no peak to compare with"
        assert 0 < metrics["train/gradient_sync_ms"] < 1000 * metrics["time/update"]
        forward, backward = metrics["train/forward_time_ms"], metrics["train/backward_time_ms"]
        assert min(forward, backward) > 0 and forward + backward < 1000 * metrics["time/update"]
        assert metrics["train/gradient_sync_ms"] < backward
        rows = RECIPE["batch"]["prompts_per_step"] * RECIPE["batch"]["responses_per_prompt"]
        assert metrics["perf/samples_per_sec"] * metrics["train/step_time_ms"] / 1000 == pytest.approx(rows)
        assert 0 < metrics["perf/data_loading_time_ms"] < metrics["train/step_time_ms"]
    parts = ("launch", "data", "actor", "reference", "engine", "regather", "evaluate")
    assert sum(tensor_parallel[1][f"start/{part}"] for part in parts) <= tensor_parallel[1]["start/total"]
    assert "start/total" not in tensor_parallel[2]


def test_the_exported_model_is_the_trained_one_in_plain_transformers(
    folder: Path, tensor_parallel: dict[int, dict[str, float]]
) -> None:
    check_export(folder, "tensor", RECIPE["model"]["path"])


def test_a_mixture_of_experts_trains(folder: Path, grpo: Callable[..., dict[int, dict[str, float]]]) -> None:
    make_model(folder, 2, "--experts=4", "--expert-size=32", name="mixture")
    steps = grpo(
        "experts",
        "model.path=mixture",
        "actor.layout={expert: 2}",
        "reference.layout={tensor: 2}",
        "rollout.layout={tensor: 2, expert_parallel: true}",
        "regather.verify=1",
    )
    assert all(steps[step]["train/rollout_logprob_abs_diff_max"] < 1e-4 for step in (1, 2))
    check_export(folder, "experts", "mixture")


def check_export(folder: Path, run: str, before: str) -> None:
    transformers = pytest.importorskip("transformers")
    exported = folder / "runs" / run / "export" / "step-2"
    model = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    start = transformers.AutoModelForCausalLM.from_pretrained(folder / before, dtype=torch.float32)
    moved = [(a - b).abs().max() for a, b in zip(model.parameters(), start.parameters(), strict=True)]
    assert all(0 < distance < 1e-2 for distance in moved)
    # The run's last evaluation was greedy, by vLLM; transformers says the same from the exported files.
    for row in pyarrow.parquet.read_table(folder / "runs" / run / "samples" / "step-2.parquet").to_pylist():
        prompt = tokenizer(row["prompt"], add_special_tokens=False, return_tensors="pt")
        length = prompt["input_ids"].shape[1]
        answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, length:]
        assert tokenizer.decode(answer, skip_special_tokens=True) == row["response"]


def test_the_layout_changes_nothing_but_rounding(
    grpo: Callable[..., dict[int, dict[str, float]]], tensor_parallel: dict[int, dict[str, float]]
) -> None:
    overrides = ("actor.layout.tensor=1", "actor.tokens_per_gpu=64", "rollout.layout.tensor=2", "regather.verify=1")
    other = grpo("data", *overrides, "reference.layout={pipeline: 2}")
    for step in (1, 2):
        for metric in (
            "reward/mean", "reward/std", "rollout/response_length_mean", "train/loss", "train/grad_norm",
            "train/entropy", "train/kl", "train/policy_kl",
        ):  # fmt: skip
            assert other[step][metric] == pytest.approx(tensor_parallel[step][metric], rel=1e-3, abs=2e-6), metric
