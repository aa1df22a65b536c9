"""Logprob and entropy of tokens straight from hidden states and an output layer that is cut over the vocabulary.

Logits are made for one block of the vocabulary at a time, reduced, and made again in the backward pass, so memory grows
with tokens and with the block, never with tokens x vocabulary. Here in plain torch, which runs anywhere; on a GPU the
reductions over a block are those of ``triton_linear_logprob``. The matrix products are torch's in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

BLOCK_BYTES = 256 << 20
LEAST_COLUMNS = 128


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    tensor_group: dist.ProcessGroup | None,
    vocab_size: int,
    temperature: float = 1.0,
    block_bytes: int = BLOCK_BYTES,
) -> tuple[Tensor, Tensor]:
    """Logprob of each target and entropy of each distribution, both [T] float32 (float64 for float64 inputs).

    hidden [T, H] and weight [V_local, H] are of one type: rank r of ``tensor_group`` holds rows r * V_local and on;
    those from ``vocab_size`` on are padding with probability 0. targets [T] int64. Both outputs are of
    softmax(hidden @ weight.T / temperature), natural logarithm, and differentiable. All ranks of the group get the same
    values. Each gets the gradient of its own weight, and that part of the gradient of ``hidden`` that comes through its
    own weight: the caller adds the parts up. A target that is no token of the vocabulary has logprob NaN: never a
    plausible number.
    ``block_bytes`` bounds the logits that exist at a time.
    """
    return _LinearLogprobs.apply(hidden, weight, targets, tensor_group, vocab_size, temperature, block_bytes)  # type: ignore[no-any-return, no-untyped-call]


class Reduced(NamedTuple):
    """Running reductions of z = logits / temperature over columns, [T] each, in the computing type."""

    largest: Tensor  # m = max z
    total: Tensor  # sum exp(z - m)
    weighted: Tensor  # sum (z - m) exp(z - m)
    found: Tensor  # z of the target, 0 where it is not among the columns


def absorb(logits: Tensor, targets: Tensor, reduced: Reduced, temperature: float) -> None:
    """Adds the columns of ``logits`` [T, C] to ``reduced``; ``targets`` [T] count from the first of these columns."""
    z = logits.to(reduced.total.dtype) / temperature
    largest = z.amax(-1, keepdim=True)
    weight = (z - largest).exp()
    weighted = _times(weight, z - largest)
    merge(reduced, largest, weight.sum(-1, keepdim=True), weighted.sum(-1, keepdim=True))
    inside = (targets >= 0) & (targets < z.shape[1])
    picked = z.gather(-1, targets.clamp(0, z.shape[1] - 1)[:, None])[:, 0]
    reduced.found.copy_(torch.where(inside, picked, reduced.found))


def merge(reduced: Reduced, largest: Tensor, total: Tensor, weighted: Tensor) -> None:
    """Adds the reductions of p sets of columns, [T, p] each, to ``reduced``."""
    _rescale(reduced, torch.maximum(reduced.largest, largest.amax(-1)))
    shift = largest - reduced.largest[:, None]
    factor = shift.exp()
    reduced.total.add_((total * factor).sum(-1))
    reduced.weighted.add_(((weighted + shift * total) * factor).sum(-1))


def to_gradient(
    logits: Tensor,
    targets: Tensor,
    log_normaliser: Tensor,
    entropy: Tensor,
    of_logprob: Tensor,
    of_entropy: Tensor,
    temperature: float,
) -> Tensor:
    """The gradient of ``logits`` [T, C] in their type; all others [T], ``targets`` as in ``absorb``.

    d logprob / dz = onehot - p;  d entropy / dz = -p (log p + entropy);  z = logits / temperature.
    """
    log_probability = logits.to(entropy.dtype) / temperature - log_normaliser[:, None]
    probability = log_probability.exp()
    gradient = -probability * of_logprob[:, None]
    gradient -= (_times(probability, log_probability) + probability * entropy[:, None]) * of_entropy[:, None]
    inside = (targets >= 0) & (targets < logits.shape[1])
    gradient.scatter_add_(-1, targets.clamp(0, logits.shape[1] - 1)[:, None], (of_logprob * inside)[:, None])
    return (gradient / temperature).to(logits.dtype)


def _times(weight: Tensor, value: Tensor) -> Tensor:
    """weight x value, with 0 x infinity = 0."""
    return torch.where(weight > 0, weight * value, 0.0)


def _rescale(reduced: Reduced, largest: Tensor) -> None:
    """Makes ``largest`` [T] the m of ``reduced``, in place."""
    shift = torch.where(reduced.total > 0, reduced.largest - largest, 0.0)
    factor = torch.where(reduced.total > 0, shift.exp(), 0.0)
    reduced.weighted.add_(shift * reduced.total).mul_(factor)
    reduced.total.mul_(factor)
    reduced.largest.copy_(largest)


def _over_ranks(reduced: Reduced, group: dist.ProcessGroup) -> Reduced:
    """The reductions over all ranks' columns."""
    largest = reduced.largest.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    _rescale(reduced, largest)
    sums = torch.stack(reduced[1:])
    dist.all_reduce(sums, group=group)
    return Reduced(largest, *sums)


