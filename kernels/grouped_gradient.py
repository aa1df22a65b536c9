"""Gradients of the matrices of experts, added to their float32 sums; each is of its expert's tokens alone.

Torch's ``grouped_mm`` makes such gradients in the type of its factors, which costs digits, memory and time to add them
up. The sums in a loop over experts are the reference, and what CPUs and float32 use. On a GPU one Triton kernel
(``triton_grouped_gradient``) adds each product to its sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def add_grouped_gradient_reference(total: Tensor, gradients: Tensor, inputs: Tensor, tokens: Sequence[int]) -> None:
    """Do ``total`` [experts, rows, columns] float32 += gradients^T x inputs, expert by expert.

    ``gradients`` [t, rows] and ``inputs`` [t, columns] have the ``tokens`` of the first expert, then the next one's.
    """
    for own, gradient, values in zip(total, gradients.split(tokens), inputs.split(tokens), strict=True):
        own.addmm_(gradient.T.to(own.dtype), values.to(own.dtype))


def add_grouped_gradient(total: Tensor, gradients: Tensor, inputs: Tensor, tokens: Sequence[int], ends: Tensor) -> None:
    """Do as the reference does; ``ends`` [experts] int32 are where each expert's tokens end, on the device of the
    others."""
    if not total.is_cuda or inputs.dtype not in (torch.bfloat16, torch.float16):
        add_grouped_gradient_reference(total, gradients, inputs, tokens)
        return
    from rlhf_megatron.kernels.triton_grouped_gradient import launch

    launch(total, gradients, inputs, ends)
