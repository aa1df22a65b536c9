"""The kernel of ``token_logprob``: one program for each row, which it reads in large pieces.

A row's pieces come one after the other, so it is their number and not the memory that takes the time of few rows: with
pieces of 1,024 a vocabulary of 152,000 would have 149 of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS, WARPS = 32768, 32


@triton.jit
def _token_logprob(  # type: ignore[no-untyped-def] # Triton looks names of annotations up and accepts its own alone
    logits,
    tokens,
    logprobs,
    stride,
    VOCABULARY: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    begin = logits + row * stride
    largest = float("-inf")
    total = 0.0  # of exp(z - largest), what was summed before being scaled as ``largest`` grows
    for first in range(0, VOCABULARY, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        z = tl.load(begin + column, mask=column < VOCABULARY, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(largest, tl.max(z))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # so far there may be nothing but -inf
        total = total * tl.exp(largest - shift) + tl.sum(tl.exp(z - shift))
        largest = higher
    chosen = tl.load(begin + tl.load(tokens + row)).to(tl.float32)
    tl.store(logprobs + row, chosen - largest - tl.log(total))


def launch(logits: Tensor, tokens: Tensor) -> Tensor:
    """See ``token_logprob.token_logprobs``."""
    if logits.stride(1) != 1:
        raise ValueError(f"logits {list(logits.shape)} with strides {logits.stride()} have no contiguous rows")
    logprobs = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits):
        _token_logprob[(len(logits),)](
            logits, tokens.contiguous(), logprobs, logits.stride(0), logits.shape[1], COLUMNS, num_warps=WARPS
        )
    return logprobs
