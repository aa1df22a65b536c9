"""Logprob and entropy of tokens straight from hidden states and an output layer that is cut over the vocabulary.

Logits are made for one block of the vocabulary at a time, reduced, and made again in the backward pass, so memory grows
with tokens and with the block, never with tokens x vocabulary; unless the caller has memory for all of them, and they
are made once. Here in plain torch, which runs anywhere; on a GPU the reductions over a block are those of
``triton_linear_logprob``. The matrix products are torch's in both.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

BLOCK_BYTES = 256 << 20  # of logits, where that is no less than a piece of the vocabulary
PIECE = 4096  # columns; each block costs a pass over all hidden states, so many narrow ones would take the time


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    tensor_group: dist.ProcessGroup | None,
    vocab_size: int,
    temperature: float = 1.0,
    block_columns: int | None = None,
    kept_bytes: int = 0,
    soft_cap: float | None = None,
    weight_sum: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return logprob of each target and entropy of each distribution, both [T] float32 (float64 for float64 inputs).

    hidden [T, H] and weight [V_local, H] are of one type: rank r of ``tensor_group`` holds rows r * V_local and on;
    those from ``vocab_size`` on are padding with probability 0. targets [T] int64. Both outputs are of
    softmax(logits / temperature), natural logarithm, and differentiable; logits are hidden @ weight.T, or with a
    ``soft_cap`` c they are c tanh(hidden @ weight.T / c). All ranks of the group get the same values. Each gets the
    gradient of its own weight, and that part of the gradient of ``hidden`` that comes through its own weight: the
    caller adds the parts up. A target that is no token of the vocabulary has logprob NaN: never a
    plausible number.
    ``block_columns`` of the vocabulary exist as logits at a time, by default as many pieces as fill ``BLOCK_BYTES``.
    Where all logits of the rank, T x V_local in the inputs' type, take no more than ``kept_bytes`` and there will be a
    backward pass, they are one block that stays until then, and becomes their gradient.
    ``weight_sum`` [V_local, H] float32 gets the gradient of ``weight`` added, and autograd numbers without a meaning.
    """
    learns = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    kept_rows = _kept_rows(len(hidden), kept_bytes // (len(weight) * hidden.itemsize)) if learns else 0
    columns = block_columns or PIECE * max(1, BLOCK_BYTES // max(1, len(hidden) * hidden.itemsize * PIECE))
    columns = len(weight) if kept_rows else columns
    return _LinearLogprobs.apply(  # type: ignore[no-any-return, no-untyped-call]
        hidden, weight, targets, tensor_group, vocab_size, temperature, columns, kept_rows, soft_cap, weight_sum
    )


def _kept_rows(tokens: int, most: int) -> int:
    """Return rows to keep logits in, 0 if there is no memory for all: as far as there is, up to a sixteenth more than
    ``tokens``, so that the next micro-batch, with about as many, asks for the same size and finds memory that fits."""
    step = 1 << max(0, tokens.bit_length() - 5)
    return min(-(-tokens // step) * step, most) if tokens <= most else 0


class Reduced(NamedTuple):
    """Reductions of z = logits / temperature, capped before, over columns, [T] each, in the computing type."""

    largest: Tensor  # m = max z
    total: Tensor  # sum exp(z - m)
    weighted: Tensor  # sum (z - m) exp(z - m)


def _capped(products: Tensor, soft_cap: float | None) -> Tensor:
    return products if soft_cap is None else soft_cap * torch.tanh(products / soft_cap)


def reduce(
    logits: Tensor, targets: Tensor, target_logits: Tensor, temperature: float, soft_cap: float | None = None
) -> Tensor:
    """Return the parts of ``Reduced`` for each of p sets of the columns of ``logits`` [T, C]: [3, p, T], typed as
    ``target_logits``.

    ``target_logits`` [T] gets z of those ``targets`` [T], counted from the first column, that are among the columns.
    ``logits`` are those before the ``soft_cap``.
    """
    z = _capped(logits.to(target_logits.dtype), soft_cap) / temperature
    largest = z.amax(-1)
    below = z - largest[:, None]
    weight = below.exp()
    inside = (targets >= 0) & (targets < z.shape[1])
    picked = z.gather(-1, targets.clamp(0, z.shape[1] - 1)[:, None])[:, 0]
    target_logits.copy_(torch.where(inside, picked, target_logits))
    return torch.stack([largest, weight.sum(-1), _times(weight, below).sum(-1)])[:, None]


def merge(parts: Tensor) -> Reduced:
    """Return the reductions over all p sets of columns, given those of each, [3, p, T]."""
    largest = parts[0].amax(0)
    shift = parts[0] - largest
    factor = shift.exp()
    return Reduced(largest, (parts[1] * factor).sum(0), ((parts[2] + shift * parts[1]) * factor).sum(0))


def to_gradient(
    logits: Tensor,
    targets: Tensor,
    log_normaliser: Tensor,
    entropy: Tensor,
    of_logprob: Tensor,
    of_entropy: Tensor,
    temperature: float,
    soft_cap: float | None = None,
) -> Tensor:
    """Return the gradient of ``logits`` [T, C] in their type; all others [T], ``targets`` and ``soft_cap`` as in
    ``reduce``.

    d logprob / dz = onehot - p;  d entropy / dz = -p (log p + entropy);  z = capped / temperature;
    d capped / d logits = 1 - (capped / soft_cap)^2.
    """
    capped = _capped(logits.to(entropy.dtype), soft_cap)
    log_probability = capped / temperature - log_normaliser[:, None]
    probability = log_probability.exp()
    gradient = -probability * of_logprob[:, None]
    gradient -= (_times(probability, log_probability) + probability * entropy[:, None]) * of_entropy[:, None]
    inside = (targets >= 0) & (targets < logits.shape[1])
    gradient.scatter_add_(-1, targets.clamp(0, logits.shape[1] - 1)[:, None], (of_logprob * inside)[:, None])
    if soft_cap is not None:
        gradient *= 1 - (capped / soft_cap).square()
    return (gradient / temperature).to(logits.dtype)


def _times(weight: Tensor, value: Tensor) -> Tensor:
    """Return weight x value, with 0 x infinity = 0."""
    return torch.where(weight > 0, weight * value, 0.0)


def _over_ranks(reduced: Reduced, target_logits: Tensor, group: dist.ProcessGroup) -> tuple[Reduced, Tensor]:
    """Return the reductions over all ranks' columns, and the target logits, of which each is on one of the ranks."""
    largest = reduced.largest.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    # A rank that has padding alone has nothing, and no difference to the largest.
    shift = torch.where(reduced.total > 0, reduced.largest - largest, 0.0)
    factor = torch.where(reduced.total > 0, shift.exp(), 0.0)
    sums = torch.stack([reduced.total * factor, (reduced.weighted + shift * reduced.total) * factor, target_logits])
    dist.all_reduce(sums, group=group)
    return Reduced(largest, sums[0], sums[1]), sums[2]


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add to a total, total += left @ right; on a GPU in the product itself, which then is not rounded to the factors'
    type either."""
    if total.is_cuda and total.dtype != left.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)  # type: ignore[call-overload]
    else:
        total += left @ right


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
        block_columns: int,
        kept_rows: int,
        soft_cap: float | None,
        weight_sum: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        rank = group.rank() if group is not None else 0
        real = min(max(vocab_size - rank * len(weight), 0), len(weight))
        local = targets - rank * len(weight)
        blocks = [slice(start, min(start + block_columns, real)) for start in range(0, real, block_columns)]
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        target_logits = torch.zeros(len(hidden), dtype=wide, device=hidden.device)
        over = functools.partial(_implementation(hidden).reduce, temperature=temperature, soft_cap=soft_cap)
        kept = None
        if kept_rows and blocks:
            kept = hidden.new_empty(kept_rows, real)[: len(hidden)]
            torch.mm(hidden, weight[:real].T, out=kept)
        parts = [
            over(hidden @ weight[block].T if kept is None else kept, local - block.start, target_logits)
            for block in blocks
        ]
        if parts:
            reduced = merge(torch.cat(parts, dim=1))
        else:  # padding alone
            reduced = Reduced(
                torch.full_like(target_logits, -torch.inf),
                torch.zeros_like(target_logits),
                torch.zeros_like(target_logits),
            )
        if group is not None and group.size() > 1:
            reduced, target_logits = _over_ranks(reduced, target_logits, group)
        log_total = reduced.total.log()
        log_normaliser, entropy = reduced.largest + log_total, log_total - reduced.weighted / reduced.total
        known = (targets >= 0) & (targets < vocab_size)
        logprobs = (target_logits - log_normaliser).masked_fill(~known, torch.nan)
        ctx.save_for_backward(hidden, weight, local, log_normaliser, entropy)
        ctx.temperature, ctx.soft_cap, ctx.blocks, ctx.kept = temperature, soft_cap, blocks, kept
        ctx.weight_sum = weight_sum
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, local, log_normaliser, entropy = ctx.saved_tensors
        total = ctx.weight_sum
        if total is None and ctx.needs_input_grad[1]:
            total = torch.zeros_like(weight)
        of_hidden = torch.zeros(hidden.shape, dtype=entropy.dtype, device=hidden.device)
        turn = functools.partial(
            _implementation(hidden).to_gradient, temperature=ctx.temperature, soft_cap=ctx.soft_cap
        )
        kept, ctx.kept = ctx.kept, None  # their gradient takes their place: a second backward pass makes them again
        for block in ctx.blocks:
            rows = weight[block]
            logits = hidden @ rows.T if kept is None else kept
            gradient = turn(logits, local - block.start, log_normaliser, entropy, *gradients)
            _add_product(of_hidden, gradient, rows)
            if total is not None:
                _add_product(total[block], gradient.T, hidden)
        of_weight = total if ctx.weight_sum is None else torch.empty_like(weight)
        return of_hidden.to(hidden.dtype), of_weight, *(None,) * 8


class _Torch:
    reduce, to_gradient = staticmethod(reduce), staticmethod(to_gradient)


def _implementation(hidden: Tensor) -> Any:
    """Choose the reductions: Triton's on a GPU."""
    if not hidden.is_cuda or hidden.dtype == torch.float64:
        return _Torch
    from rlhf_megatron.kernels import triton_linear_logprob

    return triton_linear_logprob
