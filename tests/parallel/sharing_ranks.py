"""What the ranks of the tests of shared weights run: an actor learns, and vLLM reads its memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.whole_batches import logprobs, update
from rlhf_megatron.compat import megatron

megatron.install()

from rlhf_megatron.algorithms.aggregation import token_weights  # noqa: E402
from rlhf_megatron.data.rollout_batch import batch_from_rows  # noqa: E402
from rlhf_megatron.loops.sft import negative_log_likelihood  # noqa: E402
from rlhf_megatron.models.architecture import read_architecture  # noqa: E402
from rlhf_megatron.models.families import mixture  # noqa: E402
from rlhf_megatron.models.hf_files import CheckpointFiles  # noqa: E402
from rlhf_megatron.recipe import OptimizerSection, RoleSection, RolloutSection  # noqa: E402
from rlhf_megatron.regather.execute import Regather  # noqa: E402
from rlhf_megatron.regather.plan import plan_regather  # noqa: E402
from rlhf_megatron.regather.shard_specs import rollout_shards  # noqa: E402
from rlhf_megatron.regather.views import describe_sharing, shareable  # noqa: E402
from rlhf_megatron.roles.role import Role  # noqa: E402
from rlhf_megatron.rollout.engine import Request, Sampling  # noqa: E402
from rlhf_megatron.rollout.vllm.vllm_engine import VllmEngine  # noqa: E402
from rlhf_megatron.topology.layout import Layout  # noqa: E402

_ENGINES: list[VllmEngine] = []  # one that is collected takes torch.distributed with it


def compare_all(cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Run ``compare`` for each case; vLLM allows one size of replicas in a process."""
    mixture.STACK_ELEMENTS = 2**13  # so that a layer's experts are several parameters
    return {name: compare(**case) for name, case in cases.items()}


def compare(
    model: str,
    layout: dict[str, int],
    rollout_layout: dict[str, Any],
    rows: list[Any],
    prompts: list[list[int]],
    dtype: str = "float32",
    rollout: dict[str, Any] | None = None,
    distributed: bool = True,
    beside_copies: bool = True,
) -> dict[str, Any]:
    """Run two engines beside one actor: one with all that can be shared, and, if asked for, one with copies of
    everything.

    What they answer after each of two optimizer steps, and after one parameter of the actor's was changed by hand.
    """
    architecture, world, rank = read_architecture(model), dist.get_world_size(), dist.get_rank()
    role = Role(
        "actor", architecture, Layout(**layout), range(world), RoleSection(tokens_per_gpu=200), dtype=dtype, seed=1,
        optimizer=OptimizerSection(learning_rate=2e-3, weight_decay=0.1, distributed=distributed),
    )  # fmt: skip
    with CheckpointFiles(model, architecture) as files:
        role.load(files)
    section = RolloutSection(max_response_length=16, layout=rollout_layout, **(rollout or {}))
    wanted = rollout_shards(architecture, section.layout.tensor, range(world), section.layout.expert_parallel)
    plan = plan_regather(role.shard_spec(), wanted, rank)
    offered = shareable(plan, role.parameters())
    ways = [offered, None] if beside_copies else [offered]
    engines = [VllmEngine(model, section, dtype, 32, seed=1, shared=shared) for shared in ways]
    _ENGINES.extend(engines)
    views = own_memory(role.parameters(), engines[0].parameters())
    for name, parameter in engines[0].parameters().items():
        if name not in views:
            parameter.fill_(torch.nan)  # what a regathering leaves out is seen
    types = [next(iter(engine.parameters().values())).dtype for engine in engines]
    regathers = [Regather(plan, each, role.device, source_dtype=getattr(torch, dtype)) for each in types]
    batch = batch_from_rows(*rows)
    weights = token_weights(batch.response_mask, batch.cu_seqlens, "token_mean")
    answered: list[list[Any]] = []
    of_trainer: list[list[float]] = []

    def answer() -> None:
        for engine, regather in zip(engines, regathers, strict=True):
            engine.wake_weights()
            regather.run(role.parameters(), engine.parameters())
            regather.verify(role.parameters(), engine.parameters())
            engine.wake_kv_cache()
            engine.weights_updated(len(answered) + 1)
        answered.append([answers(engine, prompts) for engine in engines])
        own = logprobs(role, batch_from_rows(prompts, [tokens for tokens, _ in answered[-1][0]]))
        of_trainer.append(own.logprobs[own.logprobs != 0].tolist())
        for engine in engines:
            engine.sleep()

    for _ in range(2):
        update(role, batch, {"weights": weights}, negative_log_likelihood)
        answer()
    role.parameters()["decoder.layers.0.self_attention.linear_proj.weight"].mul_(-1.0)
    answer()
    return {
        "views": sorted(views),
        "all": sorted(engines[0].parameters()),
        "of_copies": sorted(own_memory(role.parameters(), engines[-1].parameters())),
        "answers": answered,
        "of_trainer": of_trainer,
        "copied": [regather.bytes_copied for regather in regathers],
        "received": regathers[0].bytes_received,
        "told": describe_sharing(plan, role.parameters(), engines[0].parameters()),
        "told_of_copies": describe_sharing(plan, role.parameters(), engines[-1].parameters()),
    }


def own_memory(actors: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> list[str]:
    """Return which of an engine's parameters lie in a storage of the actor's."""
    storages = {tensor.untyped_storage().data_ptr() for tensor in actors.values()}
    return [name for name, tensor in parameters.items() if tensor.untyped_storage().data_ptr() in storages]


def answers(engine: VllmEngine, prompts: list[list[int]]) -> list[Any]:
    """Return greedy tokens, and their logprobs."""
    requests = [Request(row, prompt, seed=row + 1) for row, prompt in enumerate(prompts)]
    completions = engine.generate(requests, Sampling(0.0, 1.0, -1, 12, ()))
    return [[completion.token_ids, completion.logprobs] for completion in completions]
