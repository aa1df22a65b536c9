"""What the ranks of test_router_replay.py do. Not a test itself."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from echo import Echo
from parallel.whole_batches import logprobs, update
from rlhf_megatron.compat import megatron
from rlhf_megatron.rollout.vllm.process_environment import prepare_environment

megatron.install()

from rlhf_megatron.algorithms.aggregation import token_weights  # noqa: E402
from rlhf_megatron.algorithms.diagnostics import mismatch_metrics  # noqa: E402
from rlhf_megatron.data.rollout_batch import batch_from_rows  # noqa: E402
from rlhf_megatron.loops.sft import negative_log_likelihood  # noqa: E402
from rlhf_megatron.models.architecture import read_architecture  # noqa: E402
from rlhf_megatron.models.choice_shape import choice_shape  # noqa: E402
from rlhf_megatron.models.hf_files import CheckpointFiles  # noqa: E402
from rlhf_megatron.recipe import ActorSection, OptimizerSection, RolloutSection  # noqa: E402
from rlhf_megatron.roles.role import Role  # noqa: E402
from rlhf_megatron.topology.layout import Layout  # noqa: E402

MAX_PROMPT, MAX_RESPONSE = 80, 40


def make_role(
    model: str, layout: dict[str, int], section: dict[str, Any], optimizer: dict[str, Any], dtype: str = "float32"
) -> Role:
    """Return an actor that replays, with the model's weights."""
    learning, architecture = OptimizerSection(**optimizer), read_architecture(model)
    role = Role(
        "actor",
        architecture,
        Layout(**layout),
        range(dist.get_world_size()),
        ActorSection(**section, optimizer=learning),
        dtype=dtype,
        seed=1,
        optimizer=learning,
        training_steps=9,
        replays_experts=True,
    )
    with CheckpointFiles(model, architecture) as files:
        role.load(files)
    return role


def learn(cases: dict[str, Any]) -> dict[str, Any]:
    """Run ``learn_by_choices`` of each case."""
    return {name: learn_by_choices(**case) for name, case in cases.items()}


def learn_by_choices(
    model: str,
    layout: dict[str, int],
    section: dict[str, Any],
    optimizer: dict[str, Any],
    rows: list[Any],
    choices: list[Any],
    steps: int,
) -> dict[str, Any]:
    """Return logprobs of rows whose experts are given, without and with these, and updates by the given ones."""
    role = make_role(model, layout, section, optimizer)
    shape = choice_shape(role.architecture)
    assert shape is not None
    given = [torch.tensor(of_row, dtype=shape.dtype) for of_row in choices]
    batch = batch_from_rows(*rows, expert_choices=given, choices=shape)
    weights = token_weights(batch.response_mask, batch.cu_seqlens, "token_mean")
    own = logprobs(role, batch.with_fields(expert_choices=None)).logprobs
    before = logprobs(role, batch).logprobs
    updates = [update(role, batch, {"weights": weights}, negative_log_likelihood) for _ in range(steps)]
    return {
        "own": own[batch.response_mask].tolist(),
        "logprobs": before[batch.response_mask].tolist(),
        "losses": [metrics["loss"] for metrics in updates],
        "grad_norms": [metrics["grad_norm"] for metrics in updates],
    }


def serve(model: str, dtype: str, **settings: Any) -> Any:
    """Return an engine with the model's weights that records choices."""
    prepare_environment()
    from rlhf_megatron.rollout.engine_registry import make_engine

    section = RolloutSection.model_validate({"max_response_length": MAX_RESPONSE, **settings})
    engine = make_engine(model, section, dtype, MAX_PROMPT, seed=1, load_format="auto", records_experts=True)
    engine.weights_updated(1)
    return engine


def record(model: str, **settings: Any) -> list[Any]:
    """Return prompts of two blocks with a few responses, some of them in two parts, of which some were paused in
    between, and some in turns with an environment: (tokens, which experts each reached)."""
    engine = serve(model, "float32", **settings)
    from rlhf_megatron.rollout.engine import Request, Sampling
    from rlhf_megatron.rollout.work_queue import WorkQueue

    sampling = Sampling(1.0, 1.0, -1, MAX_RESPONSE, ())
    prompts = [[(7 * group + token) % 240 + 2 for token in range(MAX_PROMPT - 9 * group)] for group in range(3)]
    requests = [Request(row, prompts[row // 3], 10 + row, row // 3) for row in range(9)]
    begun = engine.generate([dataclasses.replace(request, max_tokens=7) for request in requests[:4]], sampling)
    resumed = [dataclasses.replace(request, begun=part) for request, part in zip(requests[:4], begun, strict=True)]
    short = [dataclasses.replace(request, key=request.row_id, max_tokens=5) for request in requests[4:6]]
    long = [dataclasses.replace(request, key=request.row_id) for request in requests[6:]]
    first = engine.generate([*short, *long], sampling, queue=WorkQueue(range(2), 1), pauses=True)
    assert engine.record.paused == len(long)
    engine.weights_updated(2)  # the same
    going_on = [dataclasses.replace(request, begun=part) for request, part in zip(long, first[2:], strict=True)]
    rows = {each.row_id: each for each in (*first, *engine.generate([*going_on, *resumed], sampling, pauses=True))}
    in_turns = [Request(9 + row, prompt, 10 + row, 9 + row) for row, prompt in enumerate(prompts)]
    ends_by_most = Sampling(1.0, 1.0, -1, MAX_RESPONSE, range(40, 250))
    spoken = engine.generate(in_turns, ends_by_most, environment=Echo(3))
    assert all(completion.turns == 3 and not all(completion.sampled) for completion in spoken)
    rows |= {each.row_id: each for each in spoken}
    return [
        ([*request.prompt_token_ids, *rows[request.row_id].token_ids], rows[request.row_id].expert_choices.tolist())
        for request in (*requests, *in_turns)
    ]


def mismatch(model: str, dtype: str, layout: dict[str, int], rollout: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return how far trainer and rollout disagree about what the rollout sampled, with replay and without."""
    engine = serve(model, dtype, **rollout)
    from rlhf_megatron.rollout.engine import Request, Sampling

    prompts = [[(11 * row + 3 * token) % 240 + 2 for token in range(MAX_PROMPT - row)] for row in range(16)]
    requests = [Request(row, prompt, 10 + row, row) for row, prompt in enumerate(prompts)]
    completions = engine.generate(requests, Sampling(1.0, 1.0, -1, MAX_RESPONSE, ()))
    role = make_role(model, layout, {"tokens_per_gpu": 400}, {"learning_rate": 1e-6}, dtype)
    batch = batch_from_rows(
        prompts,
        [completion.token_ids for completion in completions],
        [completion.logprobs for completion in completions],
        expert_choices=[completion.expert_choices for completion in completions],
        choices=choice_shape(role.architecture),
    )
    return {
        name: mismatch_metrics(logprobs(role, each).logprobs, batch.rollout_logprobs, batch.response_mask)
        for name, each in {"off": batch.with_fields(expert_choices=None), "rollout": batch}.items()
    }
