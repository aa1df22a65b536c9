"""Rollout in 8 bits on a GPU, compiled and captured in CUDA graphs: its logprobs beside the actor's own in bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hugging_face import make_model, random_rows
from parallel.ranks import run_ranks
from parallel.sharing_ranks import compare
from rlhf_megatron.rollout.environment import prepare_environment


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_answers_follow_the_actor(family: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128} if family == "qwen2" else {}
    arguments = {
        "model": str(make_model(tmp_path / "model", family, tied=False, vocabulary=250, **sizes)),
        "layout": {},
        "rollout_layout": {"tensor": 1},
        "rows": list(random_rows(24, 250)),
        "prompts": random_rows(16, 250, seed=3)[0],
        "dtype": "bfloat16",
        "rollout": {"kv_cache_gb": 1.0, "quantization": "fp8"},
        "beside_copies": False,
    }
    result: dict[str, Any] = run_ranks(compare, 1, arguments, timeout=300)[0]
    assert result["views"] == result["all"], "8 bits are a copy; what they are made from is the actor's memory"
    for (answered, *_), of_trainer in zip(result["answers"], result["of_trainer"], strict=True):
        of_rollout = torch.tensor([value for _, logprobs in answered for value in logprobs])
        difference = (of_rollout - torch.tensor(of_trainer)).abs()
        print(f"{family}: largest {difference.max():.2e}, median {difference.median():.2e}")
        assert 0 < difference.median() < 5e-2


def test_rows_are_quantized_as_on_a_cpu() -> None:
    prepare_environment()
    from rlhf_megatron.rollout.fp8 import quantized_rows

    values = torch.randn(300, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected, scale = quantized_rows(values)
    found, found_scale = quantized_rows(values.cuda())
    torch.testing.assert_close(found_scale.cpu(), scale)
    # The kernel multiplies by 1 / scale, so that a number half-way between two may fall to the other side.
    same = (found.cpu().float() == expected.float()).float().mean()
    assert same > 0.999
