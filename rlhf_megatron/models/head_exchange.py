"""Heads for tokens between the ranks of context parallelism (Ulysses, arXiv 2309.14509), and back.

Before, a rank has some tokens of all heads; in between, all tokens of some heads.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor


def heads_for_tokens(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Map [t / parts, parts, ...], by the rank that gets them -> [t, ...], tokens in the order of ranks."""
    received: Tensor = all_to_all(group, values.transpose(0, 1).contiguous())
    return received.flatten(0, 1)


def tokens_for_heads(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Map the inverse way: [t, ...] -> [t / parts, parts, ...]."""
    received: Tensor = all_to_all(group, values.unflatten(0, (group.size(), -1)))
    return received.transpose(0, 1)


def permuted(values: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Return ``values[order]``; the gradient is read by the ``inverse`` order, where that of indexing is summed up."""
    out: Tensor = _Permuted.apply(values, order, inverse)
    return out


class _Permuted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return values[order]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (inverse,) = ctx.saved_tensors
        return gradient[inverse], None, None
