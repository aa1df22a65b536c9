"""Times stretches of work on the device, without making the device wait for the answer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch


class Stopwatch:
    """Sum of what its stretches take: on a GPU by events on the current stream, else by the clock."""

    def __init__(self) -> None:
        """Begin with nothing timed."""
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Time one more stretch."""
        if not torch.cuda.is_available():
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        self._events.append((begin, end))

    def take(self) -> float:
        """Return milliseconds since the last call; waits for the device to have done the last stretch."""
        milliseconds, self._seconds = self._seconds * 1000.0, 0.0
        for begin, end in self._events:
            end.synchronize()
            milliseconds += begin.elapsed_time(end)
        self._events.clear()
        return milliseconds
