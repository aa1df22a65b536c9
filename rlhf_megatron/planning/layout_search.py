"""Layouts of a recipe that fit their GPUs, and the expected time of a step of each: arithmetic, no GPU and no weights.

Tried are the actor's tensor, pipeline and expert parallelism, of whole experts, with as many layers on each stage and
with fewer on the one that has the vocabulary, what it recomputes and streams, how its optimizer keeps master weights,
and the rollout's tensor parallelism; roles without a layout of their own follow the actor, and ``tokens_per_gpu: auto``
is found for each layout. All else is as the recipe has it, but for virtual stages and a number of recomputed layers
where the layout cannot have them.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

from pydantic import BaseModel, ValidationError

from rlhf_megatron.models.architecture import Architecture
from rlhf_megatron.planning.feasibility import check_architectures
from rlhf_megatron.planning.memory import TIGHT, Estimate, estimate
from rlhf_megatron.planning.model_folders import planned_architectures
from rlhf_megatron.planning.step_time import ExpectedTime, expected_time, has_figures, head_in_layers, stage_work
from rlhf_megatron.planning.token_budgets import planned_budgets
from rlhf_megatron.recipe import LayoutSection, RecipeError, RLRecipe, check_world
from rlhf_megatron.recipe.budgets import open_budgets, with_budgets
from rlhf_megatron.recipe.memory_savings import RecomputeSection
from rlhf_megatron.topology.role_layout import make_layout

_AS_FAST, _LESS = 1.03, 0.93  # what is no difference in time, and what is one in memory
_PIPELINES = (1, 2, 4, 8, 16)
_EXPERT = (1, 4, 8, 16, 32, 64)
_STREAMED = (0.0, 0.25, 0.5, 1.0)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A layout that fits: what to change for it, the recipe then, GB of 2^30 bytes in its fullest phase, the time."""

    overrides: tuple[str, ...]
    recipe: RLRecipe
    memory: float
    time: ExpectedTime


def find_layouts(recipe: RLRecipe, world: int) -> list[Candidate]:
    """Return the fastest that fits ``world`` GPUs, then the fastest of those that need clearly less memory.

    Of layouts that are as fast as each other, as far as the estimate can tell, the simplest counts. Raises RecipeError
    where there is no config.json to plan with, or no figures to estimate a time by; ModelError for a config.json.
    """
    architectures = planned_architectures(recipe)
    if recipe.cluster.gpu is None:
        raise RecipeError("cluster.gpu: say what the GPUs are, such as cluster.gpu=H100")
    if not has_figures(recipe):
        raise RecipeError("times are estimated for reinforcement learning only, and not in float32")
    choices = _choices(recipe, architectures["actor"], world)
    fitting = [each for choice in choices if (each := _candidate(recipe, architectures, world, choice))]
    best: list[Candidate] = []
    for each in sorted(fitting, key=_order):
        if not best or each.memory < _LESS * best[-1].memory:
            best.append(each)
    return best


def nearest_layout(recipe: RLRecipe, world: int) -> str:
    """Describe, where none fits, the layout that needs least memory, and its need; where vLLM has room for a cache in
    none, the one of its smallest weights; or what most are refused for. Raises as ``find_layouts``."""
    architectures = planned_architectures(recipe)
    tried: list[tuple[tuple[str, ...], RLRecipe, Estimate]] = []
    refusals: Counter[str] = Counter()
    for choice in _choices(recipe, architectures["actor"], world):
        try:
            tried.append(_tried(recipe, architectures, world, choice))
        except (ValidationError, RecipeError) as error:
            refusals[first_reason(error)] += 1
    if not tried:
        often = "".join(f": {reason}" for reason, _ in refusals.most_common(1))
        return f"none of those tried can cut this model over {world} GPUs{often}"
    overrides, nearest, memory = min(tried, key=lambda each: _distance(each[2]))
    layout = " ".join(overrides) or "the recipe as it is"
    if memory.rollout is not None and not _caches_a_sequence(memory):
        given = f"rollout.gpu_memory_utilization={nearest.rollout.gpu_memory_utilization:g}"
        held = f"{memory.rollout.weights:.1f} of {memory.rollout.reserved:.1f} GB are weights with {given}"
        return f"none has room for the KV cache of one sequence of full length; of the nearest {held}: {layout}"
    phase, needed = max(memory.phases.items(), key=lambda item: item[1])
    usable = TIGHT * recipe.cluster.planned_memory_gb
    return f"the nearest needs {needed:.1f} GB in phase {phase}, and {usable:.1f} GB are planned with: {layout}"


def _distance(memory: Estimate) -> tuple[bool, float, float]:
    has_cache, fullest = _caches_a_sequence(memory), max(memory.phases.values())
    return not has_cache, 0.0 if has_cache or memory.rollout is None else memory.rollout.weights, fullest


def _order(each: Candidate) -> tuple[float, ...]:
    actor, layout = each.recipe.actor, each.recipe.actor.layout
    again, streamed = actor.recompute.granularity == "full", actor.offload.streamed_optimizer
    simple = (layout.pipeline, layout.last_stage_layers is not None, again, streamed)
    return (round(math.log(each.time.seconds) / math.log(_AS_FAST)), *simple, each.memory)


