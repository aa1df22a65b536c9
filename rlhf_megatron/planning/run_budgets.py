"""Micro-batches of ``tokens_per_gpu: auto`` in a run: those that it began with, or what its GPUs have room for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from rlhf_megatron.models.architecture import Architecture
from rlhf_megatron.planning.token_budgets import found_budgets, kept_budgets, planned_gb
from rlhf_megatron.recipe import Recipe
from rlhf_megatron.recipe.budgets import with_budgets
from rlhf_megatron.runtime.device_memory import device_memory_gb
from rlhf_megatron.runtime.recovery import RecoveryLog
from rlhf_megatron.topology.exchange import max_over_ranks


def least_memory_gb() -> tuple[float, float]:
    """Return (free, total) GB of the ranks that have least; collective over the world."""
    free, total = max_over_ranks([-size for size in device_memory_gb()])
    return -free, -total


def run_budgets(
    recipe: Recipe, architectures: Mapping[str, Architecture], recovery: RecoveryLog, free_gb: float, total_gb: float
) -> dict[str, int]:
    """Return the budgets that the recipe leaves open, for GPUs of which ``free_gb`` of ``total_gb`` are free."""
    world_size = dist.get_world_size()
    kept = kept_budgets(recipe, architectures, world_size, recovery.lines())
    if kept is not None:
        return kept
    cluster = recipe.cluster.model_copy(update={"gpu_memory_gb": total_gb})
    here = recipe.model_copy(update={"cluster": cluster})
    budgets = found_budgets(here, architectures, world_size, free_gb - cluster.memory_reserve_gb)
    for key, tokens in budgets.items():
        print(f"{key}=auto: {tokens:,} tokens, by {free_gb:.1f} GB of free memory", flush=True)
    return budgets


def budget_note(
    recipe: Recipe, architectures: Mapping[str, Architecture], budgets: Mapping[str, int]
) -> dict[str, Any]:
    """Return what recovery.jsonl says of these ``budgets``, by which ``kept_budgets`` knows them again."""
    if not budgets:
        return {}
    planned = planned_gb(with_budgets(recipe, budgets), architectures, dist.get_world_size())
    return {"found": dict(budgets), "planned_gb": planned}
