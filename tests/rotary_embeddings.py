"""Packed sequences of all sorts for the tests of ``rotary``. Run as a script, it checks the kernel where it is."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from rlhf_megatron.kernels.rotary import Rotation, rotate_reference

LENGTHS = [[1], [8, 0, 4, 28, 4], [4] * 9]  # of sequences; multiples of 4, so that two ranks can share them, but one
HEADS = [(1, 8, torch.float32), (14, 64, torch.bfloat16), (5, 24, torch.float32), (19, 128, torch.bfloat16)]
# Then how many numbers of a head turn, the factor, and whether pairs are interleaved.
PARTLY = [(3, 24, torch.float32, 16, 1.25, True), (5, 128, torch.bfloat16, 96, 0.75, False)]


def sequences(lengths: list[int]) -> Tensor:
    """Return where they begin, and the last one ends, as Megatron has it."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def angles_of(longest: int, dimension: int, step: float = 777.0) -> Tensor:
    """Return those of every position up to ``longest``, so many steps apart that a few go round many times."""
    return torch.outer(torch.arange(longest) * step, 10_000.0 ** -torch.arange(0, 1, 2 / dimension))


def check_kernel(device: str, every: int = 1) -> None:
    """Check the kernel and its gradient against float64 of the same numbers; heads that lie apart, and ranks that
    share.

    Of lengths and cases ``every`` second, say, is checked: Triton's interpreter takes long.
    """
    generator = torch.Generator().manual_seed(3)
    cases = [(*heads, heads[1], 1.0, False) for heads in HEADS] + PARTLY
    both = [
        (lengths, case) for m, lengths in enumerate(LENGTHS) for n, case in enumerate(cases) if (m + n) % every == 0
    ]
    for lengths, (heads, dimension, dtype, turned, *way) in both:
        cu_seqlens, angles = sequences(lengths), angles_of(max(lengths), turned)
        for parts, part in [(1, 0)] if lengths == [1] else [(1, 0), (2, 0), (2, 1)]:
            tokens = int(cu_seqlens[-1]) // parts
            fused, upstream = (
                torch.randn(tokens, heads + more, dimension, generator=generator).to(dtype) for more in (2, 0)
            )
            exact = fused.double().requires_grad_()
            of_kernel = fused.to(device).requires_grad_()
            found = Rotation.apply(
                of_kernel[:, 1 : heads + 1], cu_seqlens.to(device), angles.to(device), parts, part, *way
            )
            wanted = rotate_reference(exact[:, 1 : heads + 1], cu_seqlens, angles, parts, part, *way)
            found.backward(upstream.to(device))
            wanted.backward(upstream.double())
            assert found.dtype == dtype and found.is_contiguous()
            assert of_kernel.grad is not None and exact.grad is not None
            for ours, theirs in ((found, wanted), (of_kernel.grad, exact.grad)):
                rounding = torch.finfo(dtype).eps
                torch.testing.assert_close(ours.detach().cpu().double(), theirs.detach(), rtol=rounding, atol=4e-6)
    nothing = torch.zeros(0, 2, 8, device=device)
    assert Rotation.apply(nothing, sequences([0]).to(device), angles.to(device)[:, :4], 1, 0).shape == (0, 2, 8)


if __name__ == "__main__":
    check_kernel("cpu", every=2)
