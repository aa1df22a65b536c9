"""Gradients of weights that are added to Megatron's float32 sums as they are made: none in the model's type in between,
which takes memory, time to add, and digits.

Transformer Engine's layers and ours of experts have a switch for it. Token embeddings and output layer, which may be
one matrix, do it by what is here: in a small model they are a third of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor


def sum_gradients_in_products(model: torch.nn.Module) -> None:
    """Have layers add a weight's gradient to its ``main_grad`` within the product that makes it, and token embeddings
    to the rows of their tokens.

    ``model`` is in Megatron's DistributedDataParallel. Megatron's config has a switch for it, but that needs NVIDIA's
    apex for the layers that are Megatron's own.
    """
    modules: Iterator[Any] = model.modules()
    for module in modules:
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True
        if isinstance(module, VocabParallelEmbedding):
            module.weight.zero_out_wgrad = False  # else Megatron also adds what autograd has for tied embeddings
            module.register_forward_hook(_sum_rows)


def gradient_sum(weight: Tensor) -> Tensor | None:
    """Return the float32 sum that the backward pass to follow must add the gradient of ``weight`` to, as Megatron will
    not; None where there is none, and autograd is to have the gradient."""
    total: Tensor | None = getattr(weight, "main_grad", None)
    if total is not None and torch.is_grad_enabled():
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined] # read and reset by Megatron
        return total
    return None


def add_to_rows(total: Tensor, rows: Tensor, values: Tensor) -> None:
    """Do total[rows[i]] += values[i] for ``rows`` [n] of ``total`` [m, k] and values [n, k], in the same order each
    time."""
    ordered, order = rows.sort(stable=True)
    number = torch.zeros_like(ordered)  # of a row among the different ones
    number[1:] = (ordered[1:] != ordered[:-1]).cumsum(0)
    number_of = torch.empty_like(number).scatter_(0, order, number)
    sums = torch.ops.aten.embedding_dense_backward(values.to(total.dtype), number_of, len(rows), -1, False)
    # As many rows as there may be: those of no number have a sum of 0, and are all the first.
    total.index_add_(0, torch.zeros_like(ordered).scatter_(0, number, ordered), sums)


def _sum_rows(module: Any, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Return the embeddings with another gradient of their weight."""
    total = gradient_sum(module.weight)
    return output if total is None else _Rows.apply(output.detach(), module.weight, module, arguments[0], total)  # type: ignore[no-any-return, no-untyped-call]


class _Rows(torch.autograd.Function):
    """Embeddings as they are, of ids [b, t]; [t, b, hidden] where each tensor-parallel rank gets some of them."""

    @staticmethod
    def forward(ctx: Any, embeddings: Tensor, weight: Tensor, module: Any, ids: Tensor, total: Tensor) -> Tensor:
        ctx.module, ctx.total = module, total
        ctx.save_for_backward(ids, weight)
        return embeddings

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        ids, weight = ctx.saved_tensors
        module = ctx.module
        if module.reduce_scatter_embeddings:
            gradient, ids = gather_from_sequence_parallel_region(gradient, group=module.tp_group), ids.t()
        rows, values = ids.flatten() - module.vocab_start_index, gradient.flatten(0, 1)
        elsewhere = (rows < 0) | (rows >= len(weight))
        add_to_rows(ctx.total, rows.masked_fill(elsewhere, 0), values.masked_fill(elsewhere[:, None], 0))
        return None, torch.empty_like(weight), None, None, None
