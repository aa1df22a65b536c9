"""Turns the queries and keys of packed sequences by their layer's rotary table, within Megatron's attention.

Megatron computes the angles once for all layers and turns sequences one after the other, which for hundreds of short
ones takes more time than the rest of a layer. Here attention asks for its own, and all sequences are turned at once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.kernels.rotary import rotate
from rlhf_megatron.models.rotary_table import RotaryTable


class Rotary:
    """The rotary embeddings of a model: the table of each decoder layer, counted from 0, None without positions."""

    def __init__(self, tables: Sequence[RotaryTable | None]) -> None:
        self._tables = tables

    def turn(self, values: Tensor, layer: int, packed: Any, group: Any) -> Tensor:
        """Return queries or keys [t, heads, d] of ``layer``, turned, in memory of their own.

        ``packed`` are Megatron's PackedSeqParams of all tokens, t of which this rank of the context-parallel ``group``
        holds.
        """
        table = self._tables[layer]
        if table is None:
            return values.clone(memory_format=torch.contiguous_format)
        boundaries = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
        repeated = getattr(packed, "repeated", None)
        angles = _angles(table, int(packed.max_seqlen_q if repeated is None else repeated.longest))
        if repeated is not None:  # a sequence begins where its prefix ends
            boundaries, angles = torch.stack([boundaries[0], boundaries[-1]]), angles[packed.positions]
        return rotate(values, boundaries, angles, group.size(), group.rank(), table.attention_factor, table.interleaved)


@functools.lru_cache(maxsize=32)
def _angles(table: RotaryTable, longest: int) -> Tensor:
    """Return the angles [longest, pairs] of every position, float32."""
    frequencies = table.inverse_frequencies
    return torch.outer(torch.arange(longest, device=frequencies.device, dtype=frequencies.dtype), frequencies)
