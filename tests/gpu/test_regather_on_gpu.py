"""Regathering into vLLM on GPUs, with sleep, wake and CUDA graphs between updates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hugging_face import load_model, make_model, random_rows, row_logprobs
from parallel.ranks import run_ranks
from parallel.regather_ranks import learn_and_answer

UPDATES = 3


@pytest.mark.parametrize(
    ("layout", "rollout_tensor", "eager"),
    [([1, 1, 1], 1, False), ([2, 1, 1], 1, True), ([1, 1, 2], 2, True), ([1, 2, 1], 1, True)],
    ids=["TP1 to TP1 with CUDA graphs", "TP2 to TP1x2", "TP1x2 to TP2", "PP2 to TP1x2"],
)
def test_vllm_follows_the_trainer(layout: list[int], rollout_tensor: int, eager: bool, tmp_path: Path) -> None:
    world = layout[0] * layout[1] * layout[2]
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs, there are {torch.cuda.device_count()}")
    folder = make_model(tmp_path / "model", "qwen3", tied=layout[0] == 2, vocabulary=250)
    prompts = random_rows(32, 250, seed=3)[0]
    ranks = run_ranks(
        learn_and_answer,
        world,
        {
            "model": str(folder),
            "layout": layout,
            "rollout_tensor": rollout_tensor,
            "rows": list(random_rows(24, 250)),
            "prompts": prompts,
            "updates": UPDATES,
            "exported": str(tmp_path),
            "dtype": "bfloat16",
            "staging_bytes": 65536,
            "rollout": {"kv_cache_gb": 1.0, "enforce_eager": eager},
        },
        timeout=240,
    )
    for number in range(UPDATES):
        model = load_model(tmp_path / f"update-{number}")
        for rank in ranks:
            result = rank[number]
            rollout, trainer = (torch.tensor(result[name]) for name in ("rollout_logprobs", "trainer_logprobs"))
            difference = (rollout - trainer).abs()
            print(f"update {number}: largest {difference.max():.2e}, median {difference.median():.2e}")
            assert difference.median() < 1e-2
            assert difference.max() < 0.15
            with torch.no_grad():  # and both are the exported model, not merely each other
                expected = torch.cat(
                    [row_logprobs(model, p, r) for p, r in zip(prompts, result["sampled"], strict=True)]
                )
            assert (rollout - expected).abs().median() < 1e-2
            assert result["versions"] == [number + 1]
    assert ranks[0][0]["greedy"] != ranks[0][1]["greedy"]
