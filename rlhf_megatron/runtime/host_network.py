"""Bytes that hosts send each other in each phase of a step, by the kernel's and InfiniBand ports' counters, as metrics.

The counters are a host's own, of whatever runs there: a shared file system's traffic is in them. How fast a link can be
is not asked but seen: the most that it has carried in a fifth of a second.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from rlhf_megatron.topology.exchange import max_over_ranks

MB = 2**20
_RECEIVED, _SENT = 0, 8  # columns of /proc/net/dev
_WORD = 4  # bytes in which InfiniBand ports count
_INTERVAL = 0.2
_LEAST_SHARE = 0.01  # of a step: phases whose link was busy for less have no metrics

# Bytes that a step of so many tokens is planned to have the busiest host carry, and the seconds of that, by phase.
Planned = Callable[[int], Mapping[str, tuple[float, float]]]


def bytes_carried(proc: Path, classes: Path) -> tuple[int, int]:
    """Return the bytes that this host has sent and received, by its network devices and its InfiniBand and RoCE ports.

    Of network devices the physical ones count; where there are none, as in a container, all but the loopback.
    """
    lines = [line.partition(":") for line in (proc / "net" / "dev").read_text().splitlines()[2:]]
    devices = {name.strip(): counts.split() for name, _, counts in lines if name.strip() != "lo"}
    physical = [name for name in devices if (classes / "net" / name / "device").exists()]
    counted = [devices[name] for name in physical or devices]
    sent, received = (sum(int(counts[column]) for counts in counted) for column in (_SENT, _RECEIVED))
    for port in classes.glob("infiniband/*/ports/*/counters"):
        with contextlib.suppress(OSError, ValueError):
            sent += _WORD * int((port / "port_xmit_data").read_text())
            received += _WORD * int((port / "port_rcv_data").read_text())
    return sent, received


class HostNetwork:
    """Counts on the first rank of each host, where there are several. ``metrics`` is collective.

    Attributes:
        planned: of a step, on the rank that reports.
        is_on: there are several hosts.
    """

    def __init__(
        self,
        environment: Mapping[str, str] = os.environ,
        proc: Path = Path("/proc/self"),
        classes: Path = Path("/sys/class"),
    ) -> None:
        """Begin to watch how fast the links are; torchrun's ``environment`` says how many hosts there are."""
        self.planned: Planned | None = None
        self.is_on = int(environment.get("GROUP_WORLD_SIZE", "1")) > 1
        self._counts = self.is_on and environment.get("LOCAL_RANK", "0") == "0"
        self._proc, self._classes = proc, classes
        self._fastest, self._ends = 0.0, threading.Event()
        self._by_phase: dict[str, float] = {}
        if self._counts:
            threading.Thread(target=self._watch, name="host network", daemon=True).start()

    def close(self) -> None:
        """End the watching."""
        self._ends.set()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count a phase's bytes; those of the same name add up."""
        before = self._read() if self._counts else (0, 0)
        yield
        if self.is_on:
            carried = max(now - then for now, then in zip(self._read(), before, strict=True)) if self._counts else 0
            self._by_phase[name] = self._by_phase.get(name, 0.0) + carried

    def begin(self) -> None:
        """Start anew, with the next step."""
        self._by_phase = {}

    def metrics(self, times: Mapping[str, float], seconds: float, tokens: int) -> dict[str, float]:
        """Return a step's metrics under ``network/``, {} on one host. ``times``: seconds of phases, all ranks' alike.

        Of each phase the MB that the busiest host sent or received, the seconds in which the fastest rate seen carries
        them, and what was planned for so many ``tokens``; of the step, the share of its ``seconds`` in which the link
        was busy.
        """
        if not self.is_on:
            return {}
        names = sorted(times)
        fastest, *carried = max_over_ranks([self._fastest, *(self._by_phase.get(name, 0.0) for name in names)])
        if not fastest:
            return {}
        planned = self.planned(tokens) if self.planned else {}
        metrics = {"network/link_mb_per_sec": fastest / MB}
        busy = {name: min(size / fastest, times[name]) for name, size in zip(names, carried, strict=True)}
        for name, size in zip(names, carried, strict=True):
            if busy[name] < _LEAST_SHARE * seconds and name not in planned:
                continue
            metrics |= {f"network/{name}_mb": size / MB, f"network/{name}_seconds": busy[name]}
            if name in planned:
                expected, in_seconds = planned[name]
                metrics |= {f"network/{name}_planned_mb": expected / MB, f"network/{name}_planned_seconds": in_seconds}
        return metrics | {"network/busy_fraction": sum(busy.values()) / seconds}

    def _read(self) -> tuple[int, int]:
        return bytes_carried(self._proc, self._classes)

    def _watch(self) -> None:
        before, began = self._read(), time.monotonic()
        while not self._ends.wait(_INTERVAL):
            now, at = self._read(), time.monotonic()
            carried = max(count - then for count, then in zip(now, before, strict=True))
            self._fastest = max(self._fastest, carried / (at - began))
            before, began = now, at
