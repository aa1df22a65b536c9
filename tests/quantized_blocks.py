"""Weights and tokens for the tests of ``block_quantization``. Run as a script, it checks the kernels where it is."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_megatron.kernels.block_quantization import (
    BLOCK,
    TYPE,
    quantize_blocks_reference,
    quantize_groups,
    quantize_groups_reference,
)
from rlhf_megatron.kernels.triton_block_quantization import launch, launch_groups

SHAPES = ((1, 1), (2, 3))  # blocks of rows and columns


TOKENS = (1, 16, 37)


def check_kernels(device: str) -> None:
    """Check the kernels against the reference, on a GPU bit by bit: rows apart, zeros, and limits of the type."""
    generator = torch.Generator().manual_seed(1)

    def draw(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        apart = torch.randn(rows, columns * BLOCK + 8, generator=generator).to(dtype)
        return apart[:, : columns * BLOCK].to(device)

    for (rows, columns), dtype in zip(SHAPES * 2, (torch.bfloat16, torch.float32) * 2, strict=True):
        values = draw(rows * BLOCK, columns, dtype)
        values[:BLOCK] *= 1e-9 if rows == 1 else 0.0
        values[-1, -1] = 3.0e4
        found, expected = (
            (torch.empty(values.shape, dtype=TYPE, device=device), torch.empty(rows, columns, device=device))
            for _ in range(2)
        )
        launch(values, *found)
        quantize_blocks_reference(values, *expected)
        check_equal(found, expected)
    for rows, dtype in zip(TOKENS * 2, (torch.bfloat16, torch.float32) * len(TOKENS), strict=True):
        values = draw(rows, 3, dtype)
        values[:, :BLOCK] *= 0.0
        values[-1, -1] = 3.0e4
        found, expected = (quantize_groups(values) for _ in range(2))  # on a GPU by the kernel, both
        for quantized, scales in (found, expected):
            quantized.zero_()
            scales.zero_()
        launch_groups(values, *found)
        quantize_groups_reference(values, *expected)
        assert found[1].stride() == (1, (rows + 3) // 4 * 4)
        check_equal(found, expected)


def check_equal(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Check what a kernel has made; in Triton's interpreter numbers may be rounded otherwise."""
    assert torch.equal(found[1], expected[1])
    bits, wanted = (quantized.view(torch.uint8) for quantized, _ in (found, expected))
    if bits.is_cuda:
        assert torch.equal(bits, wanted)
        return
    # Triton 3.6's interpreter rounds ties away from 0, subnormal numbers towards it, and loses the carry of what it
    # rounds up to a power of two.
    carried = (wanted & 7 == 0) & (wanted & 127 != 0)
    near = [quantized.float()[~carried] for quantized, _ in (found, expected)]
    torch.testing.assert_close(*near, rtol=1 / 8, atol=2**-8)


if __name__ == "__main__":
    check_kernels("cpu")
