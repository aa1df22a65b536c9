"""Biases of single linear layers: Megatron's config has them in all of a layer, or for queries, keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlhf_megatron.models.description import Architecture, LayerKind


def with_bias(linear: Callable[..., Any]) -> Callable[..., Any]:
    """Return a builder of a linear layer of Megatron's or Transformer Engine's that has a bias, whatever it is told."""

    def build(*args: Any, **options: Any) -> Any:
        return linear(*args, **options | {"bias": True})

    return build


def add_biases(a: Architecture, kind: LayerKind, spec: Any) -> None:
    """Have those linear layers of a ``spec`` biases that Megatron's config gives none."""
    attention = spec.submodules.self_attention.submodules
    if a.output_bias:
        attention.linear_proj = with_bias(attention.linear_proj)
    if a.mlp_bias and kind.feed_forward == "dense":
        feed_forward = spec.submodules.mlp.keywords["submodules"]
        feed_forward.linear_fc1 = with_bias(feed_forward.linear_fc1)
        feed_forward.linear_fc2 = with_bias(feed_forward.linear_fc2)
