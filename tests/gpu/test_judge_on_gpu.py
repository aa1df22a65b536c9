"""A judge beside the policy's engine on one GPU: what one does, CUDA graphs and sleep included, leaves the other be.

Both sleep by turns, in one process, of which vLLM's allocator has the memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from end_to_end.commands import ROOT
from end_to_end.runs import TRAIN, make_model, metrics_of, steps_of, write_digits
from hugging_face import make_model as make_random_model
from parallel.queue_ranks import GROUPS, requests_of, sampling, serve
from parallel.ranks import run_ranks

STEPS = 4
RECIPE: dict[str, Any] = {
    "name": "judged",
    "loop": "rl",
    "steps": STEPS,
    "model": {"path": "model", "dtype": "bfloat16"},
    "data": {"train_files": ["train.parquet"], "validation_files": ["train.parquet"], "max_prompt_length": 64},
    "batch": {"prompts_per_step": 16, "responses_per_prompt": 4},
    # The policy stays the same: so must the verdicts on its answers.
    "actor": {"tokens_per_gpu": 8192, "optimizer": {"learning_rate": 1e-12, "weight_decay": 0.0}},
    "rollout": {"max_response_length": 64, "gpu_memory_utilization": 0.4, "scheduling": "static"},
    "judge": {
        "path": "judge",
        "prompt": "{question} {response} {ground_truth}",
        "verdict": "([0-9])",
        "score_range": [0, 9],
        "unparsable_score": -1.0,
        "max_prompt_length": 400,
        "max_response_length": 48,
        "temperature": 1.0,
        "kv_cache_gb": 1.0,
        "sleep": True,
    },
    "algorithm": {"kl_coef": 0.0},
    "reward": {"rule": "none"},
    "evaluation": {"interval": 1, "at_start": True},
    "checkpoint": {"export_at_end": False},
    "monitor": {"plots": False},
}


def test_verdicts_stay_the_same_while_both_engines_sleep_and_wake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    make_model(tmp_path, 4)
    make_model(tmp_path, 4, "--seed=10", "--untied-embeddings", name="judge")
    write_digits(tmp_path, (" ".join(str(number)) for number in range(1000, 1064)))
    monkeypatch.chdir(tmp_path)
    run_ranks(ROOT / TRAIN, 1, ["recipe.yaml"], timeout=500.0)
    scores = [steps_of(tmp_path / "runs" / "judged")[step]["eval/digits/score"] for step in range(STEPS + 1)]
    assert scores[0] > -1.0 and scores == [pytest.approx(scores[0], abs=1e-6)] * (STEPS + 1)
    found = metrics_of(tmp_path / "runs" / "judged")
    assert found[1]["train/rollout_logprob_abs_diff"] < 1e-2, "the policy's engine has the actor's weights"
    assert found[STEPS]["train/rollout_logprob_abs_diff"] < 1e-2
    assert 0 < found[1]["judge/unparsable_fraction"] < 1


def test_an_engine_sleeps_and_wakes_while_the_other_stays_as_it_is(tmp_path: Path) -> None:
    models = [str(make_random_model(tmp_path / name, "qwen3", tied=False, seed=seed)) for seed, name in enumerate("ab")]
    [found] = run_ranks(sleep_in_turn, 1, {"models": models})
    for name in ("one asleep", "both asleep", "one awake"):
        assert found["free"][name] == pytest.approx(found["expected"][name], abs=0.3), name
    assert found["tokens"]["one"][0] != found["tokens"]["other"][0], "they are two models"
    assert all(tokens == of[0] for of in found["tokens"].values() for tokens in of)


def sleep_in_turn(models: list[str]) -> dict[str, Any]:
    """Run two engines with caches of 4 and 2 GB: GB that are free besides, and what they answer before, between,
    after."""
    engines = [
        serve(model, kv_cache_gb=size, enforce_eager=True) for model, size in zip(models, (4.0, 2.0), strict=True)
    ]
    asked = requests_of(range(GROUPS))
    tokens = [[[each.token_ids for each in engine.generate(asked, sampling())]] for engine in engines]
    torch.cuda.empty_cache()  # as sleep does
    free = {"awake": torch.cuda.mem_get_info()[0]}

    def sleep(index: int) -> None:
        engines[index].sleep(keeps_weights=True)

    def answer(index: int, wakes: bool) -> None:
        engine = engines[index]
        if wakes:
            engine.wake_weights()
            engine.wake_kv_cache()
            engine.weights_updated(1)
        engine.reset_prefix_cache()
        tokens[index].append([each.token_ids for each in engine.generate(asked, sampling())])

    sleep(0)
    free["one asleep"] = torch.cuda.mem_get_info()[0]
    answer(1, wakes=False)
    sleep(1)
    free["both asleep"] = torch.cuda.mem_get_info()[0]
    answer(0, wakes=True)
    free["one awake"] = torch.cuda.mem_get_info()[0]
    answer(1, wakes=True)
    return {
        "free": {name: (value - free["awake"]) / 2**30 for name, value in free.items()},
        "expected": {"one asleep": 4.0, "both asleep": 6.0, "one awake": 2.0},
        "tokens": {"one": tokens[0], "other": tokens[1]},
    }
