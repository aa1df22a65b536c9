"""Work queue of a generation: replicas claim groups of requests, by number, as they have room for them.

    queues = WorkQueues("queue", replica, replicas)         # once, alike on every rank
    queue = queues.open(groups=64, wanted=48)               # for each generation, alike on every rank
    numbers, more = queue.claim(4)                          # only on the rank that leads the replica
    enough = queue.is_enough(finished=[4])

A shared queue is two counters in torch's store. To claim is to add to the first of them: what the counter passes over
is the replica's, in one round trip, and numbers past the last group say that none is left. So no group is claimed twice
or lost, and a replica that dies blocks no other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist

from rlhf_megatron.compat.torch import default_store


class Deadlines(NamedTuple):
    """Number of updates that groups may wait for, and what follows for when enough are done.

    So many as ``needed[s]`` of those with at most s ``updates_left`` must be done, for each s.
    """

    updates_left: Sequence[int]
    """By group number."""
    needed: Sequence[int]


NO_DEADLINES = Deadlines((), ())


class WorkQueue:
    """Groups of one generation that are this replica's from the start."""

    replicas = 1
    """Number of replicas that claim from the same queue."""

    def __init__(
        self, numbers: Sequence[int], wanted: int | None = None, own: int = 0, deadlines: Deadlines = NO_DEADLINES
    ) -> None:
        """Queue these group numbers; ``wanted`` finished groups are enough, None wants all of them.

        The first ``own`` groups are this replica's in any case.
        """
        self.wanted, self.own = wanted, own
        self._deadlines, self._done = deadlines, Counter[str]()
        self._numbers, self._claimed = numbers, 0

    def claim(self, count: int) -> tuple[list[int], bool]:
        """Return (at most ``count`` further groups, whether there may be more)."""
        first, self._claimed = self._claimed, min(self._claimed + count, len(self._numbers))
        return list(self._numbers[first : self._claimed]), self._claimed < len(self._numbers)

    def is_enough(self, finished: Sequence[int]) -> bool:
        """Count these groups as done; return whether as many are done as are wanted, and those that may not wait."""
        if self.wanted is None:
            return False
        enough = self._count("finished", len(finished)) >= self.wanted
        left, needed = self._deadlines
        for updates, count in enumerate(needed):
            if count > 0:
                done = self._count(f"finished/{updates}", sum(left[group] <= updates for group in finished))
                enough = enough and done >= count
        return enough

    def _count(self, key: str, more: int) -> int:
        """Add to a counter of all replicas; return its value."""
        self._done[key] += more
        return self._done[key]


class SharedWorkQueue(WorkQueue):
    """The ``own`` groups of this replica, and after them ``count`` that all replicas claim from."""

    def __init__(
        self,
        store: dist.Store,
        count: int,
        replicas: int,
        wanted: int | None = None,
        own: int = 0,
        deadlines: Deadlines = NO_DEADLINES,
    ) -> None:
        """Make a queue in ``store``, which is this generation's own, without keys at first, and the same for all
        replicas."""
        super().__init__(range(own + count), wanted, own, deadlines)
        self._store, self.replicas, self._shared = store, replicas, range(own, own + count)

    def claim(self, count: int) -> tuple[list[int], bool]:
        """See WorkQueue."""
        first, self._claimed = self._claimed, min(self._claimed + count, self.own)
        own = list(self._numbers[first : self._claimed])
        rest = count - len(own)
        end = self._store.add("claimed", rest)
        return [*own, *self._shared[max(end - rest, 0) : end]], self._claimed < self.own or end < len(self._shared)

    def _count(self, key: str, more: int) -> int:
        return self._store.add(key, more)

    def delete_keys(self) -> None:
        """Delete the counters, when every replica has left the generation."""
        for key in ("claimed", "finished", *(f"finished/{updates}" for updates in range(len(self._deadlines.needed)))):
            self._store.delete_key(key)


class WorkQueues:
    """Queues of one generation after the other; every rank makes the same calls in the same order."""

    def __init__(self, scheduling: str, replica: int, replicas: int, name: str = "rollout") -> None:
        """Take "queue" or "static" for ``scheduling``; with the latter replica r of n has groups r, r + n, r + 2n, ...

        Those whose queues are open at the same time need different names.
        """
        self.replica, self.replicas, self._name = replica, replicas, name
        self._shares = scheduling == "queue" and replicas > 1
        self._calls = 0
        self._previous: SharedWorkQueue | None = None

    def open(
        self, groups: int, wanted: int | None = None, own: int = 0, deadlines: Deadlines = NO_DEADLINES
    ) -> WorkQueue:
        """Return the queue of so many ``groups``; a collective call must lie between two generations.

        Before these, which all replicas know, come groups of this replica's ``own``.
        """
        if not self._shares:
            numbers = [*range(own), *range(own + self.replica, own + groups, self.replicas)]
            return WorkQueue(numbers, wanted, own, deadlines)
        if self._previous and self.replica == 0:
            self._previous.delete_keys()
        self._calls += 1
        store = dist.PrefixStore(f"{self._name}/{self._calls}", default_store())
        self._previous = SharedWorkQueue(store, groups, self.replicas, wanted, own, deadlines)
        return self._previous
