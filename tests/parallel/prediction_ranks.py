"""Ranks of the tests of prediction layers: an actor, and its layer beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parallel.whole_batches import update
from rlhf_megatron.compat import megatron

megatron.install()

from rlhf_megatron.algorithms.aggregation import token_weights  # noqa: E402
from rlhf_megatron.checkpoint.hugging_face import export_weights  # noqa: E402
from rlhf_megatron.data.rollout_batch import batch_from_rows  # noqa: E402
from rlhf_megatron.loops.sft import negative_log_likelihood  # noqa: E402
from rlhf_megatron.models.architecture import read_architecture  # noqa: E402
from rlhf_megatron.models.hf_export import Companions  # noqa: E402
from rlhf_megatron.models.hf_files import CheckpointFiles  # noqa: E402
from rlhf_megatron.recipe import OptimizerSection  # noqa: E402
from rlhf_megatron.recipe.role_sections import ActorSection  # noqa: E402
from rlhf_megatron.roles.placed import PlacedRole  # noqa: E402
from rlhf_megatron.roles.prediction_learning import PredictionLearning  # noqa: E402
from rlhf_megatron.topology.layout import Layout  # noqa: E402


def predict(
    model: str,
    layout: dict[str, int],
    rows: list[Any],
    optimizer: dict[str, Any],
    steps: int,
    exported: str,
    section: dict[str, Any] | None = None,
    dtype: str = "float32",
) -> list[dict[str, float]]:
    """Train the layer for ``steps`` beside an actor that stands still; return the metrics of each, and write both."""
    architecture, of_actor = read_architecture(model), Layout(**layout)
    stage = {axis: degree for axis, degree in layout.items() if "pipeline" not in axis}
    of_draft = Layout(**stage)
    still = OptimizerSection(**{**optimizer, "learning_rate": 1e-30})
    learning = OptimizerSection(**optimizer)
    settings: dict[str, Any] = {"tokens_per_gpu": 60} | (section or {})
    roles = []
    for name, read, placed, its_optimizer in (
        ("actor", architecture, of_actor, still),
        ("draft", architecture.prediction_model(), of_draft, learning),
    ):
        role = PlacedRole(
            name,
            read,
            placed,
            range(dist.get_world_size() - placed.size, dist.get_world_size()),
            ActorSection(**settings, optimizer=its_optimizer),
            dtype,
            seed=1,
            optimizer=its_optimizer,
            training_steps=steps,
        )
        with CheckpointFiles(model, read) as files:
            role.load(files)
        roles.append(role)
    actor, draft = roles
    assert actor.local is not None
    beside = PredictionLearning(actor.local, draft.local)
    batch = batch_from_rows(*rows)
    weights = token_weights(batch.response_mask, batch.cu_seqlens, "token_mean")
    metrics = [update(actor, batch, {"weights": weights}, negative_log_likelihood, beside=beside) for _ in range(steps)]
    export_weights(
        Path(exported),
        Companions(Path(model)),
        draft.architecture,
        draft.weights.shard_spec(),
        draft.weights.parameters(),
        torch.float32,
        actor.local.device,
    )
    return metrics
