"""An RMSNorm of queries or keys over all heads together, of which each tensor-parallel rank has some (OLMo 2)."""

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
