"""Micro-batches of roles with ``tokens_per_gpu: auto``: the largest that the plan's memory estimate has room for.

A budget changes results by rounding only; a run keeps those that it has found (``runtime.recovery``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_megatron.models.architecture import Architecture
from rlhf_megatron.planning.memory import TIGHT, estimate
from rlhf_megatron.planning.stage_memory import ELEMENT_BYTES, GB
from rlhf_megatron.recipe import Recipe, role_ranks
from rlhf_megatron.recipe.budgets import AnyOfRecipes, open_budgets, with_budgets
from rlhf_megatron.recipe.world_checks import layout_of
from rlhf_megatron.topology.role_layout import make_layout

_MULTIPLE = 256  # of tokens
# Of each pipeline stage in an update, so that stages wait for each other for a fifth of it at most.
_MICRO_BATCHES = 4
# Beyond which no kernel becomes faster, and products with the widest layers would outgrow 32 bits.
_MOST_TOKENS = 2**16
_PHASES = ("update", "logprobs")


def planned_gb(recipe: Recipe, architectures: Mapping[str, Architecture], world_size: int) -> float:
    """Return what the passes of ``recipe``, all of whose budgets are known, need on the fullest GPU."""
    phases = estimate(recipe, architectures, world_size).phases
    return round(max(phases[phase] for phase in _PHASES if phase in phases), 6)


def found_budgets(
    recipe: Recipe, architectures: Mapping[str, Architecture], world_size: int, memory_gb: float | None = None
) -> dict[str, int]:
    """Return a number for each of the recipe's ``open_budgets``, role by role in its order.

    ``recipe``: its layouts fit ``world_size`` GPUs. ``memory_gb``: of a GPU, that its passes may fill, by default what
    the recipe plans with; a twentieth stays free for what estimates leave out. A number is a multiple of 256, at least
    the longest sequence (which runs alone if it must) and at most 65,536, the tokens whose logits ``kept_logits_gb``
    can keep, and what gives each of several pipeline stages four micro-batches, or else all rows of an update at once.
    """
    limit = TIGHT * (recipe.cluster.planned_memory_gb if memory_gb is None else memory_gb)
    least = recipe.rows_per_response * recipe.longest_sequence
    budgets = dict.fromkeys(open_budgets(recipe), least)
    for key in budgets:
        name = key.partition(".")[0]
        low, high = 0, _most_tokens(recipe, name, architectures[name], world_size) // _MULTIPLE
        while low < high:  # low fits, or is less than one sequence
            middle = (low + high + 1) // 2
            tried = with_budgets(recipe, budgets | {key: max(least, middle * _MULTIPLE)})
            fits = planned_gb(tried, architectures, world_size) <= limit
            low, high = (middle, high) if fits else (low, middle - 1)
        budgets[key] = max(least, low * _MULTIPLE)
    return budgets


def planned_budgets(recipe: AnyOfRecipes, architectures: Mapping[str, Architecture], world_size: int) -> AnyOfRecipes:
    """Return the recipe with its ``found_budgets``; itself, where none is open."""
    return with_budgets(recipe, found_budgets(recipe, architectures, world_size))


def kept_budgets(
    recipe: Recipe, architectures: Mapping[str, Architecture], world_size: int, lines: Sequence[Mapping[str, Any]]
) -> dict[str, int] | None:
    """Return the budgets that an earlier attempt has noted among the ``lines`` of recovery.jsonl, for the bits of its
    steps; None where there is none, or the plan of the recipe's passes has changed since."""
    last = next((line for line in reversed(lines) if line.get("found")), None)
    if last is None or sorted(last["found"]) != sorted(open_budgets(recipe)):
        return None
    budgets: dict[str, int] = last["found"]
    same = planned_gb(with_budgets(recipe, budgets), architectures, world_size) == last["planned_gb"]
    return budgets if same else None


def _most_tokens(recipe: Recipe, name: str, architecture: Architecture, world_size: int) -> int:
    """Return tokens of a GPU beyond which a micro-batch would be no faster."""
    section = recipe.roles[name]
    layout = make_layout(layout_of(recipe, section), len(role_ranks(recipe, name, world_size)))
    prompts = recipe.batch.prompts_per_update if section.learns_by else recipe.batch.prompts_per_step
    rows = -(-prompts * recipe.batch.rows_per_prompt // layout.data) * recipe.rows_per_response
    parts = layout.context * (_MICRO_BATCHES * layout.pipeline if layout.pipeline > 1 else 1)
    most = min(_MOST_TOKENS, -(-rows * recipe.longest_sequence // parts))
    logits = ELEMENT_BYTES[recipe.dtype_of(section)] * architecture.padded_vocabulary(layout.tensor) / layout.tensor
    kept = int(section.kept_logits * GB / logits)
    return kept if recipe.longest_sequence <= kept < most else most
