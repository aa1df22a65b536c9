"""Ranks of one replica, which compute the same: the first of them decides, and the others follow."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.distributed as dist
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class ReplicaRanks:
    """The tensor-parallel ranks of a replica; all of them make the same calls in the same order.

    Attributes:
        group: of CPU tensors; None for a replica of one rank.
    """

    group: dist.ProcessGroup | None = None

    @property
    def is_leader(self) -> bool:
        """True if this rank decides for its replica."""
        return self.group is None or self.group.rank() == 0

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite a CPU tensor with the leader's."""
        if self.group is not None:
            dist.broadcast(tensor, group=self.group, group_src=0)

    def broadcast_object(self, value: Any) -> Any:
        """Return the leader's value."""
        if self.group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, group=self.group, group_src=0)
        return values[0]
