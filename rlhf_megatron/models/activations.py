"""Activations of feed-forward layers, as functions for Megatron's config."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def gelu_tanh(values: Tensor) -> Tensor:
    """Return GELU by its approximation with tanh."""
    return torch.nn.functional.gelu(values, approximate="tanh")


def squared_relu(values: Tensor) -> Tensor:
    """Return ReLU squared (arXiv 2109.08668)."""
    return torch.nn.functional.relu(values).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu_tanh": gelu_tanh,
    "squared_relu": squared_relu,
}
