"""Switches that make a step faster beside its layout, and the expected time with each: arithmetic, no GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

from pydantic import ValidationError

from rlhf_megatron.gpu_kinds import GPUS
from rlhf_megatron.planning.layout_search import Candidate, find_layouts, first_reason, overrides_of, with_values
from rlhf_megatron.recipe import RecipeError, RLRecipe

ALL = "all of these"


@dataclasses.dataclass(frozen=True)
class Lever:
    """One of a recipe's switches: what to change for it, and the fastest layout then, or why there is none."""

    name: str
    overrides: tuple[str, ...]
    candidate: Candidate | None
    refusal: str = ""


def find_levers(recipe: RLRecipe, world: int) -> list[Lever]:
    """Return what the recipe does not use yet, each alone, and then all together that it can have.

    Raises as ``find_layouts``.
    """
    changes = _changes(recipe)
    levers = [_lever(recipe, world, name, values) for name, values in changes.items()]
    usable = [lever.name for lever in levers if lever.candidate]
    if len(usable) > 1:
        together = {key: value for name in usable for key, value in changes[name].items()}
        levers.append(_lever(recipe, world, ALL, together))
    return levers


def _changes(recipe: RLRecipe) -> dict[str, dict[str, Any]]:
    """Return values by key for each switch that is off."""
    rollout = recipe.rollout
    correction = {} if recipe.algorithm.is_corrected else {"algorithm.rollout_correction.type": "tis"}
    hopper = recipe.cluster.gpu is not None and GPUS[recipe.cluster.gpu].hopper
    changes: dict[str, dict[str, Any]] = {}
    if not recipe.actor.shared_prompts:
        changes["a prompt once for its rows"] = {"actor.shared_prompts": True}
    if not rollout.updates_in_flight and not recipe.rollout_is_ahead:
        # Their tokens are one update old in the mean (tools/bench/step.py).
        in_flight = {"rollout.partial": "resume", "rollout.max_staleness": 3, "rollout.oversample": 2.0}
        changes["responses in flight"] = in_flight | correction
    if rollout.quantization is None:
        narrow = {"rollout.quantization": "fp8_blockwise" if hopper else "fp8", "rollout.kv_cache_dtype": "fp8"}
        changes["rollout in 8 bits"] = narrow | correction
    if recipe.actor.fp8 is None:
        changes["training in 8 bits"] = {"actor.fp8": "blockwise"}
    return changes


def _lever(recipe: RLRecipe, world: int, name: str, changes: dict[str, Any]) -> Lever:
    overrides = overrides_of(changes)
    try:
        found = find_layouts(RLRecipe.model_validate(with_values(recipe, changes)), world)
    except (ValidationError, RecipeError) as error:
        return Lever(name, overrides, None, first_reason(error))
    return Lever(name, overrides, found[0]) if found else Lever(name, overrides, None, "no layout fits")
