"""Linear layers of experts with biases, in whose first matrix the rows of gate and up follow each other pair by pair.

Such weights are held in the order of checkpoints and of vLLM; what they make is put in Megatron's order, gates first.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TEColumnParallelGroupedLinear, TERowParallelGroupedLinear
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor


def gates_first(values: Tensor) -> Tensor:
    """[..., gate, up, gate, up, ...] -> [..., all gates, all ups]."""
    return values.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def in_pairs(values: Tensor) -> Tensor:
    """Return the inverse of ``gates_first``."""
    return values.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


class GateUp(ColumnParallelLinear):
    """The first linear layer of one expert."""

    def forward(self, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """See ColumnParallelLinear."""
        output, bias = super().forward(*arguments, **options)
        return gates_first(output), gates_first(bias)


class Down(RowParallelLinear):
    """The second linear layer of one expert."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        _is_of_one_rank(self.bias)

    def forward(self, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """See RowParallelLinear; Megatron adds biases to the output in place, which may be a view."""
        output, bias = super().forward(*arguments, **options)
        return output.clone(), bias


class GroupedGateUp(TEColumnParallelGroupedLinear or torch.nn.Module):  # type: ignore[misc]
    """The first linear layers of a rank's experts, as Transformer Engine has them, which adds the biases itself."""

    def forward(self, *arguments: Any, **options: Any) -> tuple[Tensor, None]:
        """See TEColumnParallelGroupedLinear."""
        output, _ = super().forward(*arguments, **options)
        return gates_first(output), None


class GroupedDown(TERowParallelGroupedLinear or torch.nn.Module):  # type: ignore[misc]
    """The second linear layers of a rank's experts, as Transformer Engine has them."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for name, parameter in self.named_parameters():
            if name.startswith("bias"):
                _is_of_one_rank(parameter)


def _is_of_one_rank(bias: Any) -> None:
    """Megatron marks biases as those of a cut sequence, and would sum them over ranks that have other experts."""
    bias.sequence_parallel = False
