"""The choices of experts that a model makes for each token; without Megatron, since plans count them too."""

from __future__ import annotations

from rlhf_megatron.data.expert_choices import ChoiceShape
from rlhf_megatron.models.architecture import Architecture


def choice_shape(architecture: Architecture) -> ChoiceShape | None:
    """Return the choices of a token of this model; None where it has no experts."""
    experts = architecture.experts
    return ChoiceShape(experts.count, len(layers_with_experts(architecture)), experts.chosen) if experts else None


def layers_with_experts(architecture: Architecture) -> list[int]:
    """Return the layers that have a router, rising."""
    return [layer for layer, kind in enumerate(architecture.layer_kinds) if kind.feed_forward == "experts"]
