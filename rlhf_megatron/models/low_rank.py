"""Gradients of low-rank factors, for layers that compute with weights which have them added in already.

The usual way to train an adapter computes W x and B (A x) apart, forward and backward. Here the weight is W + scale x
B A as it stands, merged after each optimizer step, so a forward pass costs what it costs without adapters, and trainer
and rollout have the very same numbers. No gradient of the weight is made. That of its factors needs the layer's input
x [t, columns] and the gradient g [t, rows] of its output alone:

    d A = scale x (g B)^T x        d B = scale x g^T (x A^T)

which are products as thin as the rank, of the sums that tensor parallelism leaves to others: factors are whole on every
rank, each rank has the part of their gradient that comes through its part of the layer and its tokens, and the caller
adds the parts up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from rlhf_megatron.models.experts import in_pairs

Span = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Adapted:
    """One of the weights that a linear layer has behind each other, and the windows of its A and B on this rank."""

    columns: Span  # of A: those of the layer on this rank
    rows: Sequence[tuple[Span, Span]]  # (of the layer and its output, the same ones of B); there may be none


@dataclasses.dataclass(frozen=True)
class LowRank:
    """The part of a layer's adapters on this rank. Ranks of a tensor-parallel group have the same list of weights."""

    weights: Sequence[Adapted]
    scale: float
    cut_by_columns: bool  # over the tensor-parallel ranks
    sequence_group: dist.ProcessGroup | None  # over which the sequence is cut outside the layer
    norm_epsilon: float | None = None  # of an RMSNorm that the layer begins with
    norm_offset: float = 0.0  # what is added to the norm's weight
    gates_first: bool = False  # in the output, of a weight whose rows are a gate's, its up's, the next gate's and so on


def attach(layer: torch.nn.Module, low_ranks: Sequence[LowRank], factors: Sequence[Tensor]) -> None:
    """Have backward passes through ``layer`` give the gradients of ``factors``; its own weight's is not asked for.

    ``factors`` are A and B of one weight after the other, float32; ``layer`` is a linear layer of Megatron's or of
    Transformer Engine's, whose output is a pair (output, bias). A grouped one has a part for each expert of its, in
    their order, and is called with the numbers of their tokens too.
    """
    norm = getattr(layer, "layer_norm_weight", None) if low_ranks[0].norm_epsilon is not None else None

    def after(_: torch.nn.Module, arguments: tuple[Any, ...], result: tuple[Tensor, Any]) -> tuple[Tensor, Any] | None:
        if not torch.is_grad_enabled():
            return None
        output, *rest = result
        tokens = None if len(low_ranks) == 1 else [int(count) for count in arguments[1]]
        learning: Tensor = _FactorGradients.apply(output, arguments[0], norm, low_ranks, tokens, *factors)  # type: ignore[no-untyped-call]
        return learning, *rest

    layer.register_forward_hook(after)


class _FactorGradients(torch.autograd.Function):
    """Identity of a layer's output; its gradient goes to the layer as it is, and to the factors as above."""

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        inputs: Tensor,
        norm: Tensor | None,
        low_ranks: Sequence[LowRank],
        tokens: Sequence[int] | None,
        *factors: Tensor,
    ) -> Tensor:
        # What comes before a norm is kept for it anyway; what comes behind it is made again.
        ctx.save_for_backward(inputs, norm, *factors)
        ctx.low_ranks, ctx.tokens = low_ranks, tokens
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        inputs, norm, *factors = ctx.saved_tensors
        low_ranks: Sequence[LowRank] = ctx.low_ranks
        if norm is not None:
            inputs = _normed(inputs, norm, low_ranks[0])
        x, g = inputs.flatten(0, -2), gradient.flatten(0, -2)
        if low_ranks[0].gates_first:
            g = in_pairs(g)
        if ctx.tokens is None:
            return gradient, None, None, None, None, *factor_gradients(x, g, low_ranks[0], factors)
        of_factors: list[Tensor] = []
        for low_rank, own_x, own_g in zip(low_ranks, x.split(ctx.tokens), g.split(ctx.tokens), strict=True):
            own = factors[len(of_factors) : len(of_factors) + 2 * len(low_rank.weights)]
            of_factors += factor_gradients(own_x, own_g, low_rank, own)
        return gradient, None, None, None, None, *of_factors


def _normed(inputs: Tensor, weight: Tensor, low_rank: LowRank) -> Tensor:
    """Return what the norm that a layer begins with makes of its input."""
    rms_norm, epsilon = torch.nn.functional.rms_norm, low_rank.norm_epsilon
    if not low_rank.norm_offset:
        return rms_norm(inputs, weight.shape, weight, epsilon)
    wide = torch.promote_types(inputs.dtype, torch.float32)  # in which Transformer Engine adds the offset
    factor = weight.to(wide) + low_rank.norm_offset
    return rms_norm(inputs.to(wide), weight.shape, factor, epsilon).type_as(inputs)


def factor_gradients(x: Tensor, g: Tensor, low_rank: LowRank, factors: Sequence[Tensor]) -> list[Tensor]:
    """Return this rank's part of the gradients of ``factors``, each of its factor's shape and type.

    x [t, columns of this rank] is the layer's input, g [t, rows of this rank] the gradient of its output. With a
    ``sequence_group`` the t of x (with ``cut_by_columns`` those of g) are this rank's part of the other's.
    """
    pairs = list(zip(low_rank.weights, factors[::2], factors[1::2], strict=True))
    rank = len(factors[0])
    down = torch.cat([a[:, slice(*weight.columns)] for weight, a, _ in pairs]).to(x.dtype)
    read = x @ down.T  # [t, rank x weights]
    pulled = g.new_zeros(len(g), rank * len(pairs))
    for number, (weight, _, b) in enumerate(pairs):
        for own, of_factor in weight.rows:
            pulled[:, number * rank : (number + 1) * rank] += g[:, slice(*own)] @ b[slice(*of_factor)].to(g.dtype)
    if low_rank.sequence_group is not None:
        # What is made of a part of the columns or rows is a part of a sum, over ranks that have other tokens next.
        if low_rank.cut_by_columns:
            pulled = gather_from_sequence_parallel_region(pulled, group=low_rank.sequence_group)
            read = reduce_scatter_to_sequence_parallel_region(read, group=low_rank.sequence_group)
        else:
            read = gather_from_sequence_parallel_region(read, group=low_rank.sequence_group)
            pulled = reduce_scatter_to_sequence_parallel_region(pulled, group=low_rank.sequence_group)
    gradients = [torch.zeros_like(factor) for factor in factors]
    of_down = _product(pulled.T, x, low_rank.scale)
    for number, (weight, _, _) in enumerate(pairs):
        of_weight = slice(number * rank, (number + 1) * rank)
        gradients[2 * number][:, slice(*weight.columns)] = of_down[of_weight]
        for own, of_factor in weight.rows:
            of_up = _product(g[:, slice(*own)].T, read[:, of_weight], low_rank.scale)
            gradients[2 * number + 1][slice(*of_factor)] = of_up
    return gradients


def _product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """Return scale x left @ right, a sum over all tokens; on a GPU not rounded to the factors' own type."""
    if left.is_cuda and left.dtype in (torch.bfloat16, torch.float16):
        product: Tensor = torch.mm(left, right, out_dtype=torch.float32)  # type: ignore[call-overload]
    else:
        product = left @ right
    return product.mul_(scale)
