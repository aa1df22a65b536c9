"""MetricsLogger: one object per step into metrics.jsonl and into the recipe's trackers; and the readers of that file.

Not here: the trackers themselves (trackers.py), and any reduction over ranks: the loop hands over final numbers.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import pyarrow as pa

from rlhf_megatron.errors import MonitorError
from rlhf_megatron.monitor.kept_rows import columns_for_people
from rlhf_megatron.monitor.records import MOST_BYTES, lines_of, record_of
from rlhf_megatron.monitor.run_folder import RunFolder
from rlhf_megatron.monitor.trackers import ModelTracker, TableTracker, Tracker, check_trackers, make_tracker
from rlhf_megatron.untrusted import check_regular, opened, reason_of

FAILURES_BEFORE_A_TRACKER_IS_DROPPED = 3
# Beginnings of the names of what depends on the machine and its load: no two runs share it.
OF_THE_MACHINE = (
    *("time/", "start/", "memory/", "network/", "perf/", "train/step_time", "reward/latency", "judge/ms"),
    *("rollout/throughput", "rollout/replica_imbalance", "rollout/turn_latency"),
    *("rollout/engine_seconds", "rollout/idle_seconds", "rollout/waiting_mean"),
    *(f"{role}/{part}" for role in ("train", "critic") for part in ("gradient_sync", "forward_time", "backward_time")),
)


class MonitorSettings(Protocol):
    """The part of the recipe's ``monitor`` section that is read here."""

    @property
    def trackers(self) -> Sequence[str]:
        """Names of trackers.TRACKERS."""


class MetricsLogger:
    """Writer of the metrics of every step to metrics.jsonl and to the trackers. Use on one rank only.

    metrics.jsonl is always written, whatever the recipe's list says: plots, reports and comparisons read it.
    A tracker that is not a local file may fail while a run goes on (a server that is away): that is reported on stderr
    and never ends the run; after three failures in a row that tracker is dropped. What a local file has no room for
    waits in memory, and is written when there is room again.
    """

    def __init__(
        self,
        run_folder: RunFolder,
        settings: MonitorSettings,
        run_settings: Mapping[str, Any] | None = None,
        first_step: int = 1,
    ) -> None:
        """Open every tracker; ``run_settings`` is the resolved recipe as a plain mapping, shown by trackers that can.

        ``first_step``: the first that will be logged, beyond 1 where a run resumes.

        Raises MonitorError (one line) for an unknown tracker, a missing package, or a tracker that cannot start.
        """
        names = list(dict.fromkeys(["jsonl", *settings.trackers]))
        check_trackers(names)  # all of them before any begins a run on its server
        self._trackers: dict[str, Tracker] = {}
        for name in names:
            try:
                self._trackers[name] = make_tracker(name, run_folder, run_settings or {}, first_step)
            except OSError as error:
                raise MonitorError(
                    f"{run_folder.path}: what the tracker {name} writes cannot be written ({reason_of(error)}); make "
                    "room, move it away, or choose another run_root"
                ) from error
        self._failures = dict.fromkeys(names, 0)
        self._waiting: dict[str, deque[tuple[int, dict[str, float]]]] = {name: deque() for name in names}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the numbers of one step. Names as in "rollout/response_length_mean"; values are plain numbers, NaN too.

        Raises TypeError naming the metric whose value is no number: a tensor here would hide a device synchronisation.
        """
        numbers = {name: _number(name, value) for name, value in metrics.items()}
        for name, tracker in list(self._trackers.items()):
            if tracker.is_local:
                self._waiting[name].append((step, numbers))
                self._write_waiting(name, tracker)
            else:
                self._log_or_warn(name, tracker, step, numbers)

    def log_rollouts(self, step: int, table: pa.Table) -> None:
        """Hand rows of ``kept_table`` to the trackers that show tables; one that fails is warned of, and goes on."""
        self._hand(
            TableTracker, f"rollouts of step {step}", lambda to: to.log_rollouts(step, columns_for_people(table))
        )

    def log_model(self, step: int, folder: Path) -> None:
        """Hand an exported model to the trackers that keep models; one that fails is warned of."""
        self._hand(ModelTracker, f"model of step {step}", lambda to: to.log_model(step, folder))

    def _hand(self, kind: type, thing: str, log: Callable[[Any], None]) -> None:
        """Have the trackers of a kind log a thing; warn of one that fails."""
        for name, tracker in self._trackers.items():
            if isinstance(tracker, kind):
                try:
                    log(tracker)
                except Exception as error:
                    text = f"tracker {name} got no {thing}: {reason_of(error)}"
                    print(f"warning: {text}", file=sys.stderr, flush=True)

    def _write_waiting(self, name: str, tracker: Tracker) -> None:
        """Write what a local file has not got yet; warns where it has no room, once until it has."""
        waiting = self._waiting[name]
        try:
            while waiting:
                tracker.log(*waiting[0])
                waiting.popleft()
        except OSError as error:
            if not self._failures[name]:
                text = f"metrics.{name} cannot be written: {error.strerror or error}; its records wait in memory"
                print(f"warning: {text}", file=sys.stderr, flush=True)
            self._failures[name] += 1
        else:
            self._failures[name] = 0

    def _log_or_warn(self, name: str, tracker: Tracker, step: int, numbers: Mapping[str, float]) -> None:
        try:
            tracker.log(step, numbers)
        except Exception as error:
            self._failures[name] += 1
            dropped = self._failures[name] >= FAILURES_BEFORE_A_TRACKER_IS_DROPPED
            ending = "; it is dropped for the rest of the run" if dropped else ""
            print(
                f"warning: tracker {name} failed at step {step}: {reason_of(error)}{ending}",
                file=sys.stderr,
                flush=True,
            )
            if dropped:
                del self._trackers[name]
        else:
            self._failures[name] = 0

    def close(self) -> None:
        """Flush and close every tracker; a tracker that is not a local file only warns if it fails."""
        for name, tracker in self._trackers.items():
            if self._waiting[name]:
                self._write_waiting(name, tracker)
            if self._waiting[name]:
                lost = len(self._waiting[name])
                print(f"warning: {lost} records of metrics.{name} are lost", file=sys.stderr, flush=True)
            try:
                tracker.close()
            except Exception as error:
                if tracker.is_local:
                    raise
                print(f"warning: tracker {name} did not close: {error}", file=sys.stderr, flush=True)
        self._trackers = {}

    def __enter__(self) -> MetricsLogger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, (int, float)):
        return value
    # numpy's scalars are numbers that the host already has; torch's tensors may still be on their way.
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        return float(value)
    raise TypeError(f"metric {name!r} is a {type(value).__name__}, not a number; reduce it before it is logged")


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of metrics.jsonl in the order of writing: "step" and numbers, None where one was not finite.

    A damaged last line, as a killed run leaves it, is skipped; one elsewhere raises MonitorError with file and line
    number. (A run that goes on has such lines moved out of the way before, see file_trackers.py.)
    """
    check_regular(path, MonitorError, MOST_BYTES)
    records, damaged = [], 0
    with opened(path, MonitorError) as file:
        for number, line in lines_of(file):
            if damaged:
                raise MonitorError(f"{path}:{damaged}: not an object with a step and numbers; remove the line")
            record = record_of(line)
            if record is None:
                damaged = number
            else:
                records.append(record)
    return records


