"""Bytes that hosts send each other, summed over the collectives of ranks that lie on them."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence


def _by_host() -> defaultdict[int, float]:
    return defaultdict(float)


@dataclasses.dataclass(frozen=True)
class Edges:
    """Bytes by host. ``hosts`` of the methods are those of the ranks that take part, in their order."""

    sent: defaultdict[int, float] = dataclasses.field(default_factory=_by_host)
    received: defaultdict[int, float] = dataclasses.field(default_factory=_by_host)

    @property
    def total(self) -> float:
        """Sum of what all hosts send."""
        return sum(self.sent.values(), 0.0)

    @property
    def busiest(self) -> float:
        """Most that a host sends, or receives."""
        return max([0.0, *self.sent.values(), *self.received.values()])

    def add(self, source: int, target: int, size: float) -> None:
        """Note ``size`` bytes, if both are not one host."""
        if source != target and size:
            self.sent[source] += size
            self.received[target] += size

    def ring(self, hosts: Sequence[int], size: float) -> None:
        """Note what each rank sends to the next: ``size`` in all."""
        for source, target in zip(hosts, [*hosts[1:], *hosts[:1]], strict=True):
            self.add(source, target, size)

    def all_reduce(self, hosts: Sequence[int], size: float) -> None:
        """Note a sum of ``size`` bytes over these ranks."""
        self.ring(hosts, 2 * size * (len(hosts) - 1) / len(hosts))

    def broadcast(self, hosts: Sequence[int], size: float) -> None:
        """Note ``size`` bytes from the first rank to all: each other host has them once."""
        for host in set(hosts) - {hosts[0]}:
            self.add(hosts[0], host, size)

    def spread(self, sources: Sequence[int], targets: Sequence[int], size: float) -> None:
        """Note ``size`` bytes that go from any of ``sources`` to any of ``targets``, all alike."""
        here, there = Counter(sources), Counter(targets)
        for host, count in here.items():
            self.sent[host] += size * count / len(sources) * (1 - there[host] / len(targets))
        for host, count in there.items():
            self.received[host] += size * count / len(targets) * (1 - here[host] / len(sources))

    def scaled(self, factor: float) -> Edges:
        """Return so many times as much."""
        whole = Edges()
        for mine, scaled in ((self.sent, whole.sent), (self.received, whole.received)):
            scaled.update({host: factor * size for host, size in mine.items()})
        return whole

    @classmethod
    def joined(cls, every: Iterable[Edges]) -> Edges:
        """Return the sum."""
        whole = cls()
        for edges in every:
            for mine, joined in ((edges.sent, whole.sent), (edges.received, whole.received)):
                for host, size in mine.items():
                    joined[host] += size
        return whole
