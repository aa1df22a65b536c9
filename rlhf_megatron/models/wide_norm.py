"""Norms of queries and keys whose weights are cut as heads are: each tensor-parallel rank has those of its own.

An RMSNorm over all heads together (OLMo 2), and a LayerNorm of each head by weights of its own (Command R+).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor


class WideNorm(torch.nn.Module):
    """RMSNorm (arXiv 1910.07467) of [..., heads, d] over heads and d; a rank has the weights of its own ``heads``."""

    def __init__(self, config: Any, heads: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(heads * config.kv_channels, dtype=torch.float32))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=group.size() > 1, dim=0, stride=1)
        self._epsilon, self._group = config.layernorm_epsilon, group

    def forward(self, values: Tensor) -> Tensor:
        """Return ``values`` normed, of their shape and type; computed in float32."""
        wide = values.flatten(-2).float()
        squares = wide.square().sum(-1, keepdim=True)
        if self._group.size() > 1:  # the sum over ranks, whose gradient is a sum over ranks too
            squares = reduce_from_tensor_model_parallel_region(squares, group=self._group)
            squares = copy_to_tensor_model_parallel_region(squares, group=self._group)
        mean = squares / (wide.size(-1) * self._group.size())
        normed = wide * torch.rsqrt(mean + self._epsilon) * self.weight
        return normed.type_as(values).view_as(values)


class HeadNorm(torch.nn.Module):
    """LayerNorm (arXiv 1607.06450) without bias of [..., heads, d] over d, each head with weights of its own."""

    def __init__(self, config: Any, heads: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(heads, config.kv_channels, dtype=torch.float32))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=group.size() > 1, dim=0, stride=1)
        self._epsilon = config.layernorm_epsilon

    def forward(self, values: Tensor) -> Tensor:
        """Return ``values`` normed, of their shape and type; computed in float32."""
        centred = values.float() - values.float().mean(-1, keepdim=True)
        normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + self._epsilon)
        return (normed * self.weight.float()).type_as(values)
