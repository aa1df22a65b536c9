"""Memory that a recipe needs on each GPU, phase by phase. Arithmetic only; what it leaves out is named.

Not counted: fragmentation, buffers of collectives, and the kernels' workspaces, for which ``RESERVED_GB`` stands.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path

from rlhf_megatron.models.architecture import Architecture
from rlhf_megatron.models.choice_shape import choice_shape
from rlhf_megatron.models.flops import kv_cache_bytes, kv_cache_bytes_per_token
from rlhf_megatron.models.map_files import read_map, remembered_file
from rlhf_megatron.models.weight_map import has_rollout_table
from rlhf_megatron.planning.model_folders import given_folder
from rlhf_megatron.planning.parameters import (
    adapter_parameters,
    model_parameters,
)
from rlhf_megatron.planning.rollout_parameters import (
    Replica,
    quantized_bytes,
    replica_of,
    rollout_parameters,
    shareable_parameters,
)
from rlhf_megatron.planning.stage_memory import ELEMENT_BYTES, GB, StageMemory, moments_bytes, role_memory
from rlhf_megatron.recipe.drafting import DRAFT
from rlhf_megatron.recipe.judge import JudgeSection
from rlhf_megatron.recipe.recipe import Recipe
from rlhf_megatron.recipe.rl_recipe import RLRecipe
from rlhf_megatron.recipe.role_sections import RoleSection
from rlhf_megatron.recipe.world_checks import judge_ranks, role_ranks, roles_together, rollout_ranks
from rlhf_megatron.topology.role_layout import make_layout

TIGHT = 0.95  # of the memory, beyond which what the estimate leaves out may decide
RESERVED_GB = 2.0  # CUDA context, NCCL buffers, workspaces of cuBLAS and attention
SLEEPING_GB = 2.0  # what a sleeping vLLM keeps: its CUDA graphs and their memory
ROLLOUT_ACTIVATIONS_GB = 2.0  # vLLM's own activations and sampling buffers, within its share


@dataclasses.dataclass(frozen=True)
class RolloutMemory:
    """GB on each GPU of the rollout, and what fits into its KV cache; ``shared`` of the weights are the actor's memory,
    ``reserved`` is all that vLLM takes while it generates. ``choices`` of experts are kept beside that, for each token
    of the cache, also while vLLM sleeps. ``is_known``: where vLLM has its weights; else none count as shared."""

    replicas: int
    weights: float
    shared: float
    kv_cache: float
    reserved: float
    cache_tokens: int
    full_length_sequences: int
    choices: float = 0.0
    is_known: bool = True


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Memory of a whole recipe: each role's stages, and for each phase what the fullest GPU needs.

    Of a judge whose model is not known, the cache counts alone.
    """

    roles: dict[str, list[StageMemory]]
    rollout: RolloutMemory | None
    phases: dict[str, float]
    judge: RolloutMemory | None = None


def estimate(recipe: Recipe, architectures: Mapping[str, Architecture], world_size: int) -> Estimate:
    """Return the memory of ``recipe``, whose roles have ``architectures``, on ``world_size`` GPUs that its layouts
    fit."""
    roles = {
        name: role_memory(recipe, section, architectures[name], len(role_ranks(recipe, name, world_size)))
        for name, section in recipe.roles_made.items()
    }
    rollout = judge = None
    if isinstance(recipe, RLRecipe):
        rollout = _rollout_memory(recipe, architectures["actor"], world_size, architectures.get(DRAFT))
        judge = _judge_memory(recipe, recipe.judge, architectures.get("judge"), world_size) if recipe.judge else None
    phases = [
        _phases(
            recipe,
            {name: roles[name] for name in roles if name in here},
            rollout if "rollout" in here else None,
            judge if "judge" in here else None,
        )
        for here in roles_together(recipe, world_size)
    ]
    return Estimate(roles, rollout, {phase: max(each[phase] for each in phases) for phase in phases[0]}, judge)


def _phases(
    recipe: Recipe,
    roles: dict[str, list[StageMemory]],
    rollout: RolloutMemory | None,
    judge: RolloutMemory | None,
) -> dict[str, float]:
    """Return the need of a GPU with these roles, and rollout and judge if there is some on it, in each phase; the
    roles' fullest stages are taken to meet on one GPU."""
    fullest = {name: max(stage.resident for stage in stages) for name, stages in roles.items()}
    resident = RESERVED_GB + sum(fullest.values())
    updates = (resident - fullest[name] + max(stage.update for stage in stages) for name, stages in roles.items())
    update = max(updates, default=resident)
    if not isinstance(recipe, RLRecipe):
        return {"update": update}
    gives_way = bool(roles) and not recipe.rollout_is_ahead
    choices = rollout.choices if rollout else 0.0
    awake = asleep = 0.0
    for engine, section in ((rollout, recipe.rollout), (judge, recipe.judge)):
        reserved = engine.reserved if engine else 0.0
        sleeps = gives_way and section is not None and section.sleep
        awake, asleep = awake + reserved, asleep + (min(reserved, SLEEPING_GB) if sleeps else reserved)
    forward = max((stage.forward for stages in roles.values() for stage in stages), default=0.0)
    return {
        "generate": resident + awake + choices + recipe.regather.buffer_mb / 1024,
        "logprobs": resident + asleep + choices + forward,
        "update": update + asleep + choices,
    }


def checkpoint_bytes(recipe: Recipe, architectures: Mapping[str, Architecture]) -> float:
    """Return the size of one checkpoint: weights, in float32, and both of Adam's moments of every role that learns."""
    learning = {name: section for name, section in recipe.roles_made.items() if section.learns_by}
    return sum(
        (4.0 + moments_bytes(section)) * _learning_parameters(section, architectures[name])
        for name, section in learning.items()
    )


