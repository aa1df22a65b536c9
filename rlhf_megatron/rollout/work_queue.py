"""Who generates what: each group of requests has a ticket, and replicas draw tickets as they have room.

    office = WorkQueues("queue", replica, replicas)       # once, alike on every rank
    tickets = office.open(groups=64, wanted=48)             # for each generation, alike on every rank
    drawn, more = tickets.draw(4)                           # only on the rank that leads the replica
    enough = tickets.are_enough(finished=1)

The queue is two counters in torch's store. To draw is to add to the first of them: what the counter passes over is the
replica's, in one round trip, and the numbers behind the last ticket say that none is left. So no ticket is drawn twice
or lost, and a replica that ends unexpectedly keeps nobody waiting.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist


class WorkQueue:
    """The tickets of one generation that are this replica's from the start."""

    replicas = 1
    """How many draw from the same tickets."""

    def __init__(self, numbers: Sequence[int], wanted: int | None = None) -> None:
        """``wanted``: as many finished groups are enough; None: all of them are wanted."""
        self.wanted = wanted
        self._numbers, self._drawn, self._finished = numbers, 0, 0

    def draw(self, count: int) -> tuple[list[int], bool]:
        """(at most ``count`` further tickets, whether there may be more)."""
        first, self._drawn = self._drawn, min(self._drawn + count, len(self._numbers))
        return list(self._numbers[first : self._drawn]), self._drawn < len(self._numbers)

    def are_enough(self, finished: int) -> bool:
        """Counts ``finished`` more groups as done; whether as many are done as are wanted."""
        self._finished += finished
        return self.wanted is not None and self._finished >= self.wanted


class SharedWorkQueue(WorkQueue):
    """WorkQueue from 0 to ``count`` that all replicas draw from."""

    def __init__(self, store: dist.Store, count: int, replicas: int, wanted: int | None = None) -> None:
        """``store`` is this generation's own, without keys at first, and the same for all replicas."""
        super().__init__(range(count), wanted)
        self._store, self.replicas = store, replicas

    def draw(self, count: int) -> tuple[list[int], bool]:
        """See WorkQueue."""
        end = self._store.add("drawn", count)
        return list(self._numbers[end - count : end]), end < len(self._numbers)

    def are_enough(self, finished: int) -> bool:
        """See WorkQueue; over all replicas."""
        return self.wanted is not None and self._store.add("finished", finished) >= self.wanted

    def forget(self) -> None:
        """Deletes the keys, when every replica has left the generation."""
        for key in ("drawn", "finished"):
            self._store.delete_key(key)


class WorkQueues:
    """Opens the tickets of one generation after the other; every rank makes the same calls in the same order."""

    def __init__(self, scheduling: str, replica: int, replicas: int, name: str = "rollout") -> None:
        """``scheduling`` is "queue" or "static", where replica r of n has tickets r, r + n, r + 2n, ...

        Offices that are open at the same time need different names.
        """
        self.replica, self.replicas, self._name = replica, replicas, name
        self._shares = scheduling == "queue" and replicas > 1
        self._calls = 0
        self._before: SharedWorkQueue | None = None

    def open(self, groups: int, wanted: int | None = None) -> WorkQueue:
        """WorkQueue for ``groups``; a collective call must lie between two generations."""
        if not self._shares:
            return WorkQueue(range(self.replica, groups, self.replicas), wanted)
        if self._before and self.replica == 0:
            self._before.forget()
        self._calls += 1
        store = dist.PrefixStore(f"{self._name}/{self._calls}", dist.distributed_c10d._get_default_store())
        self._before = SharedWorkQueue(store, groups, self.replicas, wanted)
        return self._before
