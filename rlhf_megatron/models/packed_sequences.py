"""Boundaries of packed rows as every layer gets them, with what travels beside them.

Layers get them again where their activations are recomputed in the backward pass, so each acts on its own micro-batch's
whatever ran meanwhile.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from rlhf_megatron.data.context_parallel import tokens_of_part
from rlhf_megatron.data.shared_prompts import RepeatedKeys
from rlhf_megatron.models.delta_rule import Chunks, chunks_of


@dataclasses.dataclass
class PackedSequences(PackedSeqParams):
    """Boundaries of packed rows.

    Attributes:
        expert_choices: [t, layers of this rank, chosen] of this rank's tokens, where routers replay them.
        positions: [t] int64 of this rank's tokens within their rows, where ``repeated`` are keys of a prefix.
        parts: how many ranks have a part of each row.
    """

    expert_choices: Tensor | None = None
    positions: Tensor | None = None
    repeated: RepeatedKeys | None = None
    parts: int = 1

    @functools.cached_property
    def boundaries(self) -> Tensor:
        """[rows + 1] int64, one tensor for all layers: by it flash-linear-attention knows what it has made of it."""
        boundaries: Tensor = self.cu_seqlens_q
        return boundaries.long()

    @functools.cached_property
    def chunks(self) -> Chunks:
        """Chunks of the rows for the delta rule in plain torch, once for all layers: to make them waits for a GPU."""
        assert self.positions is not None
        return chunks_of(self.boundaries, len(self.positions) * self.parts)

    @functools.cached_property
    def held(self) -> Tensor:
        """[t * parts] int64: where the tokens of the first rank, the second, ... stand in the rows, once for all
        layers: to make it waits for a GPU."""
        return torch.cat([tokens_of_part(self.boundaries, self.parts, part) for part in range(self.parts)])

    @functools.cached_property
    def order(self) -> Tensor:
        """[t * parts] int64: where each token of the rows is among those of all ranks, the inverse of ``held``."""
        return self.held.argsort()
