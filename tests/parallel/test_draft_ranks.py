"""A head that drafts for replicas of several ranks: ranks keep in step, and tokens are those without drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hugging_face import make_model
from parallel.ranks import run_ranks
from repeating_head import make_head

MAX_PROMPT, MAX_RESPONSE = 32, 24


def sample(model: str, head: str, tensor: int, max_running: int) -> dict[str, Any]:
    """Return responses to a prompt, and what became of drafts; each replica answers all."""
    from rlhf_megatron.rollout.vllm.process_environment import prepare_environment

    prepare_environment()
    from rlhf_megatron.recipe import RolloutSection
    from rlhf_megatron.rollout.engine import Request, Sampling
    from rlhf_megatron.rollout.engine_registry import make_engine

    speculative = {"method": "eagle3", "max_running": max_running}
    settings = {"max_response_length": MAX_RESPONSE, "layout": {"tensor": tensor}, "speculative": speculative}
    section = RolloutSection.model_validate(settings)
    engine = make_engine(model, section, "float32", MAX_PROMPT, 1, load_format="auto", draft_model=head)
    engine.weights_updated(1)
    asked = [Request(row, [5, 6, 7, 8] * 4, 100 + row, 0) for row in range(8)]
    completions = engine.generate(asked, Sampling(0.25, 1.0, -1, MAX_RESPONSE, ()))
    dist.barrier()
    return {
        "tokens": [completion.token_ids for completion in completions],
        "drafted": engine.record.drafted_tokens,
        "accepted": engine.record.accepted_tokens,
    }


@pytest.mark.parametrize("tensor", [1, 2])
def test_replicas_of_two_ranks_sample_what_they_do_without_drafts(tensor: int, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", tied=False)
    arguments = {"model": str(model), "head": str(make_head(tmp_path / "head", model)), "tensor": tensor}
    [plain] = run_ranks(sample, 1, {**arguments, "tensor": 1, "max_running": 1})  # eight run until the end
    drafted = run_ranks(sample, 2, {**arguments, "max_running": 8})
    assert drafted[0] == drafted[1]
    assert drafted[0]["tokens"] == plain["tokens"]
    assert plain["drafted"] == 0 < drafted[0]["accepted"] < drafted[0]["drafted"]
