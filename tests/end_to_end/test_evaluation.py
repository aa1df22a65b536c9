"""launch/evaluate.py on two ranks: what it samples, scores, counts and leaves behind."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
import yaml

from end_to_end.commands import Finished, python, torchrun
from end_to_end.runs import make_model, make_sums
from rlhf_megatron.rollout.vllm.process_environment import has_gpu

pytestmark = pytest.mark.skipif(has_gpu(), reason="the engine of this machine needs a GPU, which is hidden here")

EVALUATE = "launch/evaluate.py"
SAMPLES = 4
RECIPE: dict[str, Any] = {
    "name": "tiny",
    "loop": "rl",
    "steps": 1,
    "model": {"path": "model", "dtype": "float32"},
    "data": {
        "train_files": ["never_opened.parquet"],
        "validation_files": ["sums.parquet", "aime.parquet"],
        "max_prompt_length": 64,
    },
    "batch": {"prompts_per_step": 4, "responses_per_prompt": 2},
    "actor": {"layout": {"tensor": 2}, "tokens_per_gpu": 256, "optimizer": {"learning_rate": 1e-3}},
    "rollout": {"max_response_length": 8},
    "reward": {
        "parts": [
            {"name": "own", "function": "reward.py"},
            {"name": "long", "rule": "length", "length_low": 0, "length_high": 8, "weight": -0.5},
        ]
    },
    "evaluation": {"samples_per_prompt": SAMPLES, "temperature": 1.0, "correct_from": 0.5},
}
# Some score that differs between random answers; the answers of AIME's rows are in boxes, so nobody votes there.
REWARD = """
async def compute_score(data_source, solution_str, ground_truth, extra_info):
    return (len(solution_str) % 5) / 4
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("evaluation")
    (path / "reward.py").write_text(REWARD)
    (path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    aime = [
        {
            "data_source": "aime2024",
            "prompt": [{"role": "user", "content": f"Find {number} + 1."}],
            "reward_model": {"style": "rule", "ground_truth": f"{number + 1:03d}"},
        }
        for number in range(3)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(aime), path / "aime.parquet")
    make_model(path, layers=2)
    make_sums(path, 6, "--seed=9", name="sums")
    return path


@pytest.fixture(scope="module")
def sampled(folder: Path) -> Finished:
    with torchrun(2, EVALUATE, "recipe.yaml", folder=folder) as command:
        finished = command.finish().check()
    return finished


@pytest.fixture(scope="module")
def rows(folder: Path, sampled: Finished) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = pyarrow.parquet.read_table(folder / "runs/tiny/evaluation.parquet").to_pylist()
    return made


def test_every_sample_is_kept_and_scored(rows: list[dict[str, Any]]) -> None:
    assert [(row["question"], row["sample"]) for row in rows] == list(itertools.product(range(9), range(SAMPLES)))
    for row in rows:
        assert row["score_own"] == len(row["response"]) % 5 / 4
        assert row["score_long"] == row["tokens"] / 8
        assert row["score"] == pytest.approx(row["score_own"] - 0.5 * row["score_long"])
        assert row["correct"] == (row["score_own"] >= 0.5)
        assert row["data_source"] == ("aime2024" if row["question"] >= 6 else "reasoning_gym/chain_sum")
        assert not row["unscored"]
        if "<answer>" not in row["response"]:  # which random weights may well say
            assert row["answer"] == (None if row["question"] >= 6 else row["response"].strip() or None)
    assert {row["correct"] for row in rows} == {True, False}
    assert "assistant" in rows[0]["prompt"] and rows[-1]["ground_truth"] == "003"


def test_the_metrics_are_those_of_the_samples(folder: Path, sampled: Finished, rows: list[dict[str, Any]]) -> None:
    results = json.loads((folder / "runs/tiny/evaluation.json").read_text())
    assert results["questions"] == {"aime2024": 3, "reasoning_gym/chain_sum": 6}
    assert results["recipe"]["evaluation"]["samples_per_prompt"] == SAMPLES
    assert results["response_tokens"] == sum(row["tokens"] for row in rows)
    for source, metrics in results["metrics"].items():
        questions = defaultdict(list)
        for row in rows:
            if row["data_source"] == source:
                questions[row["question"]].append(row["correct"])
        values = {name: estimate["value"] for name, estimate in metrics.items()}
        assert values["mean@4"] == pytest.approx(sum(map(sum, questions.values())) / (4 * len(questions)))
        for k in (2, 4):
            solved = [any(drawn) for correct in questions.values() for drawn in itertools.combinations(correct, k)]
            assert values[f"pass@{k}"] == pytest.approx(sum(solved) / len(solved))
        assert ("maj@4" in values) == (source != "aime2024")
        for estimate in metrics.values():
            assert estimate["low"] <= estimate["value"] <= estimate["high"]
            assert f"{estimate['value']:.4f}" in sampled.out
    assert "36 responses" in sampled.out and "aime2024" in sampled.out


def test_greedy_answers_of_a_replica_over_two_ranks_are_those_of_transformers(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    greedy = ("rollout.layout.tensor=2", "evaluation={temperature: 0}", "reward={rule: math}", "name=greedy")
    with torchrun(2, EVALUATE, "recipe.yaml", *greedy, folder=folder) as command:
        command.finish().check()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    answered = pyarrow.parquet.read_table(folder / "runs/greedy/evaluation.parquet").to_pylist()
    assert len(answered) == 9 and {row["score"] for row in answered} == {0.0}
    for row in answered:
        prompt = tokenizer(row["prompt"], add_special_tokens=False, return_tensors="pt")
        said = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        assert tokenizer.decode(said, skip_special_tokens=True) == row["response"]


def test_what_cannot_be_evaluated_is_told_in_one_line(folder: Path) -> None:
    told = python(EVALUATE, "recipe.yaml", "data.validation_files=[]", folder=folder)
    assert told.only_error() == "error: data.validation_files: an evaluation needs some; name parquet files"
    table = pyarrow.parquet.read_table(folder / "aime.parquet").to_pylist()
    made_up = pyarrow.Table.from_pylist([{**row, "data_source": "made/up"} for row in table])
    pyarrow.parquet.write_table(made_up, folder / "made_up.parquet")
    overrides = ("data.validation_files=[made_up.parquet]", "reward.parts=[]")
    with torchrun(1, EVALUATE, "recipe.yaml", *overrides, folder=folder) as command:
        assert "no reward is known for data_source 'made/up'" in command.finish().only_error()
