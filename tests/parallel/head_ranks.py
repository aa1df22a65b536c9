"""Ranks of the tests of heads in EAGLE-3's form: an actor, and a head beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parallel.parity_ranks import hand_over
from parallel.whole_batches import update
from rlhf_megatron.compat import megatron

megatron.install()

from rlhf_megatron.algorithms.aggregation import token_weights  # noqa: E402
from rlhf_megatron.checkpoint.hugging_face import export_weights  # noqa: E402
from rlhf_megatron.data.rollout_batch import batch_from_rows  # noqa: E402
from rlhf_megatron.loops.sft import negative_log_likelihood  # noqa: E402
from rlhf_megatron.models.architecture import Architecture, read_architecture  # noqa: E402
from rlhf_megatron.models.draft_heads import read_head  # noqa: E402
from rlhf_megatron.models.draft_vocabulary import read_draft_vocabulary  # noqa: E402
from rlhf_megatron.models.hf_export import Companions  # noqa: E402
from rlhf_megatron.models.hf_files import CheckpointFiles  # noqa: E402
from rlhf_megatron.recipe import OptimizerSection  # noqa: E402
from rlhf_megatron.recipe.role_sections import ActorSection  # noqa: E402
from rlhf_megatron.roles.head_learning import HeadLearning  # noqa: E402
from rlhf_megatron.roles.role import Role  # noqa: E402
from rlhf_megatron.topology.layout import Layout  # noqa: E402


def learn_heads(cases: list[dict[str, Any]]) -> list[list[dict[str, float]]]:
    """Return what ``learn_head`` does of each case, in one launch."""
    return [learn_head(**case) for case in cases]


def learn_head(
    model: str,
    head: str,
    layout: dict[str, int],
    rows: list[Any],
    optimizer: dict[str, Any],
    temperature: float,
    steps: int,
    exported: str,
    section: dict[str, Any],
    hands_over: bool = False,
    dtype: str = "float32",
) -> list[dict[str, float]]:
    """Train the head for ``steps`` beside an actor that stands still; return the metrics of each, and write it.

    ``hands_over``: after the first step another head takes its state, by files.
    """
    architecture = read_architecture(model)
    still, learning = OptimizerSection(**{**optimizer, "learning_rate": 1e-30}), OptimizerSection(**optimizer)
    dense = {axis: degree for axis, degree in layout.items() if axis != "expert"}

    def make(name: str, read: Architecture, degrees: dict[str, int], its_optimizer: OptimizerSection) -> Role:
        return Role(
            name,
            read,
            Layout(**degrees),
            range(dist.get_world_size()),
            ActorSection(**{"tokens_per_gpu": 60, **section}, optimizer=its_optimizer),
            dtype=dtype,
            seed=1,
            temperature=temperature,
            optimizer=its_optimizer,
            training_steps=steps,
        )

    actor, description = make("actor", architecture, layout, still), read_head(head, architecture)
    vocabulary, draft = read_draft_vocabulary(head, description), make("draft", description, dense, learning)
    for role, folder in ((actor, model), (draft, head)):
        with CheckpointFiles(folder, role.architecture) as files:
            role.load(files)
    batch = batch_from_rows(*rows)
    weights = {"weights": token_weights(batch.response_mask, batch.cu_seqlens, "token_mean")}
    beside, metrics = HeadLearning(actor, draft, vocabulary), []
    for step in range(steps):
        if hands_over and step == 1:
            before, draft = draft, make("draft", description, dense, learning)
            hand_over(before, draft, Path(f"{exported}, checkpoint"))
            beside = HeadLearning(actor, draft, vocabulary)
        metrics.append(update(actor, batch, weights, negative_log_likelihood, beside=beside))
    export_weights(
        Path(exported),
        Companions(Path(head)),
        description,
        draft.shard_spec(),
        draft.parameters(),
        torch.float32,
        draft.device,
    )
    return metrics
