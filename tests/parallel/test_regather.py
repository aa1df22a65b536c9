"""Regathering with real engines: after every update vLLM is the model that the trainer has, and transformers agrees."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hugging_face import load_model, make_model, random_rows
from parallel.ranks import run_ranks
from parallel.regather_ranks import learn_and_answer

UPDATES = 3


@pytest.mark.parametrize(
    ("layout", "rollout_tensor"),
    [([2, 1, 1], 1), ([1, 2, 1], 2), ([1, 1, 2], 2)],
    ids=["TP2 to TP1x2", "PP2 to TP2", "DP2 to TP2"],
)
def test_vllm_follows_the_trainer(layout: list[int], rollout_tensor: int, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "qwen3", tied=layout[0] == 2, vocabulary=250)
    prompts = [prompt for prompt, _ in zip(*random_rows(5, 250, seed=3), strict=True)]
    ranks = run_ranks(
        learn_and_answer,
        2,
        {
            "model": str(folder),
            "layout": layout,
            "rollout_tensor": rollout_tensor,
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
        assert ranks[0][number]["sampled"] == ranks[1][number]["sampled"]  # seeds decide, not ranks
        answers.append(ranks[0][number]["greedy"])
    assert answers[0] != answers[1] != answers[2]  # the weights did change
