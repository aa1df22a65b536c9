"""A judge hosted in the job: its scores are those of transformers, wherever its engines are, also in a resumed run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
import yaml

from end_to_end.commands import torchrun
from end_to_end.runs import LENGTH_REWARD, TRAIN, make_model, make_sums, metrics_of, steps_of
from rlhf_megatron.data.tokenizer_loading import load_tokenizer
from rlhf_megatron.rollout.vllm.process_environment import has_gpu

pytestmark = pytest.mark.skipif(has_gpu(), reason="the engine of this machine needs a GPU, which is hidden here")

WEIGHT, UNPARSABLE, VERDICT = 0.5, -1.0, 24
PROMPT = "Question: {question}\nAnswer: {response}\nRight: {ground_truth}\n"
RECIPE: dict[str, Any] = {
    "name": "together",
    "loop": "rl",
    "steps": 3,
    "deterministic": True,
    "model": {"path": "model", "dtype": "float32"},
    "data": {"train_files": ["train.parquet"], "validation_files": ["held_out.parquet"], "max_prompt_length": 64},
    "batch": {"prompts_per_step": 6, "responses_per_prompt": 2, "minibatch_prompts": 3},
    "actor": {"tokens_per_gpu": 256, "optimizer": {"learning_rate": 1e-3}},
    "rollout": {"max_response_length": 10, "scheduling": "static"},
    "algorithm": {"kl_coef": 0.0},
    "reward": {"function": "reward.py"},
    "judge": {
        "path": "judge",
        "weight": WEIGHT,
        "prompt": PROMPT,
        "verdict": "([0-9])",
        "score_range": [0, 9],
        "unparsable_score": UNPARSABLE,
        "max_prompt_length": 400,
        "max_response_length": VERDICT,
        "kv_cache_gb": 0.0625,
        "sleep": True,
    },
    "evaluation": {"interval": 3, "at_start": False},
    "checkpoint": {"save_interval": 1, "keep_last_k": 3, "export_at_end": False},
    "monitor": {"plots": False, "rollouts": {"every": 1}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a policy and a judge with random weights, and data."""
    path = tmp_path_factory.mktemp("judge")
    (path / "reward.py").write_text(LENGTH_REWARD)
    (path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    make_model(path, layers=2)
    # Without tied embeddings it says more than its last token again.
    make_model(path, 2, "--seed=10", "--untied-embeddings", name="judge")
    make_sums(path, 4, "--seed=9", name="held_out")
    make_sums(path, 40, "--exclude=held_out.parquet")
    return path


@pytest.fixture(scope="module")
def together(folder: Path) -> dict[int, dict[str, float]]:
    """Return the run whose two ranks have both engines each."""
    with torchrun(2, TRAIN, "recipe.yaml", folder=folder) as command:
        finished = command.finish().check()
    assert len(re.findall("judge: .* verdicts have no score", finished.out)) == 1, "told once"
    return metrics_of(folder / "runs" / "together")


def rows_of(run: Path, step: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(run / "rollouts" / f"step-{step}.parquet").to_pylist()
    return rows


def scores_by_transformers(folder: Path, rows: list[dict[str, Any]]) -> list[float]:
    """Return the scores of rows by the judge in ``folder``, by transformers' template and greedily, row by row."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy, tokenizer = (AutoTokenizer.from_pretrained(folder / name) for name in ("model", "judge"))
    model = AutoModelForCausalLM.from_pretrained(folder / "judge", dtype=torch.float32)
    scores = []
    for row in rows:
        marks = row["sampled"] or [True] * len(row["tokens"])
        sampled = [token for token, own in zip(row["tokens"], marks, strict=True) if own]
        response = policy.decode(sampled, skip_special_tokens=True)
        question = re.fullmatch(r"<\|im_start\|>user\n(.*)<\|im_end\|>\n<\|im_start\|>assistant\n", row["prompt"])
        assert question is not None
        asked = f"Question: {question[1]}\nAnswer: {response}\nRight: {row['ground_truth']}\n"
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": asked}], tokenize=False, add_generation_prompt=True
        )
        tokens = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        with torch.no_grad():
            verdict = model.generate(tokens, do_sample=False, max_new_tokens=VERDICT)[0, tokens.shape[1] :]
        digits = [each for each in tokenizer.decode(verdict, skip_special_tokens=True) if each in "0123456789"]
        scores.append(int(digits[-1]) / 9 if digits else UNPARSABLE)
    return scores


def test_scores_are_those_of_transformers(folder: Path, together: dict[int, dict[str, float]]) -> None:
    later = rows_of(folder / "runs" / "together", 3)  # when the judge has slept
    assert [row["reward_judge"] for row in later] == pytest.approx(scores_by_transformers(folder, later))
    rows = rows_of(folder / "runs" / "together", 1)
    scores = scores_by_transformers(folder, rows)
    assert len(rows) == 12 and len(set(scores)) > 2, "verdicts differ"
    assert [row["reward_judge"] for row in rows] == pytest.approx(scores)
    assert [row["reward"] for row in rows] == pytest.approx(
        [row["reward_rule"] + WEIGHT * score for row, score in zip(rows, scores, strict=True)]
    )
    first = together[1]
    assert first["reward/judge"] == pytest.approx(sum(scores) / 12)
    assert first["judge/unparsable_fraction"] == pytest.approx(scores.count(UNPARSABLE) / 12)
    assert first["judge/too_long_fraction"] == first["reward/masked"] == 0
    assert steps_of(folder / "runs" / "together")[1]["judge/ms"] > 0


def test_an_evaluation_asks_the_judge_too(folder: Path) -> None:
    (folder / "constant.py").write_text("def compute_score(**sample):\n    return 1.0\n")
    keys = ("name=held_out", "reward.function=constant.py", "evaluation={samples_per_prompt: 2, temperature: 1.0}")
    with torchrun(2, "launch/evaluate.py", "recipe.yaml", *keys, folder=folder) as command:
        command.finish().check()
    table = pyarrow.parquet.read_table(folder / "runs" / "held_out" / "evaluation.parquet")
    rows = table.to_pylist()
    policy = load_tokenizer(folder / "model")
    asked = [row | {"tokens": policy.encode(row["response"]), "sampled": None} for row in rows]
    scores = scores_by_transformers(folder, asked)
    assert len(rows) == 8 and [row["score_judge"] for row in rows] == pytest.approx(scores)
    assert [row["score"] for row in rows] == pytest.approx([1.0 + WEIGHT * score for score in scores])
    assert all(row["score_rule"] == 1.0 and row["correct"] for row in rows)


@pytest.mark.parametrize(
    ("ranks", "placement"),
    [
        (3, ["actor.ranks=0", "rollout.ranks=0", "judge.ranks=1-2", "judge.layout.tensor=2", "judge.sleep=false"]),
        pytest.param(2, ["rollout.layout.tensor=2", "judge.layout.tensor=2"], marks=pytest.mark.grid),
    ],
    ids=["of its own", "of two engines"],
)
def test_ranks_change_nothing_but_rounding(
    folder: Path, together: dict[int, dict[str, float]], ranks: int, placement: list[str]
) -> None:
    name = f"on_{ranks}"
    with torchrun(ranks, TRAIN, "recipe.yaml", f"name={name}", "steps=1", *placement, folder=folder) as command:
        command.finish().check()
    found, known = metrics_of(folder / "runs" / name)[1], together[1]
    compared = [key for key in known if key.startswith(("judge/", "reward/", "train/"))]
    compared = [key for key in compared if "imbalance" not in key]
    assert {key: found[key] for key in compared} == pytest.approx(
        {key: known[key] for key in compared}, rel=1e-3, abs=1e-5
    )


@pytest.mark.grid
def test_a_resumed_run_gets_the_same_sampled_verdicts(folder: Path) -> None:
    sampled = ("judge.temperature=1", "judge.unparsable_score=null")
    for keys in (("name=whole",), ("name=cut", "steps=2"), ("name=cut",)):
        with torchrun(2, TRAIN, "recipe.yaml", *sampled, *keys, folder=folder) as command:
            finished = command.finish().check()
    assert "after step 2" in finished.out
    whole, cut = (metrics_of(folder / "runs" / name) for name in ("whole", "cut"))
    assert cut[3] == whole[3]
    assert whole[1]["reward/masked"] == 12 * whole[1]["judge/unparsable_fraction"] > 0
    assert len(rows_of(folder / "runs" / "whole", 1)) == 12 - whole[1]["reward/masked"], "left out of the step"


def test_responses_that_are_too_long_are_told_and_not_judged(folder: Path) -> None:
    short = ("name=short", "steps=1", "judge.max_prompt_length=45", "judge.unparsable_score=0.25")
    with torchrun(2, TRAIN, "recipe.yaml", *short, folder=folder) as command:
        finished = command.finish().check()
    metrics = metrics_of(folder / "runs" / "short")[1]
    assert 0 < metrics["judge/too_long_fraction"] < 1
    assert "responses make prompts beyond judge.max_prompt_length=45 tokens and are not judged" in finished.out
    too_long = round(12 * metrics["judge/too_long_fraction"])
    kept = [row["reward_judge"] for row in rows_of(folder / "runs" / "short", 1)]
    unparsable = round((12 - too_long) * metrics["judge/unparsable_fraction"])
    assert kept.count(0.25) == too_long + unparsable


def test_verdicts_that_never_have_a_score_stop_the_run(folder: Path) -> None:
    with torchrun(2, TRAIN, "recipe.yaml", "name=hopeless", "judge.verdict=Grade (A)", folder=folder) as command:
        error = command.finish().only_error()
    assert "judge: none of 12 verdicts has a score by judge.verdict; one is '" in error
