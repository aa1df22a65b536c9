"""Work queue of a generation: replicas claim groups of requests, by number, as they have room for them.

    queues = WorkQueues("queue", replica, replicas)         # once, alike on every rank
    queue = queues.open(groups=64, wanted=48)               # for each generation, alike on every rank
    numbers, more = queue.claim(4)                          # only on the rank that leads the replica
    enough = queue.is_enough(finished=1)

A shared queue is two counters in torch's store. To claim is to add to the first of them: what the counter passes over
is the replica's, in one round trip, and numbers past the last group say that none is left. So no group is claimed twice
or lost, and a replica that dies blocks no other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist


class WorkQueue:
    """Groups of one generation that are this replica's from the start."""

    replicas = 1
    """Number of replicas that claim from the same queue."""

    def __init__(self, numbers: Sequence[int], wanted: int | None = None) -> None:
        """Queue these group numbers; `wanted` finished groups are enough, None wants all of them."""
        self.wanted = wanted
        self._numbers, self._claimed, self._finished = numbers, 0, 0

    def claim(self, count: int) -> tuple[list[int], bool]:
        """Return (at most `count` further groups, whether there may be more)."""
        first, self._claimed = self._claimed, min(self._claimed + count, len(self._numbers))
        return list(self._numbers[first : self._claimed]), self._claimed < len(self._numbers)

    def is_enough(self, finished: int) -> bool:
        """Count `finished` more groups as done; return whether as many are done as are wanted."""
        self._finished += finished
        return self.wanted is not None and self._finished >= self.wanted


class SharedWorkQueue(WorkQueue):
    """Groups from 0 to `count` that all replicas claim from."""

    def __init__(self, store: dist.Store, count: int, replicas: int, wanted: int | None = None) -> None:
        """Queue in `store`, which is this generation's own, without keys at first, and the same for all replicas."""
        super().__init__(range(count), wanted)
        self._store, self.replicas = store, replicas

    def claim(self, count: int) -> tuple[list[int], bool]:
        """See WorkQueue."""
        end = self._store.add("claimed", count)
        return list(self._numbers[end - count : end]), end < len(self._numbers)

    def is_enough(self, finished: int) -> bool:
        """See WorkQueue; over all replicas."""
        return self.wanted is not None and self._store.add("finished", finished) >= self.wanted

    def delete_keys(self) -> None:
        """Delete the counters, when every replica has left the generation."""
        for key in ("claimed", "finished"):
            self._store.delete_key(key)


class WorkQueues:
    """Opens the queue of one generation after the other; every rank makes the same calls in the same order."""

    def __init__(self, scheduling: str, replica: int, replicas: int, name: str = "rollout") -> None:
        """Take "queue" or "static" for `scheduling`; with the latter replica r of n has groups r, r + n, r + 2n, ...

        Those whose queues are open at the same time need different names.
        """
        self.replica, self.replicas, self._name = replica, replicas, name
        self._shares = scheduling == "queue" and replicas > 1
        self._calls = 0
        self._previous: SharedWorkQueue | None = None

    def open(self, groups: int, wanted: int | None = None) -> WorkQueue:
        """Return the queue of so many `groups`; a collective call must lie between two generations."""
        if not self._shares:
            return WorkQueue(range(self.replica, groups, self.replicas), wanted)
        if self._previous and self.replica == 0:
            self._previous.delete_keys()
        self._calls += 1
        store = dist.PrefixStore(f"{self._name}/{self._calls}", dist.distributed_c10d._get_default_store())
        self._previous = SharedWorkQueue(store, groups, self.replicas, wanted)
        return self._previous
