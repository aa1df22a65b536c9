"""The scalar head of reward models and critics: one number for each token, in place of the logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class ScalarHead(torch.nn.Module):
    """A linear map from hidden to 1 without bias; takes the place of ``GPTModel.output_layer``.

    Every tensor-parallel rank has all of it. They all compute the same loss from the same values, so each has the whole
    gradient, of the weight and of its input, and nothing is summed. With sequence parallelism each has the gradient of
    its own tokens, and Megatron sums what is marked ``sequence_parallel``.
    """

    def __init__(self, config: TransformerConfig, tensor_group: dist.ProcessGroup) -> None:
        """Set up; the weight is not yet filled in."""
        super().__init__()
        self._tensor_group, self._sequence_parallel = tensor_group, config.sequence_parallel
        self.weight = torch.nn.Parameter(torch.empty(1, config.hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Map hidden [t, 1, hidden] -> values [t, 1, 1] of all tokens in float32, and no bias.

        Float32 whatever the model's type: differences of values are small beside the values.
        """
        values = functional.linear(hidden.float(), self.weight.float())
        if self._sequence_parallel:
            # Each rank computes the same with all values, so the gradient is cut and not summed.
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self._tensor_group
            )
        return values, None
