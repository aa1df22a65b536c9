"""vLLM's parameters as views of the actor's on GPUs: compiled, captured in CUDA graphs, asleep between updates."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu.devices import skip_without_gpus
from hugging_face import make_model, random_rows
from parallel.ranks import run_ranks
from parallel.sharing_ranks import compare
from rlhf_megatron.topology.layout import Layout


def results(
    folder: Path, family: str, layout: dict[str, int], rollout_layout: dict[str, int], **more: Any
) -> list[dict[str, Any]]:
    world = Layout(**layout).size
    skip_without_gpus(rollout_layout["tensor"])
    arguments = {
        "model": str(make_model(folder / "model", family, tied=False, vocabulary=250)),
        "layout": layout,
        "rollout_layout": rollout_layout,
        "rows": list(random_rows(24, 250)),
        "prompts": random_rows(16, 250, seed=3)[0],
        "dtype": "bfloat16",
    }
    found: list[dict[str, Any]] = run_ranks(compare, world, arguments | more, timeout=300)
    for result in found:
        for (answered, *_), of_trainer in zip(result["answers"], result["of_trainer"], strict=True):
            of_rollout = torch.tensor([value for _, logprobs in answered for value in logprobs])
            difference = (of_rollout - torch.tensor(of_trainer)).abs()
            print(f"largest {difference.max():.2e}, median {difference.median():.2e}")
            assert difference.median() < 1e-2
        assert all(one != other for one, other in itertools.pairwise(result["answers"]))
    return found


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_answers_are_those_of_copies(eager: bool, tmp_path: Path) -> None:
    """To the bit where layers run one by one. For compiled code each engine measures anew which of several kernels is
    the fastest, and they may round differently."""
    # Both engines are awake all the time: asleep, they would share one allocator and each other's fate.
    rollout = {"kv_cache_gb": 1.0, "sleep": False, "enforce_eager": eager}
    for result in results(tmp_path, "qwen3", {}, {"tensor": 1}, rollout=rollout):
        assert result["views"] == result["all"] and result["copied"][0] == 0 < result["copied"][1]
        differences = torch.tensor([pair for answers in result["answers"] for pair in logprobs_side_by_side(*answers)])
        largest = (differences[:, 0] - differences[:, 1]).abs().max()
        print(f"views and copies, eager {eager}: {len(differences)} logprobs, largest difference {largest:.2e}")
        if eager:
            assert all(shared == copied for shared, copied in result["answers"])
        else:
            assert largest < 6e-2


def logprobs_side_by_side(shared: list[Any], copied: list[Any]) -> list[tuple[float, float]]:
    """Return logprobs of two engines' greedy answers, as far as they agree on the tokens before."""
    pairs = []
    for (tokens, logprobs), (other_tokens, other_logprobs) in zip(shared, copied, strict=True):
        for token, other_token, logprob, other_logprob in zip(
            tokens, other_tokens, logprobs, other_logprobs, strict=False
        ):
            if token != other_token:
                break
            pairs.append((logprob, other_logprob))
    return pairs


@pytest.mark.parametrize(
    ("family", "layout", "rollout_layout"),
    [
        ("qwen3", {}, {"tensor": 1}),
        ("qwen3_moe", {}, {"tensor": 1}),
        ("llama", {"tensor": 2}, {"tensor": 2}),
        ("qwen3", {"data": 2}, {"tensor": 1}),
        ("qwen3", {"pipeline": 2}, {"tensor": 1}),
    ],
    ids=["TP1", "experts", "TP2", "DP2", "PP2 -> TP1 x 2"],
)
def test_shared_weights_survive_sleep_and_follow_the_actor(
    family: str, layout: dict[str, int], rollout_layout: dict[str, int], tmp_path: Path
) -> None:
    # vLLM watches the GPU's memory while it goes to sleep, and takes what another rank gets there for its own.
    rollout = {"kv_cache_gb": 1.0, "sleep": torch.cuda.device_count() >= Layout(**layout).size}
    for result in results(tmp_path, family, layout, rollout_layout, rollout=rollout, beside_copies=False):
        assert 0 < len(result["views"]) <= len(result["all"])
        if family != "qwen3_moe" and "pipeline" not in layout:
            assert result["views"] == result["all"] and result["copied"] == [0] and result["received"] == 0
