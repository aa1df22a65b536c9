"""The kernel of ``rotary``: a program for a few tokens and heads, which share cosines and sines."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

NUMBERS, WARPS = 4096, 4  # that a program reads; and the warps of it
# At most, so that a program has an angle for each thread: with fewer the compiler has all threads reckon all of them.
HEADS_TOGETHER = NUMBERS // 2 // (32 * WARPS)


@triton.jit(do_not_specialize=["tokens", "sequences", "halvings"])
def _rotate(  # type: ignore[no-untyped-def] # Triton looks names of annotations up and accepts its own alone
    values,
    rotated,
    cu_seqlens,
    angles,
    tokens,
    sequences,
    halvings,
    token_stride,
    head_stride,
    angle_stride,
    parts,
    part,
    factor,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS_TOGETHER: tl.constexpr,
    WIDTH: tl.constexpr,
    REST_WIDTH: tl.constexpr,
    BACK: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    there = token < tokens
    # Its sequence: the last that begins at it or before.
    low = tl.zeros([TOKENS], dtype=tl.int32)
    high = low + sequences
    left = tl.full([], halvings, tl.int32)  # counts down also where torch.compile makes a constant of the number
    while left > 0:
        left -= 1
        middle = (low + high) // 2
        is_before = tl.load(cu_seqlens + middle).to(tl.int32) // parts <= token
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle)
    begin = tl.load(cu_seqlens + low).to(tl.int32) // parts
    half = (tl.load(cu_seqlens + low + 1).to(tl.int32) // parts - begin) // 2
    front = part * half + token - begin
    position = tl.where(token - begin < half, front, front + (2 * parts - 2 - 2 * part) * half)

    pair = tl.arange(0, WIDTH)
    known = there[:, None] & (pair < HALF)[None, :]
    angle = tl.load(angles + position[:, None].to(tl.int64) * angle_stride + pair[None, :], mask=known, other=0.0)
    cos, sin = tl.cos(angle)[:, None, :] * factor, tl.sin(angle)[:, None, :] * factor
    if BACK:
        sin = -sin
    head = tl.program_id(1) * HEADS_TOGETHER + tl.arange(0, HEADS_TOGETHER)
    inside = known[:, None, :] & (head < HEADS)[None, :, None]
    row = token.to(tl.int64)[:, None, None]
    origin = values + row * token_stride + head[None, :, None] * head_stride
    target = rotated + (row * HEADS + head[None, :, None]) * (2 * HALF + REST)
    # A pair is one apart, or half of what turns.
    to_first = pair[None, None, :] * (2 if INTERLEAVED else 1)
    to_second = to_first + (1 if INTERLEAVED else HALF)
    first = tl.load(origin + to_first, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(origin + to_second, mask=inside, other=0.0).to(tl.float32)
    tl.store(target + to_first, (first * cos - second * sin).to(rotated.dtype.element_ty), mask=inside)
    tl.store(target + to_second, (second * cos + first * sin).to(rotated.dtype.element_ty), mask=inside)
    if REST > 0:
        behind = tl.arange(0, REST_WIDTH)
        beyond = there[:, None, None] & (head < HEADS)[None, :, None] & (behind < REST)[None, None, :]
        place_behind = 2 * HALF + behind[None, None, :]
        tl.store(target + place_behind, tl.load(origin + place_behind, mask=beyond, other=0.0), mask=beyond)


def launch(
    values: Tensor,
    cu_seqlens: Tensor,
    angles: Tensor,
    parts: int = 1,
    part: int = 0,
    factor: float = 1.0,
    interleaved: bool = False,
    back: bool = False,
) -> Tensor:
    """See ``rotary.rotate``; contiguous, and with ``back`` turned the other way."""
    tokens, heads, dimension = values.shape
    if values.stride(2) != 1 or angles.stride(1) != 1:
        raise ValueError(f"strides {values.stride()} of values and {angles.stride()} of angles; the last must be 1")
    half, sequences = angles.shape[1], len(cu_seqlens) - 1
    if 2 * half > dimension:
        raise ValueError(f"{half} angles turn {2 * half} numbers, and a head has {dimension}")
    rotated = values.new_empty(values.shape)
    if not tokens:
        return rotated
    width, heads_together = triton.next_power_of_2(half), min(triton.next_power_of_2(heads), HEADS_TOGETHER)
    rest = dimension - 2 * half
    together = max(NUMBERS // (2 * heads_together * width), 1)
    _rotate[triton.cdiv(tokens, together), triton.cdiv(heads, heads_together)](
        values,
        rotated,
        cu_seqlens,
        angles,
        tokens,
        sequences,
        (sequences - 1).bit_length(),
        values.stride(0),
        values.stride(1),
        angles.stride(0),
        parts,
        part,
        float(factor),
        HEADS=heads,
        HALF=half,
        REST=rest,
        INTERLEAVED=interleaved,
        TOKENS=together,
        HEADS_TOGETHER=heads_together,
        WIDTH=width,
        REST_WIDTH=triton.next_power_of_2(max(rest, 1)),
        BACK=back,
        num_warps=WARPS,
    )
    return rotated
