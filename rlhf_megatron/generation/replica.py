"""The replicas of the rollout engine, and a rank's part in them."""

from __future__ import annotations

import dataclasses

from rlhf_megatron.recipe import RolloutRecipe, rollout_ranks


@dataclasses.dataclass(frozen=True)
class Replica:
    """One rank's part in the rollout.

    Attributes:
        ranks: of all replicas.
        count: how many replicas there are.
        index: of this rank's; None where it generates nothing.
        leads: whether this rank speaks for its replica: the others generate the same, and score nothing.
    """

    ranks: list[int]
    count: int
    index: int | None
    leads: bool

    def owns(self, group: int) -> bool:
        """Returns whether this replica answers for a group that no replica has to generate for."""
        return group % self.count == self.index


def replica_of(recipe: RolloutRecipe, rank: int, world_size: int) -> Replica:
    """Returns where ``rank`` stands; replicas are as many neighbouring ranks as their layout has."""
    ranks, tensor = rollout_ranks(recipe, world_size), recipe.rollout.layout.tensor
    if rank not in ranks:
        return Replica(ranks, len(ranks) // tensor, None, False)
    index, position = divmod(ranks.index(rank), tensor)
    return Replica(ranks, len(ranks) // tensor, index, position == 0)
