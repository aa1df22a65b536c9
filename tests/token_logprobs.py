"""Logits of all sorts for the tests of ``token_logprob``. Run as a script, it checks the kernel where it is."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from rlhf_megatron.kernels.triton_token_logprob import COLUMNS, launch

ROWS = 5
INFINITY = float("inf")


def check_kernel(device: str) -> None:
    """Check the kernel against float64, where rows end within a piece, begin with nothing but -inf and have large
    numbers."""
    generator = torch.Generator().manual_seed(5)
    for dtype, columns in itertools.product((torch.float32, torch.bfloat16), (1, 300, COLUMNS, 2 * COLUMNS + 77)):
        wider = torch.randn(ROWS, columns + 19, generator=generator).mul(8).to(dtype)
        wider[1] += 1000
        wider[2] -= 1000
        wider[3, : columns - 1] = -INFINITY  # as of a token that top_p leaves alone
        tokens = torch.randint(columns, (ROWS,), generator=generator)
        tokens[3] = columns - 1
        wider[4, tokens[4] - 1] = -INFINITY
        logits = wider.to(device)[:, :columns]
        check(launch(logits, tokens.to(device)), logits, tokens)
        check(launch(logits[3:4], tokens[3:4].to(device)), logits[3:4], tokens[3:4])
        if columns > 1:  # a token that cannot be drawn
            assert launch(logits[3:4], torch.zeros(1, dtype=torch.int64, device=device)).item() == -INFINITY
    assert launch(logits[:0], tokens[:0].to(device)).shape == (0,)


def check(found: Tensor, logits: Tensor, tokens: Tensor) -> None:
    """Check that they are rounded no more than float32 numbers of this size are."""
    wanted = logits.cpu().double().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=1e-6, atol=2e-4)


if __name__ == "__main__":
    check_kernel("cpu")
