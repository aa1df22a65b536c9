"""A vLLM replica of two ranks answers as one of a single rank does, and leaves the trainer's ranks alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hugging_face import make_model
from parallel.ranks import run_ranks

MAX_PROMPT, MAX_RESPONSE = 48, 16


def answers(model: str, tensor: int) -> dict[str, Any]:
    """Return tokens and logprobs, greedy and sampled, from replicas of ``tensor`` ranks; run on every rank."""
    from rlhf_megatron.rollout.vllm.process_environment import prepare_environment

    prepare_environment()
    from rlhf_megatron.models.architecture import read_architecture
    from rlhf_megatron.models.hf_files import CheckpointFiles
    from rlhf_megatron.models.weight_map import rollout_blocks
    from rlhf_megatron.models.weight_source import load_blocks
    from rlhf_megatron.recipe import RolloutSection
    from rlhf_megatron.recipe.rollout import RolloutLayoutSection
    from rlhf_megatron.rollout.engine import Request, Sampling
    from rlhf_megatron.rollout.vllm.vllm_engine import VllmEngine

    rank = dist.get_rank()
    torch.manual_seed(rank)  # the trainer's random numbers differ between ranks; sampling must not
    state = torch.get_rng_state()
    section = RolloutSection(
        max_response_length=MAX_RESPONSE, max_num_seqs=4, layout=RolloutLayoutSection(tensor=tensor)
    )
    engine = VllmEngine(model, section, "float32", MAX_PROMPT, seed=1)
    architecture = read_architecture(model)
    with CheckpointFiles(model, architecture) as files:
        load_blocks(rollout_blocks(architecture, tensor, rank % tensor), engine.parameters(), files)
    engine.weights_updated(1)

    requests = [Request(row, [(7 * row + k) % 240 + 2 for k in range(8 + row)], 100 + row) for row in range(9)]
    greedy = engine.generate(requests, Sampling(0.0, 1.0, -1, MAX_RESPONSE, ()))
    sampled = engine.generate(requests, Sampling(1.0, 1.0, -1, MAX_RESPONSE, ()))
    total = torch.ones(1)
    dist.all_reduce(total)
    return {
        "greedy": [completion.token_ids for completion in greedy],
        "sampled": [completion.token_ids for completion in sampled],
        "logprobs": [completion.logprobs for completion in sampled],
        "random_state_kept": bool(torch.equal(state, torch.get_rng_state())),
        "ranks_that_add_up": int(total.item()),
        "heads": engine.parameters()["model.layers.0.self_attn.qkv_proj.weight"].shape[0] // 32,
    }


@pytest.fixture(scope="module")
def sockets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sockets")


@pytest.fixture(scope="module")
def by_tensor(tmp_path_factory: pytest.TempPathFactory, sockets: Path) -> dict[int, list[dict[str, Any]]]:
    model: Path = make_model(tmp_path_factory.mktemp("model"), "qwen3", tied=False)
    variables = {"VLLM_RPC_BASE_PATH": str(sockets)}
    return {
        tensor: run_ranks(answers, tensor, {"model": str(model), "tensor": tensor}, environment=variables)
        for tensor in (1, 2)
    }


def test_two_ranks_of_a_replica_answer_as_one(by_tensor: dict[int, list[dict[str, Any]]]) -> None:
    reference = by_tensor[1][0]
    for result in by_tensor[2]:
        assert result["greedy"] == reference["greedy"]
        assert result["sampled"] == reference["sampled"]
        torch.testing.assert_close(
            torch.tensor(result["logprobs"]), torch.tensor(reference["logprobs"]), atol=1e-4, rtol=0
        )
    assert reference["greedy"] != reference["sampled"]


def test_ranks_of_a_replica_share_the_heads(by_tensor: dict[int, list[dict[str, Any]]]) -> None:
    assert [result["heads"] for result in by_tensor[1]] == [8]
    assert [result["heads"] for result in by_tensor[2]] == [4, 4]


def test_the_trainer_can_go_on(by_tensor: dict[int, list[dict[str, Any]]]) -> None:
    for result in by_tensor[2]:
        assert result["random_state_kept"]
        assert result["ranks_that_add_up"] == 2


def test_no_socket_is_left_behind(by_tensor: dict[int, list[dict[str, Any]]], sockets: Path) -> None:
    assert by_tensor and not list(sockets.iterdir())