def _choices(recipe: RLRecipe, model: Architecture, world: int) -> Iterator[dict[str, Any]]:
    """Yield values by key of every combination, whether it can be or not."""
    degrees = [degree for degree in (1, 2, 4, 8, 16) if degree <= min(world, recipe.cluster.gpus_per_node)]
    own = recipe.actor.layout
    pipelines, experts = sorted({*_PIPELINES, own.pipeline}), sorted({*_EXPERT, own.expert})
    replicas = sorted({*degrees, min(world, recipe.rollout.layout.tensor)})  # the recipe's own may be of several nodes
    optimizer = recipe.actor.optimizer
    sharded = optimizer is not None and optimizer.distributed
    streams = _STREAMED if sharded else (0.0,)
    has_masters = recipe.actor.adapters is None and recipe.dtype_of(recipe.actor) == "bfloat16"
    # With remainders there is less to stream.
    remainders = sorted({optimizer.master_remainders, sharded and has_masters}) if optimizer else [None]
    short = with_budgets(recipe, dict.fromkeys(open_budgets(recipe), recipe.longest_sequence))
    layers, head = model.layers, head_in_layers(short, model)
    stages = [
        (*edges, _virtual_pipeline(recipe, layers, *edges))
        for pipeline in pipelines
        for edges in _edges(layers, head, pipeline)
    ]
    given = recipe.actor.recompute
    default = RecomputeSection().modules
    recomputed = [("none", None, default), ("full", given.layers, default)]
    recomputed += [("selective", None, given.modules)] if given.selected else []
    cuts = [
        (tensor, *stage, expert)
        for tensor, stage, expert in itertools.product(degrees, stages, (1,) if model.experts is None else experts)
        if expert == 1 or world % (tensor * stage[0]) == world // stage[0] % expert == 0
    ]
    for (tensor, pipeline, first, last, chunks, expert), streamed, narrow, (
        granularity,
        of_each,
        modules,
    ), rollout in itertools.product(cuts, streams, remainders, recomputed, replicas):
        yield {
            "actor.layout.tensor": tensor,
            "actor.layout.pipeline": pipeline,
            "actor.layout.first_stage_layers": first,
            "actor.layout.last_stage_layers": last,
            "actor.layout.virtual_pipeline": chunks,
            "actor.layout.data": None,
            "actor.layout.expert": expert,
            "actor.layout.expert_tensor": None if model.experts is None else 1,
            "actor.sequence_parallel": tensor > 1,
            "actor.offload.streamed_optimizer": streamed,
            **({} if narrow is None else {"actor.optimizer.master_remainders": narrow}),
            "actor.recompute.granularity": granularity,
            "actor.recompute.layers": of_each,
            "actor.recompute.modules": modules,
            "rollout.layout.tensor": rollout,
        }


def _edges(layers: int, head: float, pipeline: int) -> list[tuple[int, int | None, int | None]]:
    """Return (stages, layers of the first, of the last): all alike, and so that the slowest stage has the least to
    compute."""
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
    """Return the recipe's virtual stages where these stages can have them, else none."""
    chunks = recipe.actor.layout.virtual_pipeline
    try:
        layout = LayoutSection(
            pipeline=pipeline, virtual_pipeline=chunks, first_stage_layers=first, last_stage_layers=last
        )
        make_layout(layout, pipeline).stage_layers(layers)
    except (ValidationError, RecipeError):
        return None
    return chunks


def _tried(
    recipe: RLRecipe, architectures: Mapping[str, Architecture], world: int, choice: dict[str, Any]
) -> tuple[tuple[str, ...], RLRecipe, Estimate]:
    """Return a choice's overrides, the recipe with them, and its memory.

    Raises ValidationError or RecipeError where model or GPUs cannot be cut so.
    """
    overrides = overrides_of({key: value for key, value in choice.items() if attrgetter(key)(recipe) != value})
    tried = RLRecipe.model_validate(with_values(recipe, choice))
    check_world(tried, world)
    check_architectures(tried, architectures)
    tried = planned_budgets(tried, architectures, world)
    return overrides, tried, estimate(tried, architectures, world)


def overrides_of(changes: Mapping[str, Any]) -> tuple[str, ...]:
    """Return values by key as a command line has them."""
    return tuple(f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in changes.items())


def first_reason(error: ValidationError | RecipeError) -> str:
    """Return the message of an error, in one line."""
    first = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
    return " ".join(first.removeprefix("Value error, ").split())


def with_values(section: BaseModel, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section's values with others by their keys, those of sections below it too; the rest is as it is."""
    values, below = dict(section), dict[str, dict[str, Any]]()
    for key, value in changes.items():
        name, _, rest = key.partition(".")
        if rest:
            below.setdefault(name, {})[rest] = value
        else:
            values[name] = value
    return values | {name: with_values(values[name], inner) for name, inner in below.items()}


def _candidate(
    recipe: RLRecipe, architectures: Mapping[str, Architecture], world: int, choice: dict[str, Any]
) -> Candidate | None:
    try:
        overrides, changed, memory = _tried(recipe, architectures, world, choice)
    except (ValidationError, RecipeError):
        return None
    fullest = max(memory.phases.values())
    if not _caches_a_sequence(memory) or fullest > TIGHT * recipe.cluster.planned_memory_gb:
        return None
    time = expected_time(changed, architectures, world)
    return Candidate(overrides, changed, fullest, time) if time else None


def _caches_a_sequence(memory: Estimate) -> bool:
    return memory.rollout is not None and memory.rollout.full_length_sequences > 0
