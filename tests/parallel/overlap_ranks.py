"""The part of ranks in the tests of overlapped gradients and weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_megatron.compat import megatron

megatron.install()

from parallel.parity_ranks import hand_over  # noqa: E402
from parallel.whole_batches import logprobs, update  # noqa: E402
from rlhf_megatron.algorithms.aggregation import token_weights  # noqa: E402
from rlhf_megatron.checkpoint.role_state import role_tensors  # noqa: E402
from rlhf_megatron.data.rollout_batch import RolloutBatch, batch_from_rows  # noqa: E402
from rlhf_megatron.loops.sft import negative_log_likelihood  # noqa: E402
from rlhf_megatron.models.architecture import read_architecture  # noqa: E402
from rlhf_megatron.models.hf_files import CheckpointFiles  # noqa: E402
from rlhf_megatron.recipe import ActorSection, OptimizerSection  # noqa: E402
from rlhf_megatron.roles import megatron_optimizer, streaming  # noqa: E402
from rlhf_megatron.roles.role import Role  # noqa: E402
from rlhf_megatron.topology.layout import Layout  # noqa: E402

OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True}
BUCKET_ELEMENTS, SECONDS_BETWEEN_BUCKETS = 2000, 0.01


def run_cases(cases: dict[str, dict[str, Any]], folder: str) -> dict[str, Any]:
    """Run several cases of ``learn_both_ways`` on the ranks of one launch."""
    streaming.PIECE_BYTES, megatron_optimizer.BUCKET_ELEMENTS = 2**16, BUCKET_ELEMENTS
    return {name: learn_both_ways(folder=Path(folder) / name, **case) for name, case in cases.items()}


def learn_both_ways(
    model: str, layout: dict[str, int], rows: list[Any], section: dict[str, Any], optimizer: dict[str, Any],
    keys: dict[str, bool], dtype: str, folder: Path,
) -> dict[str, Any]:  # fmt: skip
    """Return the largest difference of steps with ``keys`` from those without, and from those of a role that
    resumed."""
    batch = batch_from_rows(*rows)
    plain, overlapped = (_role(model, layout, section, optimizer | given, dtype) for given in ({}, keys))
    found = {"metrics": 0.0, "logprobs": 0.0}
    for step in range(4):
        metrics = [_update(role, batch) for role in (plain, overlapped)]
        differences = [abs(metrics[1][name] - value) / max(1.0, abs(value)) for name, value in metrics[0].items()]
        found["metrics"] = max(found["metrics"], *differences)
        if step % 2:  # else the next step's passes are the first to read the weights
            outputs = [logprobs(role, batch).logprobs for role in (plain, overlapped)]
            found["logprobs"] = max(found["logprobs"], _largest(*outputs))
    resumed = _role(model, layout, section, optimizer | keys, dtype)
    hand_over(overlapped, resumed, folder)
    for role in (plain, overlapped, resumed):
        _update(role, batch)
    weights = [list(role.parameters().values()) for role in (plain, overlapped, resumed)]
    found["weights"] = max(map(_largest, weights[0], weights[1]))
    found["resumed"] = max(map(_largest, weights[1], weights[2]))
    assert overlapped.trainer is not None
    chunks = overlapped.trainer.chunks
    buckets = [bucket for chunk in chunks for bucket in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)]
    found["buckets"] = len(buckets)
    found["threads"] = max(
        _exchanged_over(bucket)._get_backend(torch.device("cpu")).options._threads for bucket in buckets
    )
    return found


def _exchanged_over(bucket: Any) -> Any:
    """Return the process group of one of Megatron's groups of buckets."""
    if bucket.ddp_config.use_distributed_optimizer:
        return bucket.intra_distributed_optimizer_instance_group
    return bucket.data_parallel_group


def read_while_weights_travel(model: str, rows: list[Any], optimizer: dict[str, Any]) -> dict[str, float]:
    """Return the largest difference from the plain way of what reads weights whose gathers end late, on a rank that is
    early.

    Each reader comes directly after a step, by a role of its own.
    """
    megatron_optimizer.BUCKET_ELEMENTS = BUCKET_ELEMENTS
    batch, layout = batch_from_rows(*rows), {"data": dist.get_world_size()}
    section = {"tokens_per_gpu": 30, "offload": {"parameters": True}}
    found = {}
    for name, read in READERS.items():
        plain, overlapped = (_role(model, layout, section, optimizer | given, "float32") for given in ({}, OVERLAPPED))
        _slow_down(overlapped)
        for role in (plain, overlapped):
            _update(role, batch)
        found[name] = max(map(_largest, read(plain, batch), read(overlapped, batch)))
    return found


def _after_offload(role: Role, _: RolloutBatch) -> list[Tensor]:
    role.offload()
    return list(role.parameters().values())


def _saved(role: Role, _: RolloutBatch) -> list[Tensor]:
    """Return a role's weights, read beside a checkpoint, which has ranges that differ with the buckets."""
    role_tensors(role, {})
    return [parameter.data for parameter in role.shard.module.parameters()]


READERS: dict[str, Callable[[Role, RolloutBatch], list[Tensor]]] = {
    "logprobs": lambda role, batch: [logprobs(role, batch).logprobs],
    "another step": lambda role, batch: [torch.tensor([_update(role, batch)["loss"]])],
    "weights for a weight sync or an export": lambda role, _: list(role.parameters().values()),
    "checkpoint": _saved,
    "offload": _after_offload,
}


def _slow_down(role: Role) -> None:
    """Have the last rank begin each gather late, so that it is on its way for long on the others."""
    assert role.trainer is not None and role.trainer._gather is not None
    if dist.get_rank() < dist.get_world_size() - 1:
        return
    for bucket in role.trainer._gather._buckets:
        start = bucket.start_param_sync
        bucket.start_param_sync = lambda start=start: (time.sleep(SECONDS_BETWEEN_BUCKETS), start())


def _role(model: str, layout: dict[str, int], section: dict[str, Any], optimizer: dict[str, Any], dtype: str) -> Role:
    architecture, learning = read_architecture(model).for_rows(64), OptimizerSection(**optimizer)
    role = Role(
        "actor", architecture, Layout(**layout), range(dist.get_world_size()),
        ActorSection(**section, optimizer=learning), dtype=dtype, seed=1, optimizer=learning, training_steps=10,
    )  # fmt: skip
    with CheckpointFiles(model, architecture) as files:
        role.load(files)
    return role


def _update(role: Role, batch: RolloutBatch) -> dict[str, float]:
    weights = token_weights(batch.response_mask, batch.cu_seqlens, "token_mean")
    return update(role, batch, {"weights": weights}, negative_log_likelihood)


def _largest(one: Tensor, other: Tensor) -> float:
    """Return the largest difference."""
    return float((one.float() - other.float()).abs().max())
