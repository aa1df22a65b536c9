"""Speculative decoding on a GPU samples what is sampled there without drafts, by either of vLLM's model runners."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gpu.devices import skip_without_gpus
from hugging_face import make_model
from parallel.queue_ranks import MAX_PROMPT, MAX_RESPONSE, sampling
from parallel.ranks import run_ranks
from repeating_head import make_head
from small_predictions import make_predicting_model

ROWS = 32
TEXT = {"match": 1, "max_running": 16}


def sample(model: str, tensor: int, head: str | None, speculative: dict[str, Any] | None) -> dict[str, Any]:
    """Return responses to two prompts that repeat themselves, twice, and what became of drafts."""
    from rlhf_megatron.rollout.vllm.process_environment import prepare_environment

    prepare_environment()
    from rlhf_megatron.compat.vllm import internals
    from rlhf_megatron.recipe import RolloutSection
    from rlhf_megatron.rollout.engine import Request
    from rlhf_megatron.rollout.engine_registry import make_engine

    settings = {"layout": {"tensor": tensor}, "speculative": speculative, "kv_cache_gb": 0.5, "max_num_seqs": 16}
    section = RolloutSection.model_validate({"max_response_length": MAX_RESPONSE, **settings})
    engine: Any = make_engine(model, section, "float32", MAX_PROMPT, 1, load_format="auto", draft_model=head)
    engine.weights_updated(1)
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
        "newer": hasattr(internals.model_runner(engine._engine), "speculator"),
    }


def check(model: Path, speculative: dict[str, Any], head: Path | None = None, tensor: int = 1) -> dict[str, Any]:
    """Compare tokens and logprobs with those without drafts; return the result with them."""
    skip_without_gpus(tensor)
    arguments = {"model": str(model), "tensor": tensor, "head": str(head) if head else None}
    plain = run_ranks(sample, tensor, {**arguments, "speculative": None})
    drafted = run_ranks(sample, tensor, {**arguments, "speculative": speculative})
    assert all(of_rank == drafted[0] for of_rank in drafted[1:]), "ranks of a replica keep in step"
    assert plain[0]["drafted"] == 0 < drafted[0]["drafted"]
    same = [row for row in range(ROWS) if plain[0]["tokens"][row] == drafted[0]["tokens"][row]]
    assert len(same) > 0.9 * ROWS, "rounding alone makes a difference"
    assert all(len(drafted[0]["tokens"][row]) == MAX_RESPONSE for row in range(ROWS))
    logprobs = [torch.tensor([of["logprobs"][row] for row in same]) for of in (plain[0], drafted[0])]
    torch.testing.assert_close(*logprobs, atol=1e-3, rtol=0)
    return drafted[0]


@pytest.mark.parametrize(("method", "tensor"), [("suffix", 1), ("suffix", 2), ("ngram", 1)])
def test_tokens_are_those_without_drafts_of_text(method: str, tensor: int, tmp_path: Path) -> None:
    result = check(make_model(tmp_path, "qwen3", tied=False), {**TEXT, "method": method}, tensor=tensor)
    assert result["newer"] and 0 < result["accepted"] <= result["drafted"]


def test_the_older_runner_samples_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(tmp_path, "qwen3", tied=False)
    skip_without_gpus(1)
    arguments = {"model": str(model), "tensor": 1, "head": None, "speculative": {**TEXT, "method": "suffix"}}
    [newer] = run_ranks(sample, 1, arguments)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    [older] = run_ranks(sample, 1, arguments)
    assert newer["newer"] and not older["newer"]
    assert sum(a == b for a, b in zip(newer["tokens"], older["tokens"], strict=True)) > 0.9 * ROWS


@pytest.mark.parametrize("tensor", [1, 2])
def test_tokens_are_those_without_drafts_of_a_head(tensor: int, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3", tied=False)
    head = make_head(tmp_path / "head", model)
    result = check(model, {"method": "eagle3", "max_running": 16}, head, tensor)
    assert result["newer"] and 0 < result["accepted"] <= result["drafted"]


def sample_after_sleep(model: str, head: str) -> list[dict[str, Any]]:
    """Return what is sampled before and after a sleep that drops weights, which are then written again."""
    from rlhf_megatron.rollout.vllm.process_environment import prepare_environment

    prepare_environment()
    from rlhf_megatron.recipe import RolloutSection
    from rlhf_megatron.rollout.engine import Request
    from rlhf_megatron.rollout.engine_registry import make_engine

    settings = {"speculative": {"method": "eagle3"}, "kv_cache_gb": 0.5, "max_num_seqs": 16}
    section = RolloutSection.model_validate({"max_response_length": MAX_RESPONSE, **settings})
    engine: Any = make_engine(model, section, "float32", MAX_PROMPT, 1, load_format="auto", draft_model=head)
    engine.weights_updated(1)
    weights = [
        {name: each.cpu() for name, each in of.items()} for of in (engine.parameters(), engine.draft_parameters())
    ]
    results = []
    for version in (2, 3):
        asked = [Request(row, [5, 6, 7, 8] * 8, 100 + row, 0) for row in range(8)]
        completions = engine.generate(asked, sampling())
        tokens = [completion.token_ids for completion in completions]
        results.append({"tokens": tokens, "accepted": engine.record.accepted_tokens})
        engine.sleep()
        engine.wake_weights()
        for parameters, kept in zip((engine.parameters(), engine.draft_parameters()), weights, strict=True):
            for name, parameter in parameters.items():
                parameter.copy_(kept[name])
        engine.wake_kv_cache()
        engine.weights_updated(version)
    return results


def test_a_head_drafts_as_before_after_a_sleep(tmp_path: Path) -> None:
    skip_without_gpus(1)
    model = make_model(tmp_path / "model", "qwen3", tied=False)
    arguments = {"model": str(model), "head": str(make_head(tmp_path / "head", model))}
    [[before, after]] = run_ranks(sample_after_sleep, 1, arguments)
    assert before == after and before["accepted"] > 0


@pytest.mark.parametrize(
    ("family", "fields"),
    [("glm4_moe", {}), ("deepseek_v3", {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64})],
)
def test_tokens_are_those_without_drafts_of_a_layer(family: str, fields: dict[str, int], tmp_path: Path) -> None:
    check(
        make_predicting_model(tmp_path, family, scale=0.3, copies=True, tied=False, **fields),
        {"method": "mtp", "max_running": 16},
    )
