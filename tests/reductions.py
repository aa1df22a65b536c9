"""Triton's reductions of logits against torch's; a script, which Triton's interpreter runs on a CPU."""

from __future__ import annotations

import torch

from rlhf_megatron.kernels import triton_linear_logprob as triton
from rlhf_megatron.kernels.linear_logprob import PIECE, merge, reduce, to_gradient

TOKENS, REAL, TEMPERATURE = 7, PIECE + 333, 0.7
BLOCKS = [slice(0, PIECE + 130), slice(PIECE + 130, REAL)]  # of two pieces and of one
TARGETS = torch.tensor([0, PIECE - 1, PIECE, REAL - 1, -1, REAL, PIECE + 130])


def check(soft_cap: float | None) -> None:
    """Raise AssertionError where they differ."""
    logits = torch.randn(TOKENS, REAL, generator=torch.Generator().manual_seed(3)) * 3
    both = []
    for implementation in (reduce, triton.reduce):
        found = torch.full((TOKENS,), 7.0)  # of what is not among a block's columns it stays
        parts = [
            implementation(logits[:, block].contiguous(), TARGETS - block.start, found, TEMPERATURE, soft_cap)
            for block in BLOCKS
        ]
        both.append((*merge(torch.cat(parts, dim=1)), found))
    assert [part.shape[1] for part in parts] == [2, 1]
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)

    largest, total, weighted, found = both[0]
    capped = logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)
    wanted = capped.gather(-1, TARGETS.clamp(0, REAL - 1)[:, None])[:, 0] / TEMPERATURE
    torch.testing.assert_close(found, torch.where((TARGETS >= 0) & (TARGETS < REAL), wanted, 7.0))
    log_total = total.log()
    state = largest + log_total, log_total - weighted / total
    ramp = torch.linspace(-1, 2, TOKENS)
    for block in BLOCKS:
        arguments = (TARGETS - block.start, *state, ramp, ramp.flip(0), TEMPERATURE, soft_cap)
        one = to_gradient(logits[:, block].contiguous(), *arguments)
        other = triton.to_gradient(logits[:, block].contiguous(), *arguments)
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


if __name__ == "__main__":
    check(None)
    check(2.0)
