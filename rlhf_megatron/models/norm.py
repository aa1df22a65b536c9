"""Norms of layers without Transformer Engine that stand sequence parallelism."""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def install() -> None:
    """Has megatron-core use the version below where it would take torch's norm; idempotent."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    WrappedTorchNorm.__new__ = make_rms_norm


def make_rms_norm(_: Any, config: Any, hidden_size: int, eps: float = 1e-5, **__: Any) -> torch.nn.RMSNorm:
    """torch's RMSNorm, whose weight says whether its gradient is of a part of the sequence.

    Megatron's own version refuses sequence parallelism, which needs no more than that: gradients of weights with this
    mark are summed over the tensor-parallel ranks.
    """
    norm = torch.nn.RMSNorm(hidden_size, eps=eps)
    norm.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm
