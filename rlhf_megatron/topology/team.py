"""Teams: ranks that go their own way for a part of a step, such as those that generate while others learn."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
from collections.abc import Iterator, Sequence

import torch.distributed as dist

from rlhf_megatron.compat.torch import align_group_names, as_world
from rlhf_megatron.topology.communicators import whole_role


@dataclasses.dataclass(frozen=True)
class Team:
    """Ranks that exchange among themselves over ``group``, of CPU tensors only; None: it is the world's."""

    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None = None

    @property
    def here(self) -> bool:
        """True if this rank belongs to it."""
        return self.group is None or dist.get_rank() in self.ranks

    @property
    def first(self) -> int:
        """The rank that speaks for it."""
        return self.ranks[0]


def whole_world() -> Team:
    """Return the team of all ranks."""
    return Team(tuple(range(dist.get_world_size())))


def make_team(ranks: Sequence[int], timeout_minutes: float) -> Team:
    """Return a team that waits so long at most; every rank of the world makes the same ones in the same order."""
    group = dist.new_group(list(ranks), timeout=datetime.timedelta(minutes=timeout_minutes), backend="gloo")
    return Team(tuple(ranks), group)


@contextlib.contextmanager
def world_of_their_own(ranks: Sequence[int]) -> Iterator[None]:
    """Have ``ranks``, to which this one belongs, be inside the whole world to torch.distributed, and to torchrun's
    RANK.

    For libraries that take all processes for theirs, as vLLM does when it makes its groups. Collective over the world
    as it ends; a rank without ``ranks`` has nothing to do inside.
    """
    if len(ranks) in (0, dist.get_world_size()):
        yield
    else:
        rank_of_torchrun = os.environ["RANK"]
        with as_world(whole_role(ranks)):
            os.environ["RANK"] = str(dist.get_rank())
            try:
                yield
            finally:
                os.environ["RANK"] = rank_of_torchrun
    align_group_names()
