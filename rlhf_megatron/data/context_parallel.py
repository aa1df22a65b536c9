"""Context parallelism of packed rows: which tokens of a micro-batch each of several ranks holds. Pure arithmetic."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from rlhf_megatron.data.packing import MicroBatch


def tokens_of_part(cu_seqlens: Tensor, parts: int, part: int) -> Tensor:
    """Return [t / parts] int64: where the tokens that rank ``part`` of ``parts`` holds stand in the packed micro-batch.

    Each row, a multiple of 2 * parts long, is cut into 2 * parts equal chunks. A rank holds one from the front of the
    row and its counterpart from the back, so that causal attention is as much work on every rank. This is the order
    that Transformer Engine's attention expects.
    """
    starts, chunk = cu_seqlens[:-1].long(), cu_seqlens.diff().long() // (2 * parts)
    begins = torch.stack([starts + part * chunk, starts + (2 * parts - 1 - part) * chunk], dim=1).flatten()
    lengths = chunk.repeat_interleave(2)
    before = lengths.cumsum(0) - lengths
    return (begins - before).repeat_interleave(lengths) + torch.arange(int(lengths.sum()), device=cu_seqlens.device)


def part_of(micro: MicroBatch, parts: int, part: int) -> MicroBatch:
    """Return the part of a micro-batch that rank ``part`` of ``parts`` computes; its rows are multiples of 2 * parts
    long.

    Rows, their fields and what is read of them stay those of the whole; ``kept`` says which are read on this rank.
    """
    if parts == 1:
        return micro
    held = tokens_of_part(micro.cu_seqlens, parts, part)
    local_index = torch.full_like(micro.tokens, -1)
    local_index[held] = torch.arange(len(held), device=held.device)
    outputs = local_index[micro.outputs]
    kept = (outputs >= 0).nonzero().squeeze(1)
    return dataclasses.replace(
        micro,
        tokens=micro.tokens[held],
        positions=micro.positions[held],
        outputs=outputs[kept],
        targets=micro.targets[kept],
        kept=kept,
        expert_choices=None if micro.expert_choices is None else micro.expert_choices[held],
        following=micro.following and part_of(micro.following, parts, part),
    )
