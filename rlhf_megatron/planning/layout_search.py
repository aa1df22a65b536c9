"""Which layouts of a recipe fit their GPUs, and how long a step of each may take: arithmetic, no GPU and no weights.

Tried are the actor's tensor and pipeline parallelism, with as many layers on each stage and with fewer on the one that
has the vocabulary, what it recomputes and streams, and the rollout's tensor parallelism; roles without a layout of
their own follow the actor. All else is as the recipe has it, but for virtual stages and a number of recomputed layers
where the layout cannot have them.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from pydantic import ValidationError

from rlhf_megatron.planning.feasibility import check_architecture, checked_architecture
from rlhf_megatron.planning.memory import TIGHT, Estimate, estimate
from rlhf_megatron.planning.model_shape import planning_config, planning_folder, shape_of
from rlhf_megatron.planning.step_time import ExpectedTime, expected_time, has_figures, layers_and_head, stage_work
from rlhf_megatron.recipe import LayoutSection, RecipeError, RLRecipe, check_world
from rlhf_megatron.recipe.load import apply_override
from rlhf_megatron.recipe.world_checks import stage_layers

_AS_FAST, _LESS = 1.03, 0.95  # what is no difference in time, and what is one in memory
_PIPELINES = (1, 2, 4, 8, 16)
_STREAMED = (0.0, 0.5, 1.0)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A layout that fits: what to change for it, the recipe then, GB of 2^30 bytes in its fullest phase, the time."""

    overrides: tuple[str, ...]
    recipe: RLRecipe
    memory: float
    time: ExpectedTime


def find_layouts(recipe: RLRecipe, world: int) -> list[Candidate]:
    """Those that fit ``world`` GPUs: the fastest, and behind it the fastest of those that need clearly less memory.

    Of layouts that are as fast as each other, as far as the estimate can tell, the simplest counts. Raises RecipeError
    where there is no config.json to plan with, or no figures to reckon a time by.
    """
    checked_architecture(recipe, planning_folder(recipe))
    config = planning_config(recipe)
    if recipe.cluster.gpu is None:
        raise RecipeError("cluster.gpu: say what the GPUs are, such as cluster.gpu=H100")
    if not has_figures(recipe, config):
        raise RecipeError("only steps of dense models are reckoned, and not in float32")
    choices = _choices(recipe, config, world)
    found = [each for choice in choices if (each := _candidate(recipe, config, world, choice))]
    best: list[Candidate] = []
    for each in sorted(found, key=_order):
        if not best or each.memory < _LESS * best[-1].memory:
            best.append(each)
    return best


def nearest_layout(recipe: RLRecipe, world: int) -> str:
    """What to tell where none fits: the layout that needs least memory, and what it needs; errors as find_layouts."""
    config = planning_config(recipe)
    tried = [each for choice in _choices(recipe, config, world) if (each := _tried(recipe, config, world, choice))]
    if not tried:
        return f"none of those tried can cut this model over {world} GPUs; see docs/layouts.md"
    overrides, _, memory = min(tried, key=lambda each: (not _holds_a_row(each[2]), max(each[2].phases.values())))
    layout = " ".join(overrides) or "the recipe as it is"
    if not _holds_a_row(memory):
        return f"none has room for the KV cache of one sequence of full length; the nearest: {layout}"
    phase, needed = max(memory.phases.items(), key=lambda item: item[1])
    usable = TIGHT * recipe.cluster.gpu_memory_gb
    return f"the nearest needs {needed:.1f} GB in phase {phase}, and {usable:.1f} GB are planned with: {layout}"


def _order(each: Candidate) -> tuple[float, ...]:
    actor, layout = each.recipe.actor, each.recipe.actor.layout
    again, streamed = actor.recompute.granularity == "full", actor.offload.streamed_optimizer
    simple = (layout.pipeline, layout.last_stage_layers is not None, again, streamed)
    return (round(math.log(each.time.seconds) / math.log(_AS_FAST)), *simple, each.memory)


