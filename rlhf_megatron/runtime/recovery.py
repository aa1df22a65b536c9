"""recovery.jsonl: one line for each start, resume, fault and end of a run, and whether another try makes sense.

Files only; rank 0 writes, except for a fault, which the first rank that sees it writes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import psutil
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from rlhf_megatron.durable import remove, write_text
from rlhf_megatron.errors import UserError
from rlhf_megatron.monitor.records import set_damaged_aside, set_huge_aside
from rlhf_megatron.recipe.slurm import RetrySection
from rlhf_megatron.redaction import hide_secrets
from rlhf_megatron.runtime.processes import identity
from rlhf_megatron.untrusted import MOST_BYTES, opened, parse_json, read_bytes, shown

What = Literal["start", "restart", "resume", "fault", "hang", "stop", "give_up", "health_stop", "done"]
_BEGINNINGS, _ENDINGS, _FAULTS = ("start", "restart"), ("stop", "done"), ("fault", "hang", "health_stop")
_REQUEUE = "requeue"
NETWORK = "network"  # the kind of a fault that is over when something else can be reached again
# A whole line of metrics.jsonl lies in so many bytes, even behind a block of zeros that a power cut has left.
_BYTES_WITH_LAST_STEP = 1 << 22
_Step = Annotated[int, Field(ge=0, le=2**53)]
_Budget = Annotated[str, Field(pattern=r"^\w+\.\w+$")]


class _Line(BaseModel):
    """The fields of a line that the next attempt reads; there are more for people."""

    model_config = ConfigDict(strict=True)

    launch: str = Field(max_length=1000)
    attempt: int
    why: str
    step: _Step | None
    reduced: dict[_Budget, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = {}
    found: dict[_Budget, Annotated[int, Field(gt=0, lt=2**32)]] = {}
    planned_gb: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0


class _Beginning(_Line):
    what: Literal["start", "restart"]
    step: _Step
    torchrun: str
    job: str | None
    requeues: int
    metrics_bytes: int


class _Resume(_Line):
    what: Literal["resume", "give_up"]
    step: _Step


class _Ending(_Line):
    what: Literal["stop", "done"]
    step: _Step
    torchrun: str | None = None
    saved: bool = True


class _Fault(_Line):
    what: Literal["fault", "hang", "health_stop"]
    phase: str | None = None


class _OutOfMemory(_Fault):
    kind: Literal["out_of_memory"]
    phase: str


class _NotFinite(_Fault):
    kind: Literal["not_finite"]
    first: _Step
    data: dict[str, Any]


_LINES: Mapping[Any, TypeAdapter[Any]] = {
    **{what: TypeAdapter(_Beginning) for what in _BEGINNINGS},
    **{what: TypeAdapter(_Resume) for what in ("resume", "give_up")},
    **{what: TypeAdapter(_Ending) for what in _ENDINGS},
    **{what: TypeAdapter(_Fault) for what in _FAULTS},
    "out_of_memory": TypeAdapter(_OutOfMemory),
    "not_finite": TypeAdapter(_NotFinite),
}


class RepeatedFault(UserError):
    """A run that fails again and again at the same place."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """The origin of an attempt."""

    torchrun: str  # the ``identity`` of rank 0's: it starts the ranks again after a fault
    job: str | None = None  # Slurm's
    requeues: int = 0  # how often Slurm has started that job again

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Origin:
        """Return this process's origin; wrappers, as those that bind to cores, may stand between torchrun and it."""
        torchrun = identity(_torchrun_of(environment.get("TORCHELASTIC_RUN_ID")))
        return cls(torchrun, environment.get("SLURM_JOB_ID"), int(environment.get("SLURM_RESTART_COUNT") or 0))

    def continues(self, beginning: Mapping[str, Any]) -> bool:
        """Return whether the same torchrun, or a requeue, has started the run since a ``beginning``, and no person.

        A job alone says nothing: an interactive one may have many starts by hand.
        """
        is_requeued = self.job is not None and beginning.get("job") == self.job
        return beginning.get("torchrun") == self.torchrun or (is_requeued and self.requeues > beginning["requeues"])


def _torchrun_of(run_id: str | None) -> int:
    """Return the process that started this rank: the nearest above that is not itself of torchrun's run, as wrappers
    are."""
    for parent in psutil.Process().parents():
        try:
            is_wrapper = run_id is not None and parent.environ().get("TORCHELASTIC_RUN_ID") == run_id
        except psutil.Error:  # of another user, or just ended
            is_wrapper = False
        if not is_wrapper:
            return parent.pid
    return os.getpid()  # what started it is outside of this container


