"""Time and memory of one rank by the phases of a step, which nest, and the timeline of all ranks.

What else begins and ends with a phase is decided in run_context.py; how a trace looks, in monitor/timeline.py.
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
class _OpenSpan:
    """A phase or span that goes on, or has just ended."""

    name: str
    begin: float
    peak_gb: float
    seconds: float = 0.0


class Phases:
    """The clock of one rank and the most memory that it has held since the last look, from its process's start on."""

    def __init__(self) -> None:
        """Count all before as the phase ``launch``: Python, imports, joining the other ranks."""
        now = time.perf_counter()
        self.began = now - (time.time() - psutil.Process().create_time())
        self.records = True  # whether the timeline will be asked for
        self._open: list[_OpenSpan] = []
        self._seconds = {"launch": now - self.began}
        held, peak = self._sample_memory()
        self._peaks = {"launch": peak}
        self._spans = [Span("launch", self.began, now, held, peak)]

    def begin(self, records: bool) -> None:
        """Start anew, with the next step."""
        self._sample_memory()
        self._seconds, self._peaks, self._spans = {}, {}, []
        self.records = records
        self.began = time.perf_counter()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a part of the step; times of the same name add up. The GPU has done its work when it ends."""
        with self._measure(name) as span:
            yield
        self._seconds[name] = self.seconds(name) + span.seconds
        self._peaks[name] = max(self._peaks.get(name, 0.0), span.peak_gb)

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Mark a part of a phase that only the timeline shows; nothing happens in steps that it does not record."""
        with self._measure(name) if self.records else contextlib.nullcontext():
            yield

    def seconds(self, phase: str) -> float:
        """Return how long a phase has taken since ``begin``."""
        return self._seconds.get(phase, 0.0)

    def add_missing(self, times: Mapping[str, float]) -> None:
        """Add the phases of another rank that this one has not been through."""
        for name, seconds in times.items():
            self._seconds.setdefault(name, seconds)
            self._peaks.setdefault(name, 0.0)

    def times(self) -> dict[str, float]:
        """Return seconds of each phase since ``begin``."""
        return dict(self._seconds)

    def peaks(self) -> dict[str, float]:
        """Return most memory in each phase since ``begin`` on the rank that had most, in GB of 2^30 bytes; collective.

        All ranks have been through the same phases, or have them from others. See ``_sample_memory`` for what counts.
        """
        names = sorted(self._peaks)
        return dict(zip(names, max_over_ranks([self._peaks[name] for name in names]), strict=True))

    def write(self, path: Path, name: str, clocks: list[Clock]) -> None:
        """Write the timeline of all ranks since ``begin`` under one span ``name``, written by rank 0; collective."""
        held, peak = self._sample_memory()
        highest = max([peak, *(span.peak_gb for span in self._spans)])
        spans = [Span(name, self.began, time.perf_counter(), held, highest), *self._spans]
        parts = gather_bytes(json.dumps([dataclasses.astuple(span) for span in spans]).encode())
        if parts:
            ranks = [[Span(*fields) for fields in json.loads(part)] for part in parts]
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(chrome_trace(ranks, clocks, {"part": name})))

    @contextlib.contextmanager
    def _measure(self, name: str) -> Iterator[_OpenSpan]:
        held, _ = self._sample_memory()
        span = _OpenSpan(name, time.perf_counter(), held)
        self._open.append(span)
        yield span
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        held, _ = self._sample_memory()
        self._open.pop()
        end = time.perf_counter()
        span.seconds = end - span.begin
        self._spans.append(Span(name, span.begin, end, held, span.peak_gb))

    def _sample_memory(self) -> tuple[float, float]:
        """Return (memory held now, the most since the last look) in GB; open spans take note of it.

        Of a GPU: all that the driver says is taken, but of what torch keeps for later only what is in use. Memory that
        sleeps, as vLLM's does, is still in use by torch's count and no longer taken by the driver's: so it drops out.
        Without a GPU: the process's resident memory at the time.
        """
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            torch_stats = torch.cuda.memory_stats()
            besides = total - free - torch_stats["reserved_bytes.all.current"]
            held = (besides + torch_stats["allocated_bytes.all.current"]) / GB
            peak = (besides + torch_stats["allocated_bytes.all.peak"]) / GB
            torch.cuda.reset_peak_memory_stats()
        else:
            held = peak = psutil.Process().memory_info().rss / GB
        for span in self._open:
            span.peak_gb = max(span.peak_gb, peak)
        return held, peak
