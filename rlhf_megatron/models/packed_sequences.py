"""Boundaries of packed rows as every layer gets them, with what travels beside them.

Layers get them again where their activations are recomputed in the backward pass, so each acts on its own micro-batch's
whatever ran meanwhile.
"""

from __future__ import annotations

import dataclasses

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from rlhf_megatron.data.shared_prompts import RepeatedKeys


@dataclasses.dataclass
class PackedSequences(PackedSeqParams):
    """Boundaries of packed rows.

    Attributes:
        expert_choices: [t, layers of this rank, chosen] of this rank's tokens, where routers replay them.
        positions: [t] int64 of all tokens within their rows, where ``repeated`` are keys of a prompt.
    """

    expert_choices: Tensor | None = None
    positions: Tensor | None = None
    repeated: RepeatedKeys | None = None
