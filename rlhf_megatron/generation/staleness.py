"""Bound on staleness: which groups a step must learn from, so that none is older than the recipe allows.

A group is as old as its oldest token. Each step takes ``wanted`` groups that are whole, first those that may wait
least, and ends no sooner than what it leaves can be taken by later steps in time. That is always possible where no more
groups are in flight than the steps can take until the last of them is due: ``wanted * (max_staleness + 1)``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rlhf_megatron.generation.prompt_groups import Group
from rlhf_megatron.rollout.work_queue import Deadlines


def updates_left(group: Group, version: int, most: int) -> int:
    """Return for how many updates of weights ``version`` a group may wait; of ``most`` where it is not begun.

    A recipe that allowed more may have left one that is too old: it is due now.
    """
    return most if group.version is None else max(most - (version - group.version), 0)


def groups_due(left: Collection[int], wanted: int, most: int) -> list[int]:
    """Return [most], for each s how many of the groups with at most s updates ``left`` this step must learn from.

    The s steps that follow can take ``wanted`` each.
    """
    return [max(0, sum(each <= updates for each in left) - wanted * updates) for updates in range(most)]


def most_urgent(whole: Collection[int], left: Sequence[int], wanted: int) -> list[int]:
    """Return the ``wanted`` of these groups that may wait least, ``left`` by group, then those drawn first."""
    return sorted(sorted(whole, key=lambda index: (left[index], index))[:wanted])


class StepGoal:
    """The end of a generation that need not answer all of its groups, and the groups that it gives."""

    def __init__(self, groups: Sequence[Group], wanted: int, version: int, most: int, replicas: int | None) -> None:
        """Set up; ``wanted`` of the groups, by weights of ``version``, none older than ``most`` updates.

        Each of so many ``replicas`` gives its share, of groups of its own; None: they give what is done first.
        """
        self._groups, self._replicas = groups, replicas
        self._wanted, self._most = wanted // (replicas or 1), most
        self._left = [updates_left(group, version, most) for group in groups]

    def lacking(self, replica: int | None) -> tuple[int, list[int]]:
        """Return how many groups more a replica, or all, must finish, and of these how many with at most s updates
        left, for each s."""
        pool = self._pool(replica)
        whole = [index for index in pool if self._groups[index].is_whole]
        due = groups_due([self._left[index] for index in pool], self._wanted, self._most)
        done = [sum(self._left[index] <= updates for index in whole) for updates in range(self._most)]
        return max(self._wanted - len(whole), 0), [max(a - b, 0) for a, b in zip(due, done, strict=True)]

    def deadlines(self, indices: Iterable[int], needed: Sequence[int]) -> Deadlines:
        """Return the deadlines of a replica's queue of these groups."""
        return Deadlines([self._left[index] for index in indices], needed)

    def chosen(self, whole: Collection[int]) -> list[int]:
        """Return the groups of the step, of those that are ``whole`` now, in rising order."""
        pools = [self._pool(replica) for replica in range(self._replicas or 1)]
        return sorted(
            index for pool in pools for index in most_urgent(set(pool).intersection(whole), self._left, self._wanted)
        )

    def _pool(self, replica: int | None) -> list[int]:
        of_all = range(len(self._groups))
        return [index for index in of_all if self._replicas is None or self._groups[index].home == replica]
