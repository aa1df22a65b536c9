"""Logprob and entropy of tokens from logits that are cut over the vocabulary.

Plain torch: the reference that a fused kernel is held against. Nothing as large as the logits is kept beside them: the
softmax is computed again in the backward pass, a chunk of tokens at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def vocab_parallel_logprobs(
    logits: Tensor,
    targets: Tensor,
    tensor_group: dist.ProcessGroup | None,
    vocab_size: int,
    temperature: float = 1.0,
    chunk_tokens: int = 2048,
) -> tuple[Tensor, Tensor]:
    """Logprob of each target and entropy of each distribution, both [T] float32 (float64 for float64 logits).

    logits [T, V_local]: rank r of ``tensor_group`` holds columns r * V_local and on; columns from ``vocab_size`` on are
    padding with probability 0. targets [T] int64. Both outputs are of softmax(logits / temperature), natural logarithm,
    and differentiable. All ranks of the group get the same values; each gets the gradient of its own columns. A target
    that is no token of the vocabulary has logprob NaN: it is never a plausible number.
    """
    return _VocabParallelLogprobs.apply(logits, targets, tensor_group, vocab_size, temperature, chunk_tokens)  # type: ignore[no-any-return]


def _scaled(logits: Tensor, rows: slice, real: int, temperature: float) -> Tensor:
    """Some rows of logits / temperature in the computing type, padded columns at minus infinity."""
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    chunk = logits[rows].to(wide) / temperature
    chunk[:, real:] = -torch.inf
    return chunk


def _entropy_terms(probability: Tensor, log_probability: Tensor) -> Tensor:
    """p log p, with 0 log 0 = 0."""
    return torch.where(probability > 0, probability * log_probability, 0.0)


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        group: dist.ProcessGroup | None,
        vocab_size: int,
        temperature: float,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        tokens, columns = logits.shape
        rank = group.rank() if group is not None else 0
        parallel = group is not None and group.size() > 1
        real = min(max(vocab_size - rank * columns, 0), columns)
        local = targets - rank * columns
        mine = (local >= 0) & (local < columns)
        local = local.clamp(0, columns - 1)
        chunks = [slice(start, start + chunk_tokens) for start in range(0, tokens, chunk_tokens)]
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32

        largest = torch.full((tokens,), -torch.inf, dtype=wide, device=logits.device)
        for rows in chunks:
            largest[rows] = _scaled(logits, rows, real, temperature).amax(-1)
        if parallel:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        # Sums of exp(z), of z exp(z) and of the target's z, all with the largest z taken off.
        sums = torch.zeros(3, tokens, dtype=wide, device=logits.device)
        for rows in chunks:
            shifted = _scaled(logits, rows, real, temperature) - largest[rows, None]
            weight = shifted.exp()
            sums[0, rows] = weight.sum(-1)
            sums[1, rows] = _entropy_terms(weight, shifted).sum(-1)
            sums[2, rows] = shifted.gather(-1, local[rows, None])[:, 0].masked_fill(~mine[rows], 0.0)
        if parallel:
            dist.all_reduce(sums, group=group)
        log_normaliser = sums[0].log()
        entropy = log_normaliser - sums[1] / sums[0]
        known = (targets >= 0) & (targets < vocab_size)
        logprobs = (sums[2] - log_normaliser).masked_fill(~known, torch.nan)
        ctx.save_for_backward(logits, local, mine, largest + log_normaliser, entropy)
        ctx.real, ctx.temperature, ctx.chunks = real, temperature, chunks
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """d logprob / dz = onehot - p;  d entropy / dz = -p (log p + entropy);  z = logits / temperature."""
        of_logprob, of_entropy = gradients
        logits, local, mine, log_normaliser, entropy = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for rows in ctx.chunks:
            log_probability = _scaled(logits, rows, ctx.real, ctx.temperature) - log_normaliser[rows, None]
            probability = log_probability.exp()
            chunk = -probability * of_logprob[rows, None]
            surprise = _entropy_terms(probability, log_probability) + probability * entropy[rows, None]
            chunk -= surprise * of_entropy[rows, None]
            onehot = (of_logprob[rows] * mine[rows])[:, None]
            chunk.scatter_add_(-1, local[rows, None], onehot)
            gradient[rows] = chunk / ctx.temperature
        return gradient, None, None, None, None, None
