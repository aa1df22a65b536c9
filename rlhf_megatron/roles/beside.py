"""The interface of what learns beside a role, in its forward passes and from what they give: a draft of its tokens."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from rlhf_megatron.data.packing import MicroBatch
from rlhf_megatron.data.rollout_batch import RolloutBatch


class Beside(Protocol):
    """Learner of one step after the other; every call is collective over the ranks of the role's last stage, and does
    nothing on others."""

    def begin(self, batch: RolloutBatch) -> None:
        """Begin a step on the rows of ``batch``, this data-parallel rank's share."""

    def clear(self) -> None:
        """Forget the gradients so far: the passes begin, perhaps once more."""

    def learn(self, hidden: Tensor, columns: Tensor, micro: MicroBatch, packed: Any) -> None:
        """Add the gradients of a micro-batch.

        Args:
            hidden: [t, 1, hidden] what the role's decoder gives, of this rank's tokens.
            columns: [vocabulary, hidden] the role's output layer, this rank's part.
            micro: one token later than what ``hidden`` is of (``one_token_later``).
            packed: the boundaries of its rows, as Megatron's attention takes them.
        """

    def take_step(self) -> dict[str, Tensor]:
        """Take the optimizer's step; return (sum, count) of each metric over this rank's tokens as a tensor [2]."""
