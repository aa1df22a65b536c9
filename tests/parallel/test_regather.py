"""Regathering with real engines: after every update vLLM is the model that the trainer has, and transformers agrees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hugging_face import load_model, make_model, random_rows
from parallel.ranks import run_ranks
from parallel.regather_ranks import follow_files, learn_and_answer

UPDATES = 3


EXPERTS_WHOLE = {"tensor": 2, "expert_parallel": True}


@pytest.mark.parametrize(
    ("family", "layout", "rollout_layout"),
    [
        ("qwen3", {"tensor": 2}, {"tensor": 1}),
        ("qwen3", {"pipeline": 2}, {"tensor": 2}),
        ("qwen3", {"data": 2}, {"tensor": 2}),
        ("mistral_window", {"tensor": 2}, {"tensor": 1}),
        ("mixtral", {"tensor": 2, "expert": 2, "expert_tensor": 1}, {"tensor": 2}),
        ("qwen3_moe", {"data": 2, "expert": 2}, {"tensor": 2}),
        ("qwen3_moe", {"tensor": 2}, EXPERTS_WHOLE),
    ],
    ids=[
        "TP2 to TP1x2",
        "PP2 to TP2",
        "DP2 to TP2",
        "window",
        "Mixtral",
        "EP2 to TP2",
        "TP2 to TP2 with whole experts",
    ],
)
def test_vllm_follows_the_trainer(
    family: str, layout: dict[str, int], rollout_layout: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_model(tmp_path / "model", family, tied="tensor" in layout, vocabulary=250)
    prompts = [prompt for prompt, _ in zip(*random_rows(5, 250, seed=3), strict=True)]
    ranks = run_ranks(
        learn_and_answer,
        2,
        {
            "model": str(folder),
            "layout": layout,
            "rollout_layout": rollout_layout,
            "rows": list(random_rows(9, 250)),
            "prompts": prompts,
            "updates": UPDATES,
            "exported": str(tmp_path),
        },
    )
    answers = []
    for number in range(UPDATES):
        model = load_model(tmp_path / f"update-{number}").eval()
        for rank in ranks:
            result = rank[number]
            for prompt, tokens in zip(prompts, result["greedy"], strict=True):
                expected = model.generate(
                    torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=1, pad_token_id=0
                )[0, len(prompt) :]
                assert tokens == expected.tolist()
            difference = torch.tensor(result["rollout_logprobs"]) - torch.tensor(result["trainer_logprobs"])
            assert difference.abs().max() < 1e-4
            assert result["versions"] == [number + 1]
            assert result["differing"] == []  # bit for bit what vLLM's own loader makes of the exported files
        assert ranks[0][number]["sampled"] == ranks[1][number]["sampled"]  # seeds decide, not ranks
        answers.append(ranks[0][number]["greedy"])
    assert answers[0] != answers[1] != answers[2]  # the weights did change


@pytest.mark.parametrize(
    ("family", "world", "rollout_layout", "layouts"),
    [
        (
            "llama",
            4,
            {"tensor": 4},
            {
                "TP2 DP2": {"tensor": 2, "data": 2},
                "PP4": {"pipeline": 4},
                "DP4": {"data": 4},
                "TP2 PP2": {"tensor": 2, "pipeline": 2},
            },
        ),
        (
            "qwen2",
            2,
            {"tensor": 2},
            {"PP2": {"pipeline": 2}, "DP2": {"data": 2}, "TP2": {"tensor": 2}},
        ),
        ("mistral", 2, {"tensor": 1}, {"TP2": {"tensor": 2}, "PP2": {"pipeline": 2}}),
        (
            "qwen3_moe",
            2,
            {"tensor": 2},
            {
                "EP2": {"data": 2, "expert": 2, "expert_tensor": 1},
                "TP2": {"tensor": 2},
                "PP2": {"pipeline": 2},
                "TP2 EP2": {"tensor": 2, "expert": 2, "expert_tensor": 1},
            },
        ),
    ],
    ids=["llama to TP4", "qwen2 to TP2", "mistral to TP1x2", "qwen3_moe to TP2"],
)
def test_regathered_is_bit_for_bit_what_vllm_loads(
    family: str, world: int, rollout_layout: dict[str, Any], layouts: dict[str, dict[str, int]], tmp_path: Path
) -> None:
    # vLLM takes a head of Qwen2 for a fourth of the hidden size, whatever its config says.
    fields = {"tied": True, "hidden_size": 128} if family == "qwen2" else {"tied": False}
    models = [
        str(make_model(tmp_path / f"model-{seed}", family, vocabulary=250, seed=seed, **fields)) for seed in range(2)
    ]
    arguments = {"models": models, "layouts": layouts, "rollout_layout": rollout_layout}
    for differing in run_ranks(follow_files, world, arguments):
        assert differing == {name: [] for name in layouts}
