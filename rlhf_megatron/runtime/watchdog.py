"""The watch on progress: what this rank is doing, and the end of a process that has got nowhere for too long.

A rank that waits in a collective for one that is stuck notices by itself, since a thread watches the clock. The first
to notice tells the others through a link in the run's folder, which all nodes share:

    logs/hang-40/rank-0.txt ...      the stacks of all Python threads of each rank that could still write them
    logs/hang-40/rank-0.nccl.json    NCCL's flight recorder, where torch has it
    logs/hang-of-start-3 -> hang-40  the signal to the ranks of the run's third start
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import os
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path

import psutil

from rlhf_megatron.durable import remove
from rlhf_megatron.recipe.slurm import RetrySection
from rlhf_megatron.runtime.rank_monitor import give_signs_of_life
from rlhf_megatron.runtime.ranks import named_ranks
from rlhf_megatron.runtime.recovery import RecoveryLog

# The exit status of a rank that was stuck; torchrun starts a run again for any but 0.
HANG_STATUS = 86
_LONGEST_INTERVAL, _SECONDS_TO_WRITE = 10.0, 5.0


class Watchdog:
    """Watch over the phase and step that this process is in, which ends the process where they last too long."""

    def __init__(self) -> None:
        """Set up; nothing is watched before ``watch``."""
        self.phase, self.step = "start", 0
        self._beaten = time.monotonic()

    def beat(self, phase: str | None = None, step: int | None = None) -> None:
        """Note progress, perhaps in another phase or step."""
        self._beaten = time.monotonic()
        self.phase = phase or self.phase
        self.step = self.step if step is None else step

    def watch(self, run: Path, start: int, rank: int, world: int, retry: RetrySection) -> None:
        """Begin to watch, for ever. ``run`` is the run's folder; ``start`` counts its starts and differs in each."""
        self.beat()
        if retry.hang_seconds:
            watch = _Watch(self, run, start, rank, world, retry)
            threading.Thread(target=watch.go_on, name="watchdog", daemon=True).start()

    def seconds_without_progress(self) -> float:
        """Return the seconds since the last ``beat``."""
        return time.monotonic() - self._beaten


class _Watch:
    """The thread of a watchdog."""

    def __init__(self, dog: Watchdog, run: Path, start: int, rank: int, world: int, retry: RetrySection) -> None:
        self._dog, self._recovery = dog, RecoveryLog(run)
        self._logs, self._link = run / "logs", _link(run, start)
        self._rank, self._world, self._retry = rank, world, retry
        self._interval = min(_LONGEST_INTERVAL, retry.hang_seconds / 10)
        self._patience = 2 * self._interval + _SECONDS_TO_WRITE

    def go_on(self) -> None:
        """Watch until there is a hang, and end the process then."""
        give_signs_of_life(self._interval)
        while not self._link.is_symlink() and self._dog.seconds_without_progress() <= self._limit():
            # Where a call keeps Python's lock this thread stands still too; then faulthandler's own thread ends the
            # process, with the stacks in the rank's log.
            faulthandler.dump_traceback_later(self._limit() + self._patience, exit=True)
            time.sleep(self._interval)
        faulthandler.cancel_dump_traceback_later()
        try:
            self._report()
        finally:
            os._exit(HANG_STATUS)

    def _limit(self) -> float:
        retry = self._retry
        return retry.hang_seconds if self._dog.step else max(retry.hang_seconds, retry.hang_seconds_at_start)

    def _report(self) -> None:
        """Write what this rank was doing; the first rank of all waits for the others' words and notes the decision."""
        is_first, phase = self._announce(), f"{self._dog.phase} of step {self._dog.step}"
        unfinished, finished = (self._link / f"{prefix}rank-{self._rank}.txt" for prefix in (".", ""))
        with unfinished.open("w", encoding="utf-8") as file:
            seconds = self._dog.seconds_without_progress()
            file.write(f"{phase}\nrank {self._rank} of {self._world}: no progress for {seconds:.0f} s\n\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        unfinished.rename(finished)
        recorder = threading.Thread(target=self._write_flight_recorder, daemon=True)  # it may get stuck as well
        recorder.start()
        self._wait_for_others(self._patience * (1 if is_first else 2))
        if is_first:
            self._note()
        recorder.join(_SECONDS_TO_WRITE)
        kill_stopped_neighbours()

    def _announce(self) -> bool:
        """Have all ranks report; return whether this one is the first to say so."""
        for number in itertools.count(1):
            folder = self._logs / (f"hang-{self._dog.step}" + (f"-{number}" if number > 1 else ""))
            with contextlib.suppress(FileExistsError):
                folder.mkdir(parents=True)
                break
        try:
            self._link.symlink_to(folder.name)
        except FileExistsError:
            folder.rmdir()
            return False
        return True

    def _wait_for_others(self, seconds: float) -> None:
        """Wait until all have reported, or ``seconds`` have passed: torchrun ends the others as soon as one ends."""
        deadline = time.monotonic() + seconds
        while len(list(self._link.glob("rank-*.txt"))) < self._world and time.monotonic() < deadline:
            time.sleep(self._interval / 5)

    def _note(self) -> None:
        """Write one line in recovery.jsonl and one on stderr: which ranks were where."""
        by_stage: dict[str, list[int]] = defaultdict(list)
        for rank in range(self._world):
            path = self._link / f"rank-{rank}.txt"
            by_stage[path.read_text(encoding="utf-8").partition("\n")[0] if path.exists() else "silent"].append(rank)
        where = "; ".join(
            f"{named_ranks(ranks)} {'said nothing' if stage == 'silent' else f'in {stage}'}"
            for stage, ranks in by_stage.items()
        )
        folder = self._logs / self._link.readlink()
        why = f"no progress for {self._dog.seconds_without_progress():.0f} s: {where}"
        self._recovery.append("hang", None, why, stacks=str(folder))
        print(f"error: {why}; stacks of all ranks: {folder}", file=sys.stderr, flush=True)

    def _write_flight_recorder(self) -> None:
        from rlhf_megatron.compat.torch import nccl_flight_record

        record = nccl_flight_record()
        if record is not None:
            (self._link / f"rank-{self._rank}.nccl.json").write_bytes(record)


def forget_hang(run: Path, start: int) -> None:
    """Take back the signal of another start that had the same number, as after recovery.jsonl was deleted."""
    remove(_link(run, start))


def _link(run: Path, start: int) -> Path:
    return run / "logs" / f"hang-of-start-{start}"


def kill_stopped_neighbours() -> None:
    """Kill what torchrun has started on this node and somebody has stopped (SIGSTOP).

    It cannot follow torchrun's SIGTERM, for which torchrun would wait half a minute.
    """
    for process in psutil.Process(os.getppid()).children():
        with contextlib.suppress(psutil.Error):
            if process.status() == psutil.STATUS_STOPPED:
                process.kill()


watchdog = Watchdog()
