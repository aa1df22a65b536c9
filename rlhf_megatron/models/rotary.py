"""Rotary embeddings of packed sequences in one operation, for layers without Transformer Engine's fused kernel.

Megatron's own version goes through the sequences one by one: for hundreds of short ones that takes longer than all the
rest of a layer.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_megatron.data.context import tokens_of_part


@functools.cache
def install() -> None:
    """Has megatron-core use the version below for packed sequences; idempotent."""
    from megatron.core.models.common.embeddings import rope_utils

    rope_utils._apply_rotary_pos_emb_thd = apply_rotary_to_packed


def apply_rotary_to_packed(
    values: Tensor,
    cu_seqlens: Tensor,
    frequencies: Tensor,
    rotary_interleaved: bool = False,
    *,
    cp_group: dist.ProcessGroup,
    **_: Any,
) -> Tensor:
    """values [t, heads, d] of packed sequences, frequencies [longest, 1, 1, d] -> values rotated, [t, heads, d].

    Positions begin anew with each sequence. ``cu_seqlens`` are of all tokens, t of which this rank of the
    context-parallel group holds.
    """
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    lengths = cu_seqlens.diff().long()
    tokens = values.size(0) * cp_group.size()
    starts = cu_seqlens[:-1].long().repeat_interleave(lengths, output_size=tokens)
    positions = torch.arange(tokens, device=values.device) - starts
    if cp_group.size() > 1:
        positions = positions[tokens_of_part(cu_seqlens, cp_group.size(), cp_group.rank())]
    rotated: Tensor = _apply_rotary_pos_emb_bshd(
        values.unsqueeze(1), frequencies[positions], rotary_interleaved=rotary_interleaved
    )
    return rotated.squeeze(1)
