"""Expected time in which data-parallel ranks exchange gradients and weights and compute nothing: arithmetic alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlhf_megatron.planning.links import ring
from rlhf_megatron.planning.stage_memory import ELEMENT_BYTES, GB, StageMemory
from rlhf_megatron.recipe import OptimizerSection, RLRecipe, RoleSection
from rlhf_megatron.recipe.world_checks import layout_of
from rlhf_megatron.topology.role_layout import make_layout

_GRADIENT_BYTES = 4  # float32
_BUCKET, _BUCKET_OF_A_RANK = 40_000_000, 1_000_000  # elements, of Megatron's
_BACKWARD = 2 / 3  # of a micro-batch's time


def exchange_seconds(
    recipe: RLRecipe, section: RoleSection, stages: Sequence[StageMemory], gpus: int, tokens: float, passes: float,
    optimizer: OptimizerSection,
) -> float:  # fmt: skip
    """Return those of a step's updates with the keys of ``optimizer``; ``passes`` are the seconds of these updates'
    passes over the ``tokens`` of all rows.

    Gradients travel beside the backward pass of the last micro-batch but for the last bucket, weights beside the first
    forward pass but for the first one. The actor's are read for a weight sync as soon as the last update has ended.
    """
    layout = make_layout(layout_of(recipe, section), gpus)
    ranks, updates = layout.data * layout.context, recipe.batch.updates_per_step
    if ranks == 1:
        return 0.0
    elements = max(stage.gradients for stage in stages) * GB / _GRADIENT_BYTES
    second_for_each_byte = (ranks - 1) / ranks / ring(recipe.cluster, ranks, layout.tensor)
    gradients = _GRADIENT_BYTES * elements * second_for_each_byte * (1 if optimizer.distributed else 2)
    weight_bytes = _GRADIENT_BYTES if section.adapters else ELEMENT_BYTES[recipe.dtype_of(section)]
    weights = weight_bytes * elements * second_for_each_byte * optimizer.distributed
    of_rank = tokens / recipe.batch.minibatches_per_step / layout.data
    micro_batches = max(1.0, of_rank / (section.update_tokens * layout.context))
    micro_batch = passes / updates / micro_batches
    buckets = max(1, math.ceil(elements / max(_BUCKET, _BUCKET_OF_A_RANK * ranks)))
    seconds = updates * weights
    if optimizer.overlap_param_gather:
        hidden_updates = updates - (section is recipe.actor)
        seconds -= hidden_updates * min((1 - _BACKWARD) * micro_batch, weights * (1 - 1 / buckets))
    if optimizer.overlap_grad_reduce:
        gradients -= min(_BACKWARD * micro_batch, gradients * (1 - 1 / buckets))
    return seconds + updates * gradients
