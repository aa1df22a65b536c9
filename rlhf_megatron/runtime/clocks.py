"""Offsets between the clocks of ranks. Ranks of one host share a clock; hosts are compared by messages."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from rlhf_megatron.monitor.timeline import Clock

_EXCHANGES = 20


def host_identity() -> str:
    """Return an identity that the processes of one running system share, also where containers have names of their
    own."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()


def measure_clocks(host: str, clock: Callable[[], float] = time.perf_counter) -> list[Clock]:
    """Return every rank's ``clock`` against rank 0's, in rank order, on every rank; collective, milliseconds for each
    host.

    ``clock`` is one that all processes of a ``host`` share, as time.perf_counter is on Linux.
    """
    rank = dist.get_rank()
    identities: list[tuple[str, str]] = [("", "")] * dist.get_world_size()
    dist.all_gather_object(identities, (host, socket.gethostname()))
    hosts = [host for host, _ in identities]
    first_of_host = {host: hosts.index(host) for host in hosts}
    for first in first_of_host.values():
        if first and rank == 0:
            _answer(first, clock)
        elif first == rank != 0:
            measured = clock_ahead(_ask(clock))
    mine = measured if rank and first_of_host[hosts[rank]] == rank else (0.0, 0.0)
    of_ranks = [mine] * len(hosts)
    dist.all_gather_object(of_ranks, mine)
    return [Clock(name, *of_ranks[first_of_host[host]]) for host, name in identities]


def clock_ahead(exchanges: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Return (seconds that this clock is ahead of another, by how much it may be wrong) from (asked, other's time,
    answered).

    The answer is taken to have been given in the middle of the quickest exchange (Cristian 1989), so what is found is
    wrong by no more than half of its duration.
    """
    asked, other, answered = min(exchanges, key=lambda times: times[2] - times[0])
    return (asked + answered) / 2 - other, (answered - asked) / 2


def _ask(clock: Callable[[], float]) -> list[tuple[float, float, float]]:
    exchanges, time_there = [], torch.zeros(1, dtype=torch.float64)
    for _ in range(_EXCHANGES):
        asked = clock()
        dist.send(time_there, 0)
        dist.recv(time_there, 0)
        exchanges.append((asked, float(time_there), clock()))
    return exchanges


def _answer(rank: int, clock: Callable[[], float]) -> None:
    buffer = torch.zeros(1, dtype=torch.float64)
    for _ in range(_EXCHANGES):
        dist.recv(buffer, rank)
        buffer.fill_(clock())
        dist.send(buffer, rank)