def _choices(recipe: RLRecipe, config: dict[str, Any], world: int) -> Iterator[dict[str, Any]]:
    """Values by key of every combination, whether it can be or not."""
    degrees = [degree for degree in (1, 2, 4, 8, 16) if degree <= min(world, recipe.cluster.gpus_per_node)]
    streams = _STREAMED if recipe.actor.optimizer and recipe.actor.optimizer.distributed else (0.0,)
    layers, head = layers_and_head(recipe, config)
    stages = [
        (*edges, _virtual_pipeline(recipe, layers, *edges))
        for pipeline in _PIPELINES
        for edges in _edges(layers, head, pipeline)
    ]
    recomputed = (("none", None), ("full", recipe.actor.recompute.layers))
    for tensor, (pipeline, first, last, chunks), streamed, (granularity, of_each), rollout in itertools.product(
        degrees, stages, streams, recomputed, degrees
    ):
        yield {
            "actor.layout.tensor": tensor,
            "actor.layout.pipeline": pipeline,
            "actor.layout.first_stage_layers": first,
            "actor.layout.last_stage_layers": last,
            "actor.layout.virtual_pipeline": chunks,
            "actor.layout.data": None,
            "actor.sequence_parallel": tensor > 1,
            "actor.offload.streamed_optimizer": streamed,
            "actor.recompute.granularity": granularity,
            "actor.recompute.layers": of_each,
            "rollout.layout.tensor": rollout,
        }


def _edges(layers: int, head: float, pipeline: int) -> list[tuple[int, int | None, int | None]]:
    """(stages, layers of the first, of the last): all alike, and so that the slowest stage has the least to compute."""
    even = (pipeline, None, None)
    between = pipeline - 2
    stages = [
        [first, *[each] * between, layers - first - each * between]
        for first, each in itertools.product(range(1, layers), range(1, layers) if between > 0 else [0])
    ]
    possible = [counts for counts in stages if counts[-1] > 0]
    if pipeline == 1 or not possible:
        return [even]
    # Of equals the one with the fewest layers on the first, which holds the most activations.
    best = min(possible, key=lambda counts: (max(stage_work(counts, head)), counts[0]))
    return [even, (pipeline, best[0], best[-1])]


def _virtual_pipeline(recipe: RLRecipe, layers: int, pipeline: int, first: int | None, last: int | None) -> int | None:
    """The recipe's virtual stages where these stages can have them, else none."""
    chunks = recipe.actor.layout.virtual_pipeline
    try:
        layout = LayoutSection(
            pipeline=pipeline, virtual_pipeline=chunks, first_stage_layers=first, last_stage_layers=last
        )
        stage_layers(layout, layers)
    except (ValidationError, RecipeError):
        return None
    return chunks


def _tried(
    recipe: RLRecipe, config: dict[str, Any], world: int, choice: dict[str, Any]
) -> tuple[tuple[str, ...], RLRecipe, Estimate] | None:
    """What to change for a choice, the recipe then, and its memory; None where model or GPUs cannot be cut so."""
    overrides = tuple(
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in choice.items()
        if attrgetter(key)(recipe) != value
    )
    values = recipe.model_dump(mode="json")
    for override in overrides:
        apply_override(values, override)
    try:
        tried = RLRecipe.model_validate(values)
        check_world(tried, world)
        check_architecture(tried, config)
    except (ValidationError, RecipeError):
        return None
    return overrides, tried, estimate(tried, shape_of(config), world)


def _candidate(recipe: RLRecipe, config: dict[str, Any], world: int, choice: dict[str, Any]) -> Candidate | None:
    found = _tried(recipe, config, world, choice)
    if found is None:
        return None
    overrides, tried, memory = found
    fullest = max(memory.phases.values())
    if not _holds_a_row(memory) or fullest > TIGHT * recipe.cluster.gpu_memory_gb:
        return None
    time = expected_time(tried, config, world)
    return Candidate(overrides, tried, fullest, time) if time else None


def _holds_a_row(memory: Estimate) -> bool:
    return memory.rollout is not None and memory.rollout.longest_sequences > 0