def _learning_parameters(section: RoleSection, architecture: Architecture) -> int:
    """Return trainable parameters of a learning role: all, or its adapters'."""
    lora = section.adapters
    return adapter_parameters(architecture, lora) if lora else model_parameters(architecture)


def export_bytes(recipe: Recipe, architectures: Mapping[str, Architecture]) -> float:
    """Return the size of one export: the actor's weights in model.dtype, and its adapters beside them."""
    actor = architectures["actor"]
    adapters = 4.0 * _learning_parameters(recipe.actor, actor) if recipe.actor.lora else 0.0
    return ELEMENT_BYTES[recipe.model.dtype] * model_parameters(actor) + adapters


def kv_element_bytes(recipe: RLRecipe) -> int:
    """Return the bytes of a number in the rollout's KV cache."""
    return 1 if recipe.rollout.kv_cache_dtype else ELEMENT_BYTES[recipe.rollout.dtype or recipe.model.dtype]


def _rollout_memory(
    recipe: RLRecipe, architecture: Architecture, world_size: int, draft: Architecture | None = None
) -> RolloutMemory:
    section = recipe.rollout
    tensor, size = section.layout.tensor, ELEMENT_BYTES[section.dtype or recipe.model.dtype]
    replica = _replica(recipe, architecture)
    held = rollout_parameters(architecture, tensor, section.layout.expert_parallel, replica)
    weights = size * held.total / GB
    if draft:
        weights += size * model_parameters(draft) / tensor / GB
    shared = size * _shared_parameters(recipe, architecture, replica, world_size) / GB
    if section.quantization:
        weights += quantized_bytes(architecture, tensor, section.layout.expert_parallel, replica) / GB
    beside_cache = weights - shared + ROLLOUT_ACTIVATIONS_GB
    if section.kv_cache_gb is not None:
        cache = section.kv_cache_gb
        share = beside_cache + cache
    else:
        share = section.gpu_memory_utilization * recipe.cluster.gpu_memory_gb
        cache = max(0.0, share - beside_cache)
    cached = kv_element_bytes(recipe)
    models = [architecture, *([draft] if draft else [])]
    of_token = sum(kv_cache_bytes_per_token(model, tensor, cached) for model in models)
    of_row = sum(kv_cache_bytes(model, tensor, cached, recipe.longest_sequence) for model in models)
    tokens, sequences = int(cache * GB // of_token), int(cache * GB // of_row)
    replicas = len(rollout_ranks(recipe, world_size)) // tensor
    choices = tokens * _choice_bytes(recipe, architecture) / GB
    return RolloutMemory(replicas, weights, shared, cache, share, tokens, sequences, choices, replica is not None)


def _judge_memory(
    recipe: RLRecipe, section: JudgeSection, architecture: Architecture | None, world_size: int
) -> RolloutMemory:
    tensor, cache = section.layout.tensor, section.kv_cache_gb
    replicas = len(judge_ranks(recipe, section, world_size)) // tensor
    if architecture is None:
        return RolloutMemory(replicas, 0.0, 0.0, cache, cache + ROLLOUT_ACTIVATIONS_GB, 0, 0)
    size = ELEMENT_BYTES[section.dtype or recipe.model.dtype]
    whole = section.layout.expert_parallel
    held = rollout_parameters(architecture, tensor, whole, replica_of(architecture, tensor, whole))
    weights = size * held.total / GB
    longest = section.max_prompt_length + section.max_response_length
    tokens = int(cache * GB // kv_cache_bytes_per_token(architecture, tensor, size))
    sequences = int(cache * GB // kv_cache_bytes(architecture, tensor, size, longest))
    reserved = weights + cache + ROLLOUT_ACTIVATIONS_GB
    return RolloutMemory(replicas, weights, 0.0, cache, reserved, tokens, sequences)


def _choice_bytes(recipe: RLRecipe, architecture: Architecture) -> int:
    """Return bytes of the experts that the rollout chooses for one token, where it records them."""
    shape = choice_shape(architecture) if recipe.algorithm.replays_experts else None
    return shape.token_bytes if shape else 0


def _replica(recipe: RLRecipe, architecture: Architecture) -> Replica | None:
    """Return the blocks of the rollout, where the family has a table or an earlier run has learned them from vLLM."""
    layout = recipe.rollout.layout
    if has_rollout_table(architecture):
        return replica_of(architecture, layout.tensor, layout.expert_parallel)
    folder = given_folder(recipe)
    file = folder and remembered_file(folder, layout.tensor, layout.expert_parallel, recipe.run_root)
    return _learned_replica(architecture, layout.tensor, file, file.stat().st_mtime_ns) if file else None


@functools.lru_cache(maxsize=16)  # of the layouts of one search, a file for each of the rollout's
def _learned_replica(architecture: Architecture, tensor: int, file: Path, modified_ns: int) -> Replica | None:
    return replica_of(architecture, tensor, learned=read_map(file))


def _shared_parameters(recipe: RLRecipe, architecture: Architecture, replica: Replica | None, world_size: int) -> int:
    """Return parameters of the rollout in the actor's memory, on the GPU with the fewest, which limits all."""
    ranks = role_ranks(recipe, "actor", world_size)
    if replica is None or recipe.why_weights_are_copied or ranks != rollout_ranks(recipe, world_size):
        return 0
    layout, optimizer = make_layout(recipe.actor.layout, len(ranks)), recipe.actor.optimizer
    in_buckets = optimizer.overlap_grad_reduce or optimizer.overlap_param_gather
    stages = range(layout.pipeline)
    return min(shareable_parameters(architecture, layout, stage, replica, in_buckets) for stage in stages)
