"""Triton's reductions of logits against torch's; a script, which Triton's interpreter runs on a CPU."""

from __future__ import annotations

import torch

from rlhf_megatron.kernels import triton_linear_logprob as triton
from rlhf_megatron.kernels.linear_logprob import Reduced, absorb, to_gradient

TOKENS, REAL, TEMPERATURE = 7, 300, 0.7
BLOCKS = [slice(0, 130), slice(130, REAL)]
TARGETS = torch.tensor([0, 127, 128, 299, 64, 255, 1])


def check() -> None:
    """Raises AssertionError where they differ."""
    logits = torch.randn(TOKENS, REAL, generator=torch.Generator().manual_seed(3)) * 3
    both = []
    for implementation in (absorb, triton.absorb):
        reduced = Reduced(torch.full((TOKENS,), -torch.inf), *torch.zeros(3, TOKENS))
        for block in BLOCKS:
            implementation(logits[:, block].contiguous(), TARGETS - block.start, reduced, TEMPERATURE)
        both.append(reduced)
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)

    log_total = both[0].total.log()
    state = both[0].largest + log_total, log_total - both[0].weighted / both[0].total
    ramp = torch.linspace(-1, 2, TOKENS)
    for block in BLOCKS:
        arguments = (TARGETS - block.start, *state, ramp, ramp.flip(0), TEMPERATURE)
        one = to_gradient(logits[:, block].contiguous(), *arguments)
        other = triton.to_gradient(logits[:, block].contiguous(), *arguments)
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


if __name__ == "__main__":
    check()