def _blocks(columns: int, tokens: int, itemsize: int, block_bytes: int) -> Iterator[slice]:
    width = max(LEAST_COLUMNS, block_bytes // max(1, tokens * itemsize) // LEAST_COLUMNS * LEAST_COLUMNS)
    for start in range(0, columns, width):
        yield slice(start, min(start + width, columns))


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        group: dist.ProcessGroup | None,
        vocab_size: int,
        temperature: float,
        block_bytes: int,
    ) -> tuple[Tensor, Tensor]:
        rank = group.rank() if group is not None else 0
        real = min(max(vocab_size - rank * len(weight), 0), len(weight))
        local = targets - rank * len(weight)
        blocks = list(_blocks(real, len(hidden), hidden.itemsize, block_bytes))
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        zero = torch.zeros(3, len(hidden), dtype=wide, device=hidden.device)
        reduced = Reduced(torch.full_like(zero[0], -torch.inf), *zero)
        add = _implementation(hidden).absorb
        for block in blocks:
            add(hidden @ weight[block].T, local - block.start, reduced, temperature)
        if group is not None and group.size() > 1:
            reduced = _over_ranks(reduced, group)
        log_total = reduced.total.log()
        log_normaliser, entropy = reduced.largest + log_total, log_total - reduced.weighted / reduced.total
        known = (targets >= 0) & (targets < vocab_size)
        logprobs = (reduced.found - log_normaliser).masked_fill(~known, torch.nan)
        ctx.save_for_backward(hidden, weight, local, log_normaliser, entropy)
        ctx.temperature, ctx.blocks = temperature, blocks
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, local, log_normaliser, entropy = ctx.saved_tensors
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        of_hidden = torch.zeros(hidden.shape, dtype=entropy.dtype, device=hidden.device)
        turn = _implementation(hidden).to_gradient
        for block in ctx.blocks:
            rows = weight[block]
            logits = hidden @ rows.T
            gradient = turn(logits, local - block.start, log_normaliser, entropy, *gradients, ctx.temperature)
            of_hidden += gradient @ rows
            if of_weight is not None:
                torch.mm(gradient.T, hidden, out=of_weight[block])
        return of_hidden.to(hidden.dtype), of_weight, None, None, None, None, None


class _Torch:
    absorb, to_gradient = staticmethod(absorb), staticmethod(to_gradient)


def _implementation(hidden: Tensor) -> Any:
    """Whose reductions: Triton's on a GPU."""
    if not hidden.is_cuda or hidden.dtype == torch.float64:
        return _Torch
    from rlhf_megatron.kernels import triton_linear_logprob

    return triton_linear_logprob
