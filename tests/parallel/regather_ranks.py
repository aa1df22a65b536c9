"""What the ranks of the regathering tests run: an actor learns, its weights go to vLLM, and vLLM answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlhf_megatron.topology import megatron_groups

megatron_groups.install()

from rlhf_megatron.algorithms.aggregation import token_weights  # noqa: E402
from rlhf_megatron.data.batch import batch_from_rows  # noqa: E402
from rlhf_megatron.loops.sft import negative_log_likelihood  # noqa: E402
from rlhf_megatron.models.architecture import read_architecture  # noqa: E402
from rlhf_megatron.models.hf_files import CheckpointFiles  # noqa: E402
from rlhf_megatron.models.weight_map import rollout_blocks  # noqa: E402
from rlhf_megatron.recipe import OptimizerSection, RoleSection, RolloutSection  # noqa: E402
from rlhf_megatron.regather.execute import Regather  # noqa: E402
from rlhf_megatron.regather.export import export_weights  # noqa: E402
from rlhf_megatron.regather.plan import plan_regather  # noqa: E402
from rlhf_megatron.regather.transport import PointToPoint  # noqa: E402
from rlhf_megatron.roles.role import Role  # noqa: E402
from rlhf_megatron.rollout.engine import Request, Sampling  # noqa: E402
from rlhf_megatron.rollout.vllm_engine import VllmEngine  # noqa: E402
from rlhf_megatron.topology.layout import Layout  # noqa: E402


def learn_and_answer(
    model: str,
    layout: list[int],
    rollout_tensor: int,
    rows: list[Any],
    prompts: list[list[int]],
    updates: int,
    exported: str,
    dtype: str = "float32",
    staging_bytes: int = 4096,
    rollout: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """For each update: vLLM's greedy and sampled answers, the trainer's logprobs of the latter, and an export.

    Staging is small, so that weights travel in many rounds.
    """
    architecture, world, rank = read_architecture(model), dist.get_world_size(), dist.get_rank()
    role = Role(
        "actor",
        architecture,
        Layout(*layout),
        range(world),
        RoleSection(tokens_per_gpu=200),
        dtype=dtype,
        seed=1,
        optimizer=OptimizerSection(learning_rate=2e-3, weight_decay=0.0),
    )
    with CheckpointFiles(model, architecture) as files:
        role.load(files)
    section = RolloutSection(max_response_length=16, layout={"tensor": rollout_tensor}, **(rollout or {}))
    engine = VllmEngine(model, section, dtype, 32, seed=1)
    for parameter in engine.parameters().values():
        parameter.fill_(torch.nan)  # what a regathering leaves out is seen
    held = {position: role.blocks(position) for position in range(world)}
    wanted = {other: rollout_blocks(architecture, rollout_tensor, other % rollout_tensor) for other in range(world)}
    weights_dtype = next(iter(engine.parameters().values())).dtype
    regather = Regather(plan_regather(held, wanted), rank, weights_dtype, role.device, PointToPoint(), staging_bytes)
    batch = batch_from_rows(*rows)
    weights = token_weights(batch.response_mask, batch.cu_seqlens, "token_mean")
    results = []
    for number in range(updates):
        engine.sleep()
        role.update(batch, {"weights": weights}, negative_log_likelihood)
        engine.wake_weights()
        regather.run(role.parameters(), engine.parameters())
        _clear_padding(engine.parameters())
        engine.wake_kv_cache()
        engine.weights_updated(number + 1)
        requests = [Request(row, prompt, seed=row + 1) for row, prompt in enumerate(prompts)]
        greedy = engine.generate(requests, Sampling(0.0, 1.0, -1, 12, [1]))
        sampled = engine.generate(requests, Sampling(1.0, 1.0, -1, 12, [1]))
        own = role.logprobs(batch_from_rows(prompts, [completion.token_ids for completion in sampled]))
        export_weights(
            Path(exported) / f"update-{number}", Path(model), architecture, held, role.parameters(),
            getattr(torch, dtype), role.device,
        )  # fmt: skip
        results.append(
            {
                "greedy": [completion.token_ids for completion in greedy],
                "sampled": [completion.token_ids for completion in sampled],
                "rollout_logprobs": [value for completion in sampled for value in completion.logprobs],
                "trainer_logprobs": own.logprobs[own.logprobs != 0].tolist(),
                "versions": sorted({completion.weight_version for completion in greedy}),
                "bytes_received": regather.bytes_received,
            }
        )
    return results


def _clear_padding(parameters: dict[str, torch.Tensor]) -> None:
    """Rows beyond the vocabulary are nobody's: they are set once, to something that would be seen if it were used."""
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in parameters:
            parameters[name][parameters[name].isnan()] = 0.0