def read_steps(path: Path) -> dict[int, dict[str, float | None]]:
    """Return step -> its metrics, steps ascending; errors as in ``read_records``.

    A step that was logged more than once (an evaluation beside a training step, or a step repeated after a resume) is
    merged, the later value wins.
    """
    steps: dict[int, dict[str, float | None]] = {}
    for record in read_records(path):
        steps.setdefault(record.pop("step"), {}).update(record)
    return dict(sorted(steps.items()))


def steps_before(path: Path, first_step: int) -> dict[int, dict[str, float]]:
    """Return ``read_steps`` of the steps that a run which resumes keeps, NaN for None; none where the file is not
    there."""
    steps = read_steps(path) if path.exists() else {}
    return {
        step: {name: math.nan if value is None else value for name, value in values.items()}
        for step, values in steps.items()
        if step < first_step
    }


def comparable(steps: Mapping[int, Mapping[str, Any]], *besides: str) -> dict[int, dict[str, Any]]:
    """Return the metrics of steps without those of the machine, and without names that begin with one of
    ``besides``."""
    left_out = (*OF_THE_MACHINE, *besides)
    return {
        step: {name: value for name, value in values.items() if not name.startswith(left_out)}
        for step, values in steps.items()
    }


def read_metrics(path: Path) -> dict[str, tuple[list[int], list[float]]]:
    """Return ``read_steps`` as one series per metric: name -> (steps ascending, values), NaN for None."""
    series: dict[str, tuple[list[int], list[float]]] = {}
    for step, values in read_steps(path).items():
        for name, value in values.items():
            steps, of_name = series.setdefault(name, ([], []))
            steps.append(step)
            of_name.append(math.nan if value is None else value)
    return series
