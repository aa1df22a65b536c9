"""Products in 8 bits for the tests of ``fp8_product``. Run as a script, it checks the kernels where they are."""

from __future__ import annotations

import torch

from rlhf_megatron.kernels.fp8_product import TYPE, fp8_product_reference
from rlhf_megatron.kernels.triton_fp8_product import launch
from triton_kernels import let_loops_end_at_tensors

SHAPES = ((1, 128, 128), (3, 40, 48), (17, 264, 1040), (300, 136, 272))  # tokens, rows, inner dimension


def check_kernel(device: str, splits: tuple[int | None, ...] = (None, 1, 2, 5)) -> None:
    """Check the kernels against the reference, which is exact but for the order of its sums."""
    generator = torch.Generator().manual_seed(1)
    for tokens, rows, depth in SHAPES:
        values = [torch.randn(size, depth, generator=generator).to(TYPE).to(device) for size in (tokens, rows)]
        scales = [torch.rand(size, 1, generator=generator).to(device) + 0.5 for size in (tokens, rows)]
        x, weights = zip(values, scales, strict=True)
        bias = torch.randn(rows, generator=generator).to(device, torch.bfloat16)
        for given in (bias, None):
            expected = fp8_product_reference(x, weights, given, torch.float32)
            for number in splits:
                found = launch(x, weights, given, torch.float32, splits=number)
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    assert launch((x[0][:0], x[1][:0]), weights, None, torch.bfloat16).shape == (0, rows)


if __name__ == "__main__":
    let_loops_end_at_tensors()
    check_kernel("cpu")
