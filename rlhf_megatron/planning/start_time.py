"""Expected time from the start of a run's processes to its first step, term by term: arithmetic alone.

Processes, data and the engine are what runs on H100 and H200 hosts took at most (docs/results.md); what grows with the
ranks is reckoned, with one rank to a GPU and CPU cores of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from rlhf_megatron.models.architecture import Architecture
from rlhf_megatron.planning.parameters import model_parameters, rank_parameters
from rlhf_megatron.recipe import Recipe, RLRecipe
from rlhf_megatron.recipe.world_checks import layout_of, role_ranks
from rlhf_megatron.topology.layout import AXES, Layout
from rlhf_megatron.topology.role_layout import make_layout

_PROCESSES, _DATA, _ENGINE = 8.0, 2.7, 90.0  # measured; an engine with its compilation and CUDA graphs, of 7B to 32B
_JOINING, _JOINING_A_RANK = 1.0, 5e-3  # NCCL's first communicator, of all ranks
_COMMUNICATOR = 0.5  # another one, whose first use makes it
_READ_BYTES_PER_SECOND = 2e9  # of a node, which reads once what its ranks hold
_PLAN_A_RANK, _LONGEST_PLAN = 3.5e-3, 3.5  # of a weight sync; other ranks than its partners' are no work
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def expected_start(recipe: Recipe, architectures: Mapping[str, Architecture], world: int) -> dict[str, float]:
    """Return the seconds of each part of the start on ``world`` GPUs; ``architectures``: of each role."""
    read = parameters_of_a_node(recipe, architectures, world) * _BYTES[recipe.model.dtype]
    seconds = {
        "processes": _PROCESSES,
        "joining": _JOINING + _JOINING_A_RANK * world,
        "data": _DATA,
        "communicators": _COMMUNICATOR * (len(communicators_of_a_rank(recipe, world)) + _overlapped(recipe)),
        "weights": read / _READ_BYTES_PER_SECOND,
    }
    if isinstance(recipe, RLRecipe):
        judge = {"judge": _ENGINE} if recipe.judge else {}
        seconds |= judge | {"engine": _ENGINE, "plan of weight syncs": min(_LONGEST_PLAN, _PLAN_A_RANK * world)}
    return seconds


def parameters_of_a_node(recipe: Recipe, architectures: Mapping[str, Architecture], world: int) -> int:
    """Return how many parameters the ranks of a node read from files together, each once; of the node with the most."""
    most: dict[str | None, int] = {}
    for name, model in architectures.items():
        if name not in recipe.roles:  # the judge, which vLLM reads
            continue
        section, ranks = recipe.roles[name], role_ranks(recipe, name, world)
        layout = make_layout(layout_of(recipe, section), len(ranks))
        nodes: dict[int, list[int]] = defaultdict(list)
        for position, rank in enumerate(ranks):
            nodes[rank // recipe.cluster.gpus_per_node].append(position)
        held = max(_held_together(model, layout, positions) for positions in nodes.values())
        most[section.weights_folder] = max(held, most.get(section.weights_folder, 0))
    return sum(most.values())


def _held_together(model: Architecture, layout: Layout, positions: Sequence[int]) -> int:
    """Return the parameters that some ranks of a role hold, those of several once; all of the model at most."""
    dense = {(at.pipeline, at.tensor) for at in map(layout.coordinates, positions)}
    experts = {(at.pipeline, at.expert, at.tensor) for at in map(layout.expert_coordinates, positions)}
    of_stage = {stage: rank_parameters(model, layout, stage) for stage in {stage for stage, *_ in experts}}
    held = sum(of_stage[stage].dense + of_stage[stage].embeddings for stage, _ in dense)
    return min(held + sum(of_stage[stage].experts for stage, *_ in experts), model_parameters(model))


def _overlapped(recipe: Recipe) -> int:
    """Return the number of further communicators for what travels while passes compute."""
    optimizers = [recipe.roles[name].learns_by for name in recipe.roles_made]
    return sum(optimizer is not None and optimizer.overlap_grad_reduce for optimizer in optimizers)


def communicators_of_a_rank(recipe: Recipe, world: int) -> set[tuple[int, ...]]:
    """Return the sets of ranks that the first rank of some role exchanges with, but for that of all ranks."""
    made: set[tuple[int, ...]] = set()
    for name in recipe.roles_made:
        section, ranks = recipe.roles[name], role_ranks(recipe, name, world)
        for members in _groups_of_the_first(make_layout(layout_of(recipe, section), len(ranks))):
            made.add(tuple(ranks[position] for position in members))
    return {members for members in made if 1 < len(members) < world}


def _groups_of_the_first(layout: Layout) -> list[list[int]]:
    plain = [("tensor",), ("context",), ("data",), ("pipeline",), ("context", "data"), ("tensor", "pipeline"), AXES]
    of_experts = [("tensor",), ("expert",), ("data",), ("tensor", "expert"), ("tensor", "expert", "pipeline")]
    return [
        *(layout.group_of(0, *axes) for axes in plain),
        *(layout.expert_group_of(0, *axes) for axes in of_experts),
    ]
