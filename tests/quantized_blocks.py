"""Weights for the tests of ``block_quantization``. Run as a script, it checks the kernel where it is."""

from __future__ import annotations

import torch

from rlhf_megatron.kernels.block_quantization import BLOCK, TYPE, quantize_blocks_reference
from rlhf_megatron.kernels.triton_block_quantization import launch

SHAPES = ((1, 1), (2, 3))  # blocks of rows and columns


def check_kernel(device: str) -> None:
    """Check the kernel against the reference, on a GPU bit by bit: rows apart, zeros, and limits of the type."""
    generator = torch.Generator().manual_seed(1)
    for (rows, columns), dtype in zip(SHAPES * 2, (torch.bfloat16, torch.float32) * 2, strict=True):
        apart = torch.randn(rows * BLOCK, columns * BLOCK + 8, generator=generator).to(dtype)
        values = apart[:, : columns * BLOCK].to(device)
        values[:BLOCK] *= 1e-9 if rows == 1 else 0.0
        values[-1, -1] = 3.0e4
        found, expected = (
            (torch.empty(values.shape, dtype=TYPE, device=device), torch.empty(rows, columns, device=device))
            for _ in range(2)
        )
        launch(values, *found)
        quantize_blocks_reference(values, *expected)
        assert torch.equal(found[1], expected[1])
        bits, wanted = (quantized.view(torch.uint8) for quantized, _ in (found, expected))
        if device != "cpu":
            assert torch.equal(bits, wanted)
            continue
        # Triton 3.6's interpreter rounds ties away from 0, subnormal numbers towards it, and loses the carry of what it
        # rounds up to a power of two.
        carried = (wanted & 7 == 0) & (wanted & 127 != 0)
        near = [quantized.float()[~carried] for quantized, _ in (found, expected)]
        torch.testing.assert_close(*near, rtol=1 / 8, atol=2**-8)


if __name__ == "__main__":
    check_kernel("cpu")
