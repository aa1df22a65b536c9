"""What a rank's time and memory go into: the phases of a step, which nest, and the timeline of all ranks.

What a phase is, and what else begins and ends with it, is decided in session.py; how a trace looks, in
monitor/timeline.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import torch

from rlhf_megatron.durable import write_text
from rlhf_megatron.monitor.timeline import Clock, Span, chrome_trace
from rlhf_megatron.topology.exchange import gather_bytes, max_over_ranks

GB = 2**30


@dataclasses.dataclass
class _Stretch:
    """One that goes on, or has just ended."""

    name: str
    begin: float
    peak_gb: float
    seconds: float = 0.0


class Phases:
    """The clock of one rank and the most memory that it has held since the last look, from its process's start on."""

    def __init__(self) -> None:
        """What came before is the phase ``launch``: Python, imports, joining the other ranks."""
        now = time.perf_counter()
        self.began = now - (time.time() - psutil.Process().create_time())
        self.records = True  # whether the timeline will be asked for
        self._open: list[_Stretch] = []
        self._seconds = {"launch": now - self.began}
        held, peak = self._look()
        self._peaks = {"launch": peak}
        self._spans = [Span("launch", self.began, now, held, peak)]

    def begin(self, records: bool) -> None:
        """Starts anew, with the next step."""
        self._look()
        self._seconds, self._peaks, self._spans = {}, {}, []
        self.records = records
        self.began = time.perf_counter()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A part of the step; times of the same name add up. The GPU has done its work when it ends."""
        with self._stretch(name) as stretch:
            yield
        self._seconds[name] = self.seconds(name) + stretch.seconds
        self._peaks[name] = max(self._peaks.get(name, 0.0), stretch.peak_gb)

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """A part of a phase that only the timeline shows; nothing happens in steps that it does not record."""
        with self._stretch(name) if self.records else contextlib.nullcontext():
            yield

    def seconds(self, phase: str) -> float:
        """How long a phase has taken since ``begin``."""
        return self._seconds.get(phase, 0.0)

    def hear(self, times: Mapping[str, float]) -> None:
        """Takes the phases of another rank for this one's, unless it has been through them itself."""
        for name, seconds in times.items():
            self._seconds.setdefault(name, seconds)
            self._peaks.setdefault(name, 0.0)

    def times(self) -> dict[str, float]:
        """Seconds of each phase since ``begin``."""
        return dict(self._seconds)

    def peaks(self) -> dict[str, float]:
        """Most memory in each phase since ``begin`` on the rank that had most, in GB of 2^30 bytes; collective.

        All ranks have been through the same phases, or heard of them. See ``_look`` for what counts.
        """
        names = sorted(self._peaks)
        return dict(zip(names, max_over_ranks([self._peaks[name] for name in names]), strict=True))

    def write(self, path: Path, name: str, clocks: list[Clock]) -> None:
        """The timeline of all ranks since ``begin`` under one span ``name``, written by rank 0; collective."""
        held, peak = self._look()
        highest = max([peak, *(span.peak_gb for span in self._spans)])
        spans = [Span(name, self.began, time.perf_counter(), held, highest), *self._spans]
        parts = gather_bytes(json.dumps([dataclasses.astuple(span) for span in spans]).encode())
        if parts:
            ranks = [[Span(*fields) for fields in json.loads(part)] for part in parts]
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(chrome_trace(ranks, clocks, {"part": name})))

    @contextlib.contextmanager
    def _stretch(self, name: str) -> Iterator[_Stretch]:
        held, _ = self._look()
        stretch = _Stretch(name, time.perf_counter(), held)
        self._open.append(stretch)
        yield stretch
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        held, _ = self._look()
        self._open.pop()
        end = time.perf_counter()
        stretch.seconds = end - stretch.begin
        self._spans.append(Span(name, stretch.begin, end, held, stretch.peak_gb))

    def _look(self) -> tuple[float, float]:
        """(memory held now, the most since the last look) in GB; what goes on takes note of it.

        Of a GPU: all that the driver says is taken, but of what torch keeps for later only what is in use. Memory that
        sleeps, as vLLM's does, is still in use by torch's count and no longer taken by the driver's: so it drops out.
        Without a GPU: the process's resident memory at the time.
        """
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            of_torch = torch.cuda.memory_stats()
            besides = total - free - of_torch["reserved_bytes.all.current"]
            held = (besides + of_torch["allocated_bytes.all.current"]) / GB
            peak = (besides + of_torch["allocated_bytes.all.peak"]) / GB
            torch.cuda.reset_peak_memory_stats()
        else:
            held = peak = psutil.Process().memory_info().rss / GB
        for stretch in self._open:
            stretch.peak_gb = max(stretch.peak_gb, peak)
        return held, peak
