"""Rotary position embeddings (RoFormer, https://arxiv.org/abs/2104.09864) of packed sequences.

The operations of torch below are the reference, and what CPUs use. On a GPU one Triton kernel (``triton_rotary``) reads
and writes each number once, and so does its backward pass, which turns gradients the other way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def positions(cu_seqlens: Tensor, tokens: int, parts: int = 1, part: int = 0) -> Tensor:
    """[tokens] int64: the place in its sequence of each token that rank ``part`` of ``parts`` has.

    ``cu_seqlens`` [sequences + 1] are of the ``parts`` * ``tokens`` tokens of all. A rank has a piece from the front of
    each sequence and its counterpart from the back (see ``data.context.tokens_of_part``).
    """
    begins = cu_seqlens.long() // parts
    lengths = begins.diff()
    begin, half = (each.repeat_interleave(lengths, output_size=tokens) for each in (begins[:-1], lengths // 2))
    within = torch.arange(tokens, device=cu_seqlens.device) - begin
    front = part * half + within
    return torch.where(within < half, front, front + (2 * parts - 2 - 2 * part) * half)


def rotate_reference(values: Tensor, cu_seqlens: Tensor, angles: Tensor, parts: int = 1, part: int = 0) -> Tensor:
    """values [tokens, heads, d], angles [longest, d / 2] -> each pair (i, i + d / 2) of a head turned by its angle.

    Rounded once, from float32 or from float64 of ``values``.
    """
    exact = torch.promote_types(values.dtype, torch.float32)
    turned = angles[positions(cu_seqlens, len(values), parts, part)].to(exact)[:, None]
    first, second = values.to(exact).chunk(2, dim=-1)
    cos, sin = turned.cos(), turned.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(values.dtype)


def rotate(values: Tensor, cu_seqlens: Tensor, angles: Tensor, parts: int = 1, part: int = 0) -> Tensor:
    """As the reference, and without a gradient of ``angles``; a head's numbers must be contiguous on a GPU."""
    if not values.is_cuda:
        return rotate_reference(values, cu_seqlens, angles, parts, part)
    rotated: Tensor = Rotation.apply(values, cu_seqlens, angles, parts, part)
    return rotated


class Rotation(torch.autograd.Function):
    """The kernel with its gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, cu_seqlens: Tensor, angles: Tensor, parts: int, part: int) -> Tensor:
        """See ``rotate``."""
        from rlhf_megatron.kernels.triton_rotary import launch

        ctx.save_for_backward(cu_seqlens, angles)
        ctx.context_part = (parts, part)
        return launch(values, cu_seqlens, angles, *ctx.context_part)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """The gradient of ``values``."""
        from rlhf_megatron.kernels.triton_rotary import launch

        return (
            launch(gradients[0].contiguous(), *ctx.saved_tensors, *ctx.context_part, back=True),
            None,
            None,
            None,
            None,
        )
