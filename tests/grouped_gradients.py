"""Gradients of experts for the tests of ``grouped_gradient``. Run as a script, it checks the kernel where it is."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from rlhf_megatron.kernels.grouped_gradient import add_grouped_gradient_reference
from rlhf_megatron.kernels.triton_grouped_gradient import COLUMNS, ROWS, launch
from triton_kernels import let_loops_end_at_tensors

TOKENS = ([70, 0, 1, 9, 64, 200], [0, 0, 3, 0, 0, 0], [0] * 6)
SHAPES = ((24, 8), (ROWS + 8, COLUMNS + 8))  # of an expert's matrix: within a tile, and beyond one


def check_kernel(device: str, dtype: torch.dtype) -> None:
    """Check the kernel against float64, where experts have no tokens, and rows of tokens are parts of longer ones."""
    generator = torch.Generator().manual_seed(1)
    for tokens, (rows, columns) in itertools.product(TOKENS, SHAPES):
        total = torch.randn(len(tokens), rows, columns, generator=generator)
        gradients = torch.randn(sum(tokens), rows + 8, generator=generator).to(device, dtype)[:, :rows]
        inputs = torch.randn(sum(tokens), columns + 8, generator=generator).to(device, dtype)[:, :columns]
        found = total.clone().to(device)
        launch(found, gradients, inputs, torch.tensor(tokens).cumsum(0).to(torch.int32).to(device))
        check(found, total, gradients, inputs, tokens)


def check(found: Tensor, total: Tensor, gradients: Tensor, inputs: Tensor, tokens: list[int]) -> None:
    """Check ``found``, the sums with the gradients in them; those of an expert without tokens are as they were."""
    expected = total.double()
    add_grouped_gradient_reference(expected, gradients.cpu(), inputs.cpu(), tokens)
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-5, atol=1e-4)
    for expert, count in enumerate(tokens):
        assert count or torch.equal(found[expert].cpu(), total[expert])


if __name__ == "__main__":
    let_loops_end_at_tensors()
    check_kernel("cpu", torch.float16)  # the interpreter multiplies no bfloat16
