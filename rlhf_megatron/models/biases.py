"""Biases of single linear layers: Megatron's config has them in all of a layer, or for queries, keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def with_bias(linear: Callable[..., Any]) -> Callable[..., Any]:
    """Return a builder of a linear layer of Megatron's or Transformer Engine's that has a bias, whatever it is told."""

    def build(*args: Any, **options: Any) -> Any:
        return linear(*args, **options | {"bias": True})

    return build
