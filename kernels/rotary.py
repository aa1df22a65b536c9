"""Rotary position embeddings (RoFormer, https://arxiv.org/abs/2104.09864) of packed sequences.

The operations of torch below are the reference, and what CPUs use. On a GPU one Triton kernel (``triton_rotary``) reads
and writes each number once, and so does its backward pass, which turns gradients the other way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def positions(cu_seqlens: Tensor, tokens: int, parts: int = 1, part: int = 0) -> Tensor:
    """Return [tokens] int64: the place in its sequence of each token that rank ``part`` of ``parts`` has.

    ``cu_seqlens`` [sequences + 1] are of the ``parts`` * ``tokens`` tokens of all. A rank has a piece from the front of
    each sequence and its counterpart from the back (see ``data.context.tokens_of_part``).
    """
    begins = cu_seqlens.long() // parts
    lengths = begins.diff()
    begin, half = (each.repeat_interleave(lengths, output_size=tokens) for each in (begins[:-1], lengths // 2))
    within = torch.arange(tokens, device=cu_seqlens.device) - begin
    front = part * half + within
    return torch.where(within < half, front, front + (2 * parts - 2 - 2 * part) * half)


def rotate_reference(
    values: Tensor,
    cu_seqlens: Tensor,
    angles: Tensor,
    parts: int = 1,
    part: int = 0,
    factor: float = 1.0,
    interleaved: bool = False,
) -> Tensor:
    """Map values [tokens, heads, d], angles [longest, n / 2] -> the first n numbers of each head turned, times
    ``factor``.

    Each pair (i, i + n / 2), or with ``interleaved`` (2i, 2i + 1), is turned by its angle; the rest of a head is as it
    was. Rounded once, from float32 or from float64 of ``values``.
    """
    exact = torch.promote_types(values.dtype, torch.float32)
    turned = angles[positions(cu_seqlens, len(values), parts, part)].to(exact)[:, None]
    front, rest = values.to(exact).tensor_split([2 * angles.size(1)], dim=-1)
    first, second = (front[..., 0::2], front[..., 1::2]) if interleaved else front.chunk(2, dim=-1)
    cos, sin = turned.cos() * factor, turned.sin() * factor
    halves = [first * cos - second * sin, second * cos + first * sin]
    front = torch.stack(halves, dim=-1).flatten(-2) if interleaved else torch.cat(halves, dim=-1)
    return torch.cat([front, rest], dim=-1).to(values.dtype)


def rotate(
    values: Tensor,
    cu_seqlens: Tensor,
    angles: Tensor,
    parts: int = 1,
    part: int = 0,
    factor: float = 1.0,
    interleaved: bool = False,
) -> Tensor:
    """Do as the reference does, and without a gradient of ``angles``; a head's numbers must be contiguous on a GPU."""
    if not values.is_cuda:
        return rotate_reference(values, cu_seqlens, angles, parts, part, factor, interleaved)
    rotated: Tensor = Rotation.apply(values, cu_seqlens, angles, parts, part, factor, interleaved)
    return rotated


class Rotation(torch.autograd.Function):
    """The kernel with its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        cu_seqlens: Tensor,
        angles: Tensor,
        parts: int,
        part: int,
        factor: float = 1.0,
        interleaved: bool = False,
    ) -> Tensor:
        """See ``rotate``."""
        from rlhf_megatron.kernels.triton_rotary import launch

        ctx.save_for_backward(cu_seqlens, angles)
        ctx.how = (parts, part, factor, interleaved)
        return launch(values, cu_seqlens, angles, *ctx.how)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradient of ``values``."""
        from rlhf_megatron.kernels.triton_rotary import launch

        gradient = launch(gradients[0].contiguous(), *ctx.saved_tensors, *ctx.how, back=True)
        return gradient, None, None, None, None, None, None
