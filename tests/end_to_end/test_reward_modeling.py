"""RLHF from end to end: supervised fine-tuning, a reward model from pairs, and PPO by its scores.

The task: state a number. The model is taught to state it with either sign, the reward model prefers one without.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
import yaml
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from end_to_end.commands import torchrun
from end_to_end.runs import TRAIN, make_model, steps_of

STEPS, SAVED = 14, 4
RECIPE: dict[str, Any] = {
    "name": "judge",
    "loop": "reward_modeling",
    "steps": STEPS,
    "model": {"path": "model", "dtype": "float32"},
    "data": {"train_files": ["train.parquet"], "validation_files": ["held_out.parquet"], "max_prompt_length": 64},
    "batch": {"prompts_per_step": 16},
    "actor": {"layout": {"tensor": 2}, "tokens_per_gpu": 128, "optimizer": {"learning_rate": 2e-3}},
    "checkpoint": {"save_interval": SAVED},
}


def pairs(numbers: range) -> list[dict[str, Any]]:
    """Return the chosen answers are positive, the rejected ones negative; every other pair has a margin."""
    return [
        {
            "prompt": [{"role": "user", "content": f"State the final answer: {number} + 0 ="}],
            "chosen": str(number),
            "rejected": str(-number - 1),
            "margin": 0.5 * (number % 2),
        }
        for number in numbers
    ]


HELD_OUT = pairs(range(900, 924))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a random model, pairs, and the reward model that was trained on them in two parts."""
    folder = tmp_path_factory.mktemp("rlhf")
    for name, rows in (("train", pairs(range(100, 228))), ("held_out", HELD_OUT)):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{name}.parquet")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    make_model(folder, layers=2)
    for overrides in ([f"steps={SAVED}"], ["actor.layout={pipeline: 2}"]):
        with torchrun(2, TRAIN, "recipe.yaml", *overrides, folder=folder) as command:
            finished = command.finish().check()
    assert "held-out accuracy" in finished.out and "resuming from" in finished.out
    with torchrun(2, TRAIN, "recipe.yaml", *overrides, folder=folder) as command:
        assert command.finish().check().out.startswith(f"runs/judge: all {STEPS} steps are done, and nothing is left")
    return folder


def test_a_reward_model_learns_separable_pairs_and_is_exported(folder: Path) -> None:
    run = folder / "runs" / "judge"
    steps = steps_of(run)
    assert sorted(steps) == list(range(STEPS + 1))
    assert steps[0]["eval/accuracy"] < 0.9 and steps[STEPS]["eval/accuracy"] == 1.0
    assert steps[STEPS]["train/loss"] < 0.8 * steps[1]["train/loss"]
    assert steps[STEPS]["eval/margin"] > steps[0]["eval/margin"]
    assert (run / "plots" / "run.png").read_bytes().startswith(b"\x89PNG")

    exported = run / "export" / f"step-{STEPS}"
    model = AutoModelForSequenceClassification.from_pretrained(exported, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(exported)

    def score(row: dict[str, Any], response: str) -> float:
        messages = [*row["prompt"], {"role": "assistant", "content": response}]
        tokens = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)
        return float(model(**tokens).logits)

    with torch.no_grad():
        ahead = [score(row, row["chosen"]) - score(row, row["rejected"]) for row in HELD_OUT]
    # What the loop said of the same pairs: the template's text is what it trained on.
    assert abs(sum(ahead) / len(ahead) - steps[STEPS]["eval/margin"]) < 1e-4
    assert all(difference > 0 for difference in ahead)


TAUGHT: dict[str, Any] = {
    **RECIPE,
    "name": "taught",
    "loop": "sft",
    "steps": 60,
    "data": {"train_files": ["taught.parquet"], "max_prompt_length": 64, "response_column": "response"},
    "batch": {"prompts_per_step": 32},
    "actor": {"tokens_per_gpu": 2048, "optimizer": {"learning_rate": 5e-3, "warmup_steps": 5}},
    "checkpoint": {},
}
TARGET = 0.6
PREFERRED: dict[str, Any] = {
    "name": "preferred",
    "loop": "rl",
    "steps": 12,
    "model": {"path": "runs/taught/export/step-60", "dtype": "float32"},
    "data": {"train_files": ["asked.parquet"], "validation_files": ["asked_later.parquet"], "max_prompt_length": 64},
    "batch": {"prompts_per_step": 128, "responses_per_prompt": 1, "minibatch_prompts": 32},
    "actor": {"layout": {"tensor": 2}, "tokens_per_gpu": 1024, "optimizer": {"learning_rate": 5e-4}},
    "critic": {
        "path": f"runs/judge/export/step-{STEPS}",
        "tokens_per_gpu": 512,
        "optimizer": {"learning_rate": 2e-3},
        "layout": {"pipeline": 2},
        "warmup_steps": 1,
    },
    "reference": {"tokens_per_gpu": 1024, "layout": {"data": 2}},
    "reward_model": {"path": f"runs/judge/export/step-{STEPS}", "tokens_per_gpu": 1024, "layout": {"data": 2}},
    "reward": {"rule": "none"},
    "rollout": {"max_response_length": 16},
    "algorithm": {
        "advantage": "gae",
        "gae_lambda": 0.95,
        "kl_coef": 1.0,
        "kl_placement": "reward",
        "kl_estimator": "k1",
        "kl_controller": {"type": "adaptive", "target": TARGET, "horizon": 640},
    },
    "evaluation": {"temperature": 1.0, "samples_per_prompt": 2},
}


def asked(numbers: range) -> list[dict[str, Any]]:
    """Return prompts with either sign in turn as the response to learn, and no right answer."""
    return [
        {
            "data_source": "signs",
            "prompt": row["prompt"],
            "reward_model": {"style": "model", "ground_truth": ""},
            "response": row["chosen"] if number % 2 else row["rejected"],
        }
        for number, row in zip(numbers, pairs(numbers), strict=True)
    ]


def test_ppo_raises_the_score_of_the_reward_model_near_the_reference(folder: Path) -> None:
    for name, numbers in (("taught", range(100, 612)), ("asked", range(100, 400)), ("asked_later", range(900, 932))):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(asked(numbers)), folder / f"{name}.parquet")
    for recipe in (TAUGHT, PREFERRED):
        (folder / f"{recipe['name']}.yaml").write_text(yaml.safe_dump(recipe))
        with torchrun(2, TRAIN, f"{recipe['name']}.yaml", folder=folder) as command:
            finished = command.finish().check()
    assert "held-out score" in finished.out

    steps = steps_of(folder / "runs" / "preferred")
    first, last = steps[0], steps[PREFERRED["steps"]]
    measured = {f"eval/signs/{name}" for name in ("score", "score_low", "score_high")}
    assert {name for name in last if name.startswith("eval/")} == measured, "nothing is right or wrong here"
    assert last["eval/signs/score"] > first["eval/signs/score"] + 1.0
    assert abs(last["reward/reward_model"] - last["reward/mean"]) < 1e-6, "its score is the whole reward"
    assert last["train/kl"] < TARGET
    assert last["train/kl_coef"] != PREFERRED["algorithm"]["kl_coef"]
    assert "train/loss" not in steps[1] and "critic/loss" in steps[1], "the critic learns alone at first"
    assert last["critic/explained_variance"] > 0.2 > steps[1]["critic/explained_variance"]
