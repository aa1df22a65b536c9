"""Profiles chosen steps by kernel: torch's profiler for each phase, or marks for NVIDIA's nsys."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator

import torch

from rlhf_megatron.errors import MonitorError
from rlhf_megatron.monitor.run_folder import RunFolder
from rlhf_megatron.recipe.operations import ProfileSection

_ROWS, _NAME_WIDTH = 40, 80  # of the table of kernels


class Profiler:
    """One rank's. It does nothing in steps and on ranks that the recipe does not choose."""

    def __init__(self, section: ProfileSection, run: RunFolder, rank: int, world: int) -> None:
        """Raise MonitorError for ranks that are not there, and for nsys without a GPU."""
        missing = [chosen for chosen in section.ranks if not 0 <= chosen < world]
        if section.steps and missing:
            raise MonitorError(f"monitor.profile.ranks: there is no rank {missing[0]} of {world}")
        if section.steps and section.tool == "nsys" and not torch.cuda.is_available():
            raise MonitorError("monitor.profile.tool: nsys records GPUs, and there is none; set it to torch")
        self._section, self._run, self._rank = section, run, rank
        self._step: int | None = None  # the one that is recorded
        self._began = 0.0
        self._timer: threading.Timer | None = None  # ends what nsys records, within a phase too
        self._nests = False
        self._times: Counter[str] = Counter()  # of each phase in this step

    def begin(self, step: int) -> None:
        """Note that a step begins."""
        if step in self._section.steps and self._rank in self._section.ranks:
            self._step = step
            self._times.clear()
            self._began = time.monotonic()
            if self._section.tool == "nsys":
                torch.cuda.profiler.start()
                self._start_timer()

    def end(self) -> None:
        """Note that it has ended: nsys closes what it has recorded."""
        if self._step is not None and self._section.tool == "nsys":
            if self._timer:
                self._timer.cancel()
                self._timer.join()
            torch.cuda.profiler.stop()  # which does nothing where that was done already
        self._step, self._timer = None, None

    def _start_timer(self) -> None:
        if self._section.duration_seconds is not None:
            self._timer = threading.Timer(self._section.duration_seconds, torch.cuda.profiler.stop)
            self._timer.daemon = True
            self._timer.start()

    def _is_over(self) -> bool:
        limit = self._section.duration_seconds
        return limit is not None and time.monotonic() - self._began >= limit

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark a phase of the step: a range for nsys; files of torch's profiler if the recipe names it, when it
        ends."""
        if self._step is None:
            yield
        elif self._section.tool == "nsys":
            with torch.cuda.nvtx.range(name):
                yield
        elif name in self._section.phases and not self._nests and not self._is_over():
            with self._recorded(self._step, name):
                yield
        else:
            yield

    def span(self, name: str) -> contextlib.AbstractContextManager[object]:
        """Return a named part of a phase."""
        if self._step is None:
            return contextlib.nullcontext()
        return torch.cuda.nvtx.range(name) if self._section.tool == "nsys" else torch.profiler.record_function(name)

    @contextlib.contextmanager
    def _recorded(self, step: int, phase: str) -> Iterator[None]:
        self._nests = True
        try:
            with torch.profiler.profile() as profile:  # of all devices that there are
                yield
        finally:
            self._nests = False
        self._times[phase] += 1
        trace = self._run.profile_file(step, phase, self._times[phase], self._rank)
        trace.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(trace))
        order = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = profile.key_averages().table(order, row_limit=_ROWS, max_name_column_width=_NAME_WIDTH)
        trace.with_name(trace.name.removesuffix(".json.gz") + ".txt").write_text(table, encoding="utf-8")
