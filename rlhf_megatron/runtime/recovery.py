"""recovery.jsonl: one line for each start, resume, fault and end of a run, and whether another try makes sense.

Files only; rank 0 writes, except for a fault, which the first rank that sees it writes.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import psutil

from rlhf_megatron.recipe.errors import UserError

What = Literal["start", "restart", "resume", "fault", "hang", "stop", "give_up", "health_stop", "done"]
_BEGINNINGS, _ENDINGS, _FAULTS = ("start", "restart"), ("stop", "done"), ("fault", "hang")
_REQUEUE = "requeue"


class RepeatedFault(UserError):
    """A run that fails again and again at the same place."""


def launch_of(environment: Mapping[str, str]) -> str:
    """What all starts of a run have in common that follow from one command: Slurm's job, or one call of torchrun.

    torchrun's count of restarts will not do: an agent does not count those that came of another node's fault.
    """
    if "SLURM_JOB_ID" in environment:
        return f"job {environment['SLURM_JOB_ID']}"
    given = environment.get("TORCHELASTIC_RUN_ID", "none")
    return f"torchrun {os.getppid() if given == 'none' else given}"


def _torchrun() -> str:
    """The process that has started this rank, unlike any other; a launch has another one after each requeue."""
    parent = psutil.Process(os.getppid())
    return f"{socket.gethostname()} {parent.pid} {parent.create_time()}"


class RecoveryLog:
    """The decisions of one run, over all of its jobs."""

    def __init__(self, run: Path) -> None:
        """``run`` is the run's folder."""
        self.path = run / "recovery.jsonl"
        self._metrics, self._requeue = run / "metrics.jsonl", run / _REQUEUE
        self._launch = launch_of(os.environ)

    def lines(self) -> list[dict[str, Any]]:
        """What has been written so far; a line that a crash has cut is left out."""
        if not self.path.exists():
            return []
        return [line for text in self.path.read_text(encoding="utf-8").splitlines() if (line := _object(text))]

    def of_this_launch(self) -> list[dict[str, Any]]:
        """The lines since a person has started the run."""
        return self._of_this_launch(self.lines())

    def stop(self, step: int, why: str) -> None:
        """Notes that all ranks have saved after ``step`` and end."""
        self.append("stop", step, why, torchrun=_torchrun())

    def has_stopped(self) -> bool:
        """Whether the run has stopped under the torchrun that has now started it again: to that, a rank that dies as it
        ends is a fault."""
        torchrun = _torchrun()
        return any(line["what"] == "stop" and line.get("torchrun") == torchrun for line in self.lines())

    def starts(self) -> int:
        """How often the run has been started, by whomever."""
        return sum(line["what"] in _BEGINNINGS for line in self.lines())

    def append(self, what: What, step: int | None, why: str, **more: Any) -> None:
        """Adds a line: ``step`` is the last one that was done, None where the writer does not know."""
        attempt = sum(line["what"] in _BEGINNINGS for line in self._of_this_launch(self.lines()))
        attempt = max(0, attempt - (what not in _BEGINNINGS))  # the one that is going on
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        record = {"time": now, "launch": self._launch, "attempt": attempt, "step": step, "what": what, "why": why}
        record |= more
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def begin(self, max_repeats: int, reduced: Mapping[str, float] | None = None) -> str | None:
        """Notes that an attempt begins; why it should not, where it would be the same fault again.

        Call it on one rank, before the metrics of earlier attempts are moved. A fault repeats if the run has ended
        ``max_repeats`` times in a row after the same step and has been started again each time by torchrun or Slurm,
        all with the same budgets: ``reduced`` are those that are smaller from now on, if any.
        What a health rule has stopped, only a person starts again.
        """
        self._requeue.unlink(missing_ok=True)
        lines = self.lines()
        step, fault = self._end_of_last(lines)
        automatic = bool(self._of_this_launch(lines))
        if automatic and lines[-1]["what"] == "health_stop":
            return f"{self.path}: {lines[-1]['why']}"
        if fault and automatic and not reduced:
            repeats = 1 + _restarts_after(step, lines)
            if repeats >= max_repeats:
                self.append("give_up", step, f"{repeats} attempts in a row ended after step {step}; the last: {fault}")
                return (
                    f"{self.path}: {repeats} attempts in a row ended after step {step} ({fault}); "
                    "mend the cause and start the run again, or raise retry.max_repeats"
                )
        what: What = "restart" if automatic else "start"
        why = fault or (f"the attempt before had ended with: {lines[-1]['what']}" if lines else "the first attempt")
        changes = {"reduced": dict(reduced)} if reduced else {}
        self.append(what, step, why, metrics_bytes=_size(self._metrics), **changes)
        return None

    def ask_for_requeue(self, step: int, why: str) -> None:
        """Leaves the file ``requeue`` in the run's folder, which tells a job script to start the run again."""
        self._requeue.write_text(json.dumps({"step": step, "why": why}) + "\n", encoding="utf-8")

    def _of_this_launch(self, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [line for line in lines if line["launch"] == self._launch]

    def _end_of_last(self, lines: list[dict[str, Any]]) -> tuple[int, str | None]:
        """(the last step of the attempt before, what ended it where that was a fault)."""
        begun = max((index for index, line in enumerate(lines) if line["what"] in _BEGINNINGS), default=None)
        if begun is None:
            return 0, None
        beginning, since = lines[begun], lines[begun + 1 :]
        step = max((line["step"] for line in since if line["what"] == "resume"), default=beginning["step"])
        # A file that has changed since then is of this attempt, at least at its end.
        if _size(self._metrics) != beginning["metrics_bytes"]:
            step = _last_step(self._metrics, step)
        ending = next((line for line in since if line["what"] in _ENDINGS), None)
        if ending is not None:
            return ending["step"], None
        said = [line["why"] for line in since if line["what"] in _FAULTS]
        return step, said[-1] if said else "it said nothing: killed, or its machine failed"


def _restarts_after(step: int, lines: list[dict[str, Any]]) -> int:
    """How many restarts at the end of ``lines`` followed a fault after the same step, with nothing changed."""
    count = 0
    for line in reversed(lines):
        if line["what"] == "restart" and line["step"] == step and "reduced" not in line:
            count += 1
        elif line["what"] in (*_BEGINNINGS, *_ENDINGS):
            break
    return count


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) and "what" in value else None


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _last_step(metrics: Path, otherwise: int) -> int:
    """The step of the last whole line of metrics.jsonl."""
    for text in reversed(metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []):
        try:
            return int(json.loads(text)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return otherwise
