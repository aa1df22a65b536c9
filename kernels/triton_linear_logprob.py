"""The reductions of ``linear_logprob`` over a block of logits in one pass each; gradients take the logits' place."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rlhf_megatron.kernels.linear_logprob import PIECE

WARPS = 4


@triton.jit
def _capped(products, soft_cap):  # type: ignore[no-untyped-def]
    """Cap products: soft_cap x tanh(products / soft_cap); tanh(x) = 2 sigmoid(2 x) - 1."""
    return soft_cap * (2 * tl.sigmoid(2 * products / soft_cap) - 1)


@triton.jit
def _reduce(  # type: ignore[no-untyped-def] # Triton looks names of annotations up and accepts its own alone
    logits,
    targets,
    target_logits,
    parts,
    stride,
    columns,
    per_temperature,
    soft_cap,
    COLUMNS: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Reduce a piece of one row."""
    tokens, pieces = tl.num_programs(0), tl.num_programs(1)
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    inside = column < columns
    begin = logits + row * stride
    z = tl.load(begin + column, mask=inside, other=float("-inf")).to(tl.float32)
    if CAPPED:
        z = tl.where(inside, _capped(z, soft_cap), float("-inf"))
    z *= per_temperature
    largest = tl.max(z)
    below = z - largest
    weight = tl.exp(below)
    where = parts + tl.program_id(1) * tokens + row
    tl.store(where, largest)
    tl.store(where + pieces * tokens, tl.sum(weight))
    tl.store(where + 2 * pieces * tokens, tl.sum(tl.where(inside, below, 0.0) * weight))
    target = tl.load(targets + row)
    here = (target >= first) & (target < first + COLUMNS) & (target < columns)
    chosen = tl.load(begin + target, mask=here, other=0.0).to(tl.float32)
    if CAPPED:
        chosen = _capped(chosen, soft_cap)
    tl.store(target_logits + row, chosen * per_temperature, mask=here)


@triton.jit
def _to_gradient(  # type: ignore[no-untyped-def]
    logits,
    targets,
    log_normaliser_of,
    entropy_of,
    of_logprob,
    of_entropy,
    stride,
    columns,
    per_temperature,
    soft_cap,
    COLUMNS: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Turn a piece of one row into its gradient, in place."""
    row = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    where = logits + row.to(tl.int64) * stride + column
    z = tl.load(where, mask=inside, other=float("-inf")).to(tl.float32)
    if CAPPED:
        z = _capped(z, soft_cap)
    log_probability = z * per_temperature - tl.load(log_normaliser_of + row)
    probability = tl.exp(log_probability)
    surprise = probability * (tl.where(inside, log_probability, 0.0) + tl.load(entropy_of + row))
    to_logprob = tl.load(of_logprob + row)
    gradient = -probability * to_logprob - surprise * tl.load(of_entropy + row)
    gradient += tl.where(column == tl.load(targets + row), to_logprob, 0.0)
    if CAPPED:
        share = z / soft_cap
        gradient *= 1 - share * share
    tl.store(where, (gradient * per_temperature).to(logits.dtype.element_ty), mask=inside)


def reduce(
    logits: Tensor, targets: Tensor, target_logits: Tensor, temperature: float, soft_cap: float | None = None
) -> Tensor:
    """See ``linear_logprob.reduce``."""
    tokens, columns = logits.shape
    pieces = triton.cdiv(columns, PIECE)
    parts = target_logits.new_empty(3, pieces, tokens)
    if tokens:
        _reduce[(tokens, pieces)](
            logits,
            targets,
            target_logits,
            parts,
            logits.stride(0),
            columns,
            1.0 / temperature,
            soft_cap or 0.0,
            COLUMNS=PIECE,
            CAPPED=soft_cap is not None,
            num_warps=WARPS,
        )
    return parts


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
    """See ``linear_logprob.to_gradient``; return ``logits`` itself."""
    tokens, columns = logits.shape
    if tokens:
        _to_gradient[(tokens, triton.cdiv(columns, PIECE))](
            logits,
            targets,
            log_normaliser,
            entropy,
            of_logprob.contiguous(),
            of_entropy.contiguous(),
            logits.stride(0),
            columns,
            1.0 / temperature,
            soft_cap or 0.0,
            COLUMNS=PIECE,
            CAPPED=soft_cap is not None,
            num_warps=WARPS,
        )
    return logits