class RecoveryLog:
    """The decisions of one run, over all of its jobs."""

    def __init__(self, run: Path, origin: Origin | None = None) -> None:
        """Set up; ``run`` is the run's folder; ``origin``: of this process, if it is not given."""
        self.path = run / "recovery.jsonl"
        self._metrics, self._requeue = run / "metrics.jsonl", run / _REQUEUE
        self._given_origin = origin

    @functools.cached_property
    def _origin(self) -> Origin:
        return self._given_origin or Origin.of(os.environ)

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines so far, without damaged ones, such as one that a crash has cut.

        Of one that is larger than any run's nothing is read; ``begin`` moves it out of the way.
        Raises UserError where the file cannot be read at all.
        """
        try:
            is_read = os.path.lexists(self.path) and _size(self.path) <= MOST_BYTES
            content = read_bytes(self.path, UserError) if is_read else b""
        except UserError as error:
            raise UserError(f"{error}; move it away") from error
        return [line for text in content.split(b"\n") if (line := _checked(text))]

    def of_this_launch(self) -> list[dict[str, Any]]:
        """Return the lines since a person has started the run: none, if that was now."""
        return self._of_this_launch(self.lines())

    def is_first_attempt(self) -> bool:
        """Return whether this launch has not been started again by itself; call it after ``begin``."""
        return sum(line["what"] in _BEGINNINGS for line in self.of_this_launch()) <= 1

    def launch(self) -> str:
        """Return the name that all attempts share that follow from one start by a person; call it after ``begin``."""
        beginning = _last_beginning(self.lines())
        return str(beginning["launch"]) if beginning else self._origin.torchrun

    def stop(self, step: int, why: str, saved: bool) -> None:
        """Note that all ranks end after ``step``, and whether they have saved."""
        self.append("stop", step, why, torchrun=self._origin.torchrun, saved=saved)

    def has_stopped(self) -> dict[str, Any] | None:
        """Return the line of the run's stop under the torchrun that has now started it again, to which a rank that dies
        as it ends is a fault."""
        stops = [line for line in self.lines() if line["what"] == "stop"]
        return next((line for line in stops if line.get("torchrun") == self._origin.torchrun), None)

    def starts(self) -> int:
        """Return the number of times the run has been started, by whomever."""
        return sum(line["what"] in _BEGINNINGS for line in self.lines())

    def append(self, what: What, step: int | None, why: str, **more: Any) -> None:
        """Add a line: ``step`` is the last one that was done, None where the writer does not know."""
        try:
            self._write(what, step, why, more)
        except (OSError, UserError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            if what in _BEGINNINGS:
                raise UserError(f"{self.path}: cannot be written ({reason}); make room") from error
            print(f"warning: {self.path}: {what} could not be noted: {reason}", file=sys.stderr, flush=True)

    def _write(self, what: What, step: int | None, why: str, more: Mapping[str, Any]) -> None:
        lines = self.lines()
        is_new = what == "start"
        launch = self._origin.torchrun if is_new else self.launch()
        begun = sum(line["what"] in _BEGINNINGS and line["launch"] == launch for line in lines)
        attempt = 0 if is_new else begun if what == "restart" else max(0, begun - 1)
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        record = {"time": now, "launch": launch, "attempt": attempt, "step": step, "what": what}
        record |= {"why": hide_secrets(why), **more}
        # What a crash has cut stays a line of its own.
        before = "\n" if _is_cut(self.path) else ""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(before + json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def begin(
        self, max_repeats: int, reduced: Mapping[str, float] | None = None, found: Mapping[str, Any] | None = None
    ) -> str | None:
        """Note that an attempt begins; return why it should not, where it would be the same fault again.

        Call it on one rank, before the metrics of earlier attempts are moved. A fault repeats if the run has ended
        ``max_repeats`` times in a row after the same step and has been started again each time by torchrun or Slurm,
        all with the same budgets: ``reduced`` are those that are smaller from now on, if any. ``found``: fields about
        those that the recipe leaves open.
        What a health rule has stopped, only a person starts again.
        """
        remove(self._requeue)
        set_huge_aside(self.path, MOST_BYTES)
        if self.path.exists():
            set_damaged_aside(self.path, lambda line: _checked(line) is not None)
        lines = self.lines()
        step, fault = self._end_of_last(lines)
        own = self._of_this_launch(lines)
        stopped = next((line for line in since_last_beginning(own) if line["what"] == "health_stop"), None)
        if stopped:
            return f"{self.path}: {shown(stopped['why'], 1000)}"
        if fault and own and not reduced:
            repeats = 1 + _restarts_after(step, lines)
            if repeats >= max_repeats:
                self.append("give_up", step, f"{repeats} attempts in a row ended after step {step}; the last: {fault}")
                return (
                    f"{self.path}: {repeats} attempts in a row ended after step {step} ({shown(fault, 1000)}); "
                    "fix the cause and start the run again, or raise retry.max_repeats"
                )
        what: What = "restart" if own else "start"
        why = fault or (f"the attempt before had ended with: {lines[-1]['what']}" if lines else "the first attempt")
        changes = ({"reduced": dict(reduced)} if reduced else {}) | dict(found or {})
        origin = dataclasses.asdict(self._origin)
        self.append(what, step, why, metrics_bytes=_size(self._metrics), **origin, **changes)
        return None

    def seconds_to_wait(self, retry: RetrySection) -> float:
        """Return how long the next attempt is to wait; call it before ``begin``. 0 where a person starts the run, or
        the attempt before has ended as it should."""
        own = self.of_this_launch()
        ended = since_last_beginning(own)
        if not own or any(line["what"] in _ENDINGS for line in ended):
            return 0.0
        if not any(line.get("kind") == NETWORK for line in ended):
            return retry.interval_seconds
        step, _ = self._end_of_last(own)
        return max(retry.interval_seconds, retry.network.seconds_before(_restarts_after(step, own)))

    def ask_for_requeue(self, step: int, why: str) -> None:
        """Leave the file ``requeue`` in the run's folder, which tells a job script to start the run again."""
        write_text(self._requeue, json.dumps({"step": step, "why": why}) + "\n")

    def _of_this_launch(self, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        beginning = _last_beginning(lines)
        if beginning is None or not self._origin.continues(beginning):
            return []
        return [line for line in lines if line["launch"] == beginning["launch"]]

    def _end_of_last(self, lines: list[dict[str, Any]]) -> tuple[int, str | None]:
        """Return (the last step of the attempt before, what ended it where that was a fault)."""
        beginning, since = _last_beginning(lines), since_last_beginning(lines)
        if beginning is None:
            return 0, None
        step = max((line["step"] for line in since if line["what"] == "resume"), default=beginning["step"])
        # A file that has changed since then is of this attempt, at least at its end.
        if _size(self._metrics) != beginning["metrics_bytes"]:
            step = _last_step(self._metrics, step)
        ending = next((line for line in since if line["what"] in _ENDINGS), None)
        if ending is not None:
            return ending["step"], None if ending.get("saved", True) else f"{ending['why']}; the step was not saved"
        said = [line["why"] for line in since if line["what"] in _FAULTS]
        return step, said[-1] if said else "it said nothing: killed, or its machine failed"


def _last_beginning(lines: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    return next((line for line in reversed(lines) if line["what"] in _BEGINNINGS), None)


def since_last_beginning(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the lines that the latest attempt in ``lines`` has written after its first."""
    return list(itertools.takewhile(lambda line: line["what"] not in _BEGINNINGS, reversed(lines)))[::-1]


def _restarts_after(step: int, lines: list[dict[str, Any]]) -> int:
    """Count the restarts at the end of ``lines`` that followed a fault after the same step, with nothing changed."""
    count = 0
    for line in reversed(lines):
        if line["what"] == "restart" and line["step"] == step and "reduced" not in line:
            count += 1
        elif line["what"] in (*_BEGINNINGS, *_ENDINGS):
            break
    return count


def _checked(text: bytes) -> dict[str, Any] | None:
    """Return a line's object, None where it is none or lacks what the next attempt reads of it."""
    try:
        value = parse_json(text.decode("utf-8"), "", UserError)
        _LINES[value["what"]].validate_python(value)
        if value.get("kind") in ("out_of_memory", "not_finite"):
            _LINES[value["kind"]].validate_python(value)
    except (UserError, ValidationError, UnicodeDecodeError, KeyError, TypeError):
        return None
    return dict(value)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _is_cut(path: Path) -> bool:
    """Return whether the last line of a file lacks its end."""
    if not _size(path):
        return False
    with opened(path, UserError) as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _last_step(metrics: Path, otherwise: int) -> int:
    """Return the step of the last whole line of metrics.jsonl."""
    if not metrics.exists():
        return otherwise
    with opened(metrics, UserError) as file:
        file.seek(max(0, _size(metrics) - _BYTES_WITH_LAST_STEP))
        content = file.read(_BYTES_WITH_LAST_STEP)
    for text in reversed(content.split(b"\n")):
        with contextlib.suppress(UserError, UnicodeDecodeError, KeyError, TypeError):
            step = parse_json(text.decode("utf-8"), "", UserError)["step"]
            if type(step) is int and step >= 0:
                return step
    return otherwise
