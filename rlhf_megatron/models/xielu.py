"""The activation xIELU (arXiv 2411.13010), a parabola and an exponential whose factors each layer learns.

Of what it computes on the way nothing is kept for the backward pass but its input.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.mlp import MLP
from torch import Tensor


class XieluFeedForward(MLP):
    """Megatron's feed-forward layer without a gate, with xIELU between its matrices."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.activation_func = Xielu(self.tp_group)


class Xielu(torch.nn.Module):
    """The activation of one rank's columns; all ranks of ``group`` have the same parameters.

    ``beta`` and ``eps`` are not trained. They are parameters so that they are loaded, regathered, saved and exported.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group = group
        self.alpha_p, self.alpha_n = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
        self.beta = torch.nn.Parameter(torch.tensor(0.5), requires_grad=False)
        self.eps = torch.nn.Parameter(torch.tensor(-1e-6), requires_grad=False)

    def forward(self, values: Tensor) -> Tensor:
        """Return the activation of ``values``, of their shape and type; computed in float32."""
        alphas = torch.cat([self.alpha_p, self.alpha_n]).float()
        if self._group.size() > 1:  # each rank has the gradient by its own columns
            alphas = copy_to_tensor_model_parallel_region(alphas, group=self._group)
        return xielu(values, alphas[0], alphas[1], self.beta.float(), self.eps.float())


def xielu(values: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    """Return the activation of ``values``, of their shape and type; the numbers that it goes by are float32."""
    positive, negative = functional.softplus(alpha_p.squeeze()), beta + functional.softplus(alpha_n.squeeze())
    curve: Tensor = _Curve.apply(values, positive, negative, beta, eps)
    return curve


class _Curve(torch.autograd.Function):
    """positive x^2 + beta x above 0, and negative (e^min(x, eps) - 1 - x) + beta x below."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, positive: Tensor, negative: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
        ctx.save_for_backward(values, positive, negative, beta, eps)
        x = values.float()
        return (torch.where(x > 0, positive * x * x, negative * _bend(x, eps)) + beta * x).to(values.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        values, positive, negative, beta, eps = ctx.saved_tensors
        x, gradient = values.float(), gradients[0].float()
        is_above = x > 0
        below = negative * (torch.where(x < eps, x.exp(), 0.0) - 1)
        of_values = gradient * (torch.where(is_above, 2 * positive * x, below) + beta)
        of_positive = torch.where(is_above, gradient * x * x, 0.0).sum()
        of_negative = torch.where(is_above, 0.0, gradient * _bend(x, eps)).sum()
        return of_values.to(values.dtype), of_positive, of_negative, None, None


def _bend(x: Tensor, eps: Tensor) -> Tensor:
    return torch.expm1(torch.minimum(x, eps)) - x
