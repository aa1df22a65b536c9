"""Adaptations of a restart to the attempt before: smaller budgets after a lack of memory, data passed over.

Pure functions of the recipe and the lines of recovery.jsonl since a person has started the run, who thereby gets the
recipe as it stands. A budget changes results by rounding only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rlhf_megatron.recipe import Recipe, RLRecipe
from rlhf_megatron.recipe.budgets import with_budgets
from rlhf_megatron.runtime.recovery import since_last_beginning

# Which roles compute in a phase, and whether with gradients.
_PASSES: dict[str, tuple[tuple[str, ...], bool]] = {
    "update": (("actor",), True),
    "update_critic": (("critic",), True),
    "logprobs": (("actor", "reference"), False),
    "values": (("critic",), False),
    "score": (("reward_model",), False),
    "evaluate": (("actor",), False),
}
_ROLLOUT_PHASES = ("engine", "regather", "generate", "evaluate")


@dataclasses.dataclass(frozen=True)
class Adaptation:
    """``budgets``: recipe keys with smaller values. ``skips``: a step, and the data position to begin it at."""

    budgets: dict[str, float]
    skips: dict[int, dict[str, Any]]


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or what led to it, is a lack of memory on a GPU or the host."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        # NCCL, cuBLAS and the CPU's allocator say it in words only.
        if isinstance(error, RuntimeError) and any(
            words in str(error).lower() for words in ("out of memory", "can't allocate memory", "alloc_failed")
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def smaller_budgets(recipe: Recipe, phase: str) -> dict[str, float]:
    """Return the budgets of a phase that ran out of memory, reduced as retry.out_of_memory says; empty where none can
    be."""
    settings = recipe.retry.out_of_memory
    if phase in _ROLLOUT_PHASES and isinstance(recipe, RLRecipe):
        key = "kv_cache_gb" if recipe.rollout.kv_cache_gb is not None else "gpu_memory_utilization"
        return {f"rollout.{key}": round(getattr(recipe.rollout, key) * settings.rollout_factor, 4)}
    smaller: dict[str, float] = {}
    roles, with_gradients = _PASSES.get(phase, ((), False))
    for name in roles:
        section = recipe.roles.get(name)
        if section is None:
            continue
        key = "tokens_per_gpu" if with_gradients else "logprob_tokens_per_gpu"
        now = section.update_tokens if with_gradients else section.forward_tokens
        # What is longer than the budget goes alone, a pair together, so less than the longest would change nothing.
        value = max(int(now * settings.token_factor), recipe.rows_per_response * recipe.longest_sequence)
        if value < now:
            smaller[f"{name}.{key}"] = value
    return smaller


def adapt(recipe: Recipe, lines: Sequence[Mapping[str, Any]]) -> tuple[Adaptation, dict[str, float]]:
    """Return (all that the next attempt does otherwise, which of its budgets are reduced for the last attempt's fault).

    ``lines``: of recovery.jsonl since a person has started the run.
    """
    reductions = [line["reduced"] for line in lines if "reduced" in line]
    budgets = {key: value for reduced in reductions for key, value in reduced.items()}
    faults = [line for line in since_last_beginning(lines) if line["what"] == "fault"]
    further: dict[str, float] = {}
    lacks_memory = bool(faults) and faults[-1].get("kind") == "out_of_memory"
    if lacks_memory and len(reductions) < recipe.retry.out_of_memory.max_reductions:
        further = smaller_budgets(with_budgets(recipe, budgets), faults[-1]["phase"])
    skips = {line["first"]: line["data"] for line in lines if line.get("kind") == "not_finite"}
    return Adaptation(budgets | further, skips), further
