"""The replicas of the rollout engine, and a rank's part in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rlhf_megatron.recipe import RolloutRecipe, rollout_ranks


@dataclasses.dataclass(frozen=True)
class Replica:
    """One rank's part in the rollout.

    Attributes:
        ranks: of all replicas.
        count: how many replicas there are.
        index: of this rank's; None where it generates nothing.
        position: of this rank among those of its replica, which all generate the same.
        size: how many ranks a replica has.
    """

    ranks: list[int]
    count: int
    index: int | None
    position: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """True if this rank speaks for its replica: the others score nothing."""
        return self.index is not None and self.position == 0

    @property
    def leaders(self) -> list[int]:
        """The rank of each replica that speaks for it."""
        return self.ranks[:: len(self.ranks) // self.count]

    def keeps(self, group: int, response: int) -> bool:
        """Return whether this rank, of those of its replica, is the one to keep a response to a group's prompt."""
        return (group // self.count + response) % self.size == self.position

    @property
    def own_ranks(self) -> list[int]:
        """The ranks of this rank's replica; none where it generates nothing."""
        size = len(self.ranks) // self.count
        return [] if self.index is None else self.ranks[self.index * size : (self.index + 1) * size]


ALONE = Replica([0], 1, 0)


def replica_of(recipe: RolloutRecipe, rank: int, world_size: int) -> Replica:
    """Return where ``rank`` stands in the rollout."""
    return replica_among(rollout_ranks(recipe, world_size), recipe.rollout.layout.tensor, rank)


def replica_among(ranks: Sequence[int], tensor: int, rank: int) -> Replica:
    """Return where ``rank`` stands; replicas are ``tensor`` neighbours of ``ranks`` each."""
    index, position = divmod(ranks.index(rank), tensor) if rank in ranks else (None, 0)
    return Replica(list(ranks), len(ranks) // tensor, index, position, tensor)
