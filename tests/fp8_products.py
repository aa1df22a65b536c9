"""Products in 8 bits for the tests of ``fp8_product``. Run as a script, it checks the kernels where they are."""

from __future__ import annotations

import torch

from rlhf_megatron.kernels.fp8_product import BLOCK, TYPE, fp8_product_reference
from rlhf_megatron.kernels.triton_fp8_product import Tiles, launch
from triton_kernels import let_loops_end_at_tensors

SHAPES = ((1, 1, 1), (3, 2, 1), (17, 1, 5), (300, 2, 2))  # tokens; blocks of rows and of the inner dimension


def check_kernel(device: str, splits: tuple[int | None, ...] = (None, 1, 2, 5)) -> None:
    """Check the kernels against the reference, which is exact but for the order of its sums."""
    generator = torch.Generator().manual_seed(1)

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(device)

    for tokens, rows, depth in SHAPES:
        x = drawn(tokens, depth * BLOCK).to(TYPE), drawn(depth, tokens).exp().t()  # by columns, as vLLM's kernel reads
        weights = drawn(rows * BLOCK, depth * BLOCK).to(TYPE), drawn(rows, depth).exp()
        bias = drawn(rows * BLOCK).bfloat16()
        for given in (bias, None):
            expected = fp8_product_reference(x, weights, given, torch.float32)
            for number in splits:
                for tiles in (Tiles(), Tiles(rows=64, warps=4, most_tokens=64)):
                    found = launch(x, weights, given, torch.float32, tiles, number)
                    # A GPU's matrix units keep some 14 bits of a block's sum.
                    bound = 1e-6 if device == "cpu" else 2e-3
                    assert (found - expected).abs().max() < bound * expected.abs().max()
            found = launch((x[0], x[1].contiguous()), weights, given, torch.bfloat16)
            torch.testing.assert_close(found.float(), expected, rtol=0.01, atol=0.01 * float(expected.abs().mean()))
    assert launch((x[0][:0], x[1][:0]), weights, None, torch.bfloat16).shape == (0, 2 * BLOCK)


if __name__ == "__main__":
    let_loops_end_at_tensors()
    check_kernel("cpu")
