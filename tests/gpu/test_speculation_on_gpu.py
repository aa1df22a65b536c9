"""Speculative decoding by vLLM's older model runner samples what the newer one samples without drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gpu.devices import skip_without_gpus
from hugging_face import make_model
from parallel.queue_ranks import MAX_RESPONSE, sampling, serve
from parallel.ranks import run_ranks

ROWS = 32


def sample(model: str, tensor: int, speculative: dict[str, int] | None) -> dict[str, Any]:
    """Return responses to two prompts that repeat themselves, twice, and what became of drafts."""
    layout = {"tensor": tensor}
    engine = serve(model, dtype="float32", layout=layout, speculative=speculative, kv_cache_gb=0.5, max_num_seqs=16)
    from rlhf_megatron.rollout.engine import Request

    prompts = [[5, 6, 7, 8] * 8, [20, 21, 22] * 10]
    asked = [Request(row, prompts[row * 2 // ROWS], 100 + row, row * 2 // ROWS) for row in range(ROWS)]
    for _ in range(2):
        completions = engine.generate(asked, sampling())
    record = engine.record
    return {
        "tokens": [completion.token_ids for completion in completions],
        "logprobs": [completion.logprobs for completion in completions],
        "drafted": record.drafted_tokens,
        "accepted": record.accepted_tokens,
    }


@pytest.mark.parametrize("tensor", [1, 2])
def test_tokens_are_those_without_drafts(tensor: int, tmp_path: Path) -> None:
    skip_without_gpus(tensor)
    arguments = {"model": str(make_model(tmp_path, "qwen3", tied=False)), "tensor": tensor}
    plain = run_ranks(sample, tensor, {**arguments, "speculative": None})
    drafted = run_ranks(sample, tensor, {**arguments, "speculative": {"match": 1, "max_running": 16}})
    assert all(of_rank == drafted[0] for of_rank in drafted[1:]), "ranks of a replica keep in step"
    assert plain[0]["drafted"] == 0 < drafted[0]["accepted"] <= drafted[0]["drafted"]
    same = [row for row in range(ROWS) if plain[0]["tokens"][row] == drafted[0]["tokens"][row]]
    assert len(same) > 0.9 * ROWS, "rounding alone makes a difference"
    assert all(len(drafted[0]["tokens"][row]) == MAX_RESPONSE for row in range(ROWS))
    logprobs = [torch.tensor([of["logprobs"][row] for row in same]) for of in (plain[0], drafted[0])]
    torch.testing.assert_close(*logprobs, atol=1e-3, rtol=0)
