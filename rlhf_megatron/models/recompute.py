"""Activations that a backward pass recomputes: Megatron's settings, and which modules a model has to recompute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf_megatron.models.description import Architecture, LayerKind
from rlhf_megatron.models.families import FAMILIES
from rlhf_megatron.recipe.memory_savings import RecomputedModule, RecomputeSection


def recompute_settings(section: RecomputeSection) -> dict[str, Any]:
    """Return Megatron's settings of whole layers, all or some of each chunk, or of modules of every layer."""
    if section.granularity == "none":
        return {}
    if section.granularity == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": list(section.modules)}
    method: dict[str, Any] = {"recompute_method": "uniform", "recompute_num_layers": 1}
    if section.layers is not None:
        method = {"recompute_method": "block", "recompute_num_layers": section.layers}
    return {"recompute_granularity": "full"} | method


def lacking_module(architecture: Architecture, modules: Sequence[RecomputedModule]) -> str | None:
    """Return which of ``modules`` no layer of the model has, and why; None where all are there."""
    kinds, experts = set(architecture.layer_kinds), architecture.experts
    reasons: dict[RecomputedModule, str | None] = {
        "core_attn": None if {kind.attention for kind in kinds} - {"delta"} else "no layer has attention",
        "mlp": None if "dense" in {kind.feed_forward for kind in kinds} else "every layer has experts; name moe",
        "moe": None if experts else "the model is dense; name mlp",
        "shared_experts": None if experts and experts.shared else "the model has no shared expert",
    }
    return next((f"{module}: {reasons[module]}" for module in modules if reasons[module]), None)


def recomputed_fraction(architecture: Architecture, modules: Sequence[RecomputedModule]) -> float:
    """Return which fraction of the decoder layers' products with weights ``modules`` compute again."""
    a, family = architecture, FAMILIES[architecture.family]
    again = whole = 0
    for kind, count in a.kind_counts.items():
        whole += count * family.multiplied_weights(a, kind)
        again += count * _multiplied_again(a, kind, modules)
    return again / whole


def _multiplied_again(a: Architecture, kind: LayerKind, modules: Sequence[RecomputedModule]) -> int:
    matrices, columns = 2 if a.plain_mlp else 3, 0
    experts = a.experts if kind.feed_forward == "experts" else None
    if experts is None and "mlp" in modules:
        columns += a.feed_forward
    if experts and "moe" in modules:
        columns += experts.chosen * experts.feed_forward
    if experts and experts.shared and {"moe", "shared_experts"} & set(modules):
        columns += experts.shared.feed_forward
    return matrices * a.hidden * columns
