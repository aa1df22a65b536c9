"""The phases of all ranks in one picture: a Chrome trace, to be opened in https://ui.perfetto.dev or chrome://tracing.

Pure: what is recorded, and when it is brought together, is decided in runtime/phases.py. The format is Google's "Trace
Event Format" in its JSON form: complete events ("X"), counters ("C") and names ("M"), times in microseconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Span:
    """One stretch of a rank's time, by that rank's own clock; those of a rank nest."""

    name: str
    begin: float  # seconds
    end: float
    held_gb: float  # memory as it ends, in GB of 2^30 bytes
    peak_gb: float  # most memory in between


@dataclasses.dataclass(frozen=True)
class Clock:
    """The offset of a rank's clock from rank 0's."""

    host: str
    ahead: float  # seconds to subtract from the rank's times
    uncertainty: float  # seconds by which ``ahead`` may be wrong; 0 on the host of rank 0, where the clock is the same


def chrome_trace(ranks: Sequence[Sequence[Span]], clocks: Sequence[Clock], about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trace of all ranks, in rank order: a process for each, its phases nested, its memory beside them.

    Time 0 is the first beginning on any rank, by the clock of rank 0. ``about`` goes into ``otherData``.
    """
    shifted = [
        [dataclasses.replace(span, begin=span.begin - clock.ahead, end=span.end - clock.ahead) for span in spans]
        for spans, clock in zip(ranks, clocks, strict=True)
    ]
    zero = min((span.begin for spans in shifted for span in spans), default=0.0)
    events: list[dict[str, Any]] = []
    for rank, (spans, clock) in enumerate(zip(shifted, clocks, strict=True)):
        known = f", clock within {clock.uncertainty * 1e6:.0f} us" if clock.uncertainty else ""
        process = {"pid": rank, "tid": 0}
        events.append({"ph": "M", "name": "process_name", **process, "args": {"name": f"rank {rank}"}})
        events.append({"ph": "M", "name": "process_labels", **process, "args": {"labels": f"{clock.host}{known}"}})
        events.append({"ph": "M", "name": "process_sort_index", **process, "args": {"sort_index": rank}})
        for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
            begin, duration = (span.begin - zero) * 1e6, (span.end - span.begin) * 1e6
            peak = {"peak_gb": round(span.peak_gb, 4)}
            events.append({"ph": "X", "name": span.name, **process, "ts": begin, "dur": duration, "args": peak})
        for span in sorted(spans, key=lambda span: span.end):
            held = {"held": round(span.held_gb, 4)}
            events.append({"ph": "C", "name": "memory GB", **process, "ts": (span.end - zero) * 1e6, "args": held})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(about)}
