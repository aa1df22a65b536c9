"""Requests to stop: the signals that a scheduler or a person sends, and the time at which the job ends.

A request is only noted here; checkpoint/manager.py has all ranks act on it together at the end of a step.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Mapping

import psutil

from rlhf_megatron.errors import UserError
from rlhf_megatron.untrusted import shown

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# One warning can arrive twice: from the scheduler, which signals every process, and forwarded by torchrun.
SECONDS_OF_ONE_WARNING = 3.0
# When the job ends, in seconds since 1970; the first that is set counts.
DEADLINES = ("RLHF_MEGATRON_DEADLINE", "SLURM_JOB_END_TIME")
# A stopped rank's exit status: start me again.
REQUEUE_STATUS = 85


class StopSignals:
    """Note of the first SIGTERM or SIGUSR1 of this process; a second one ends it at once, until signals are ignored.

    A thread reads the signals, since Python's own handlers wait for the main thread, which may be in a collective that
    never returns.
    """

    def __init__(self) -> None:
        self._noted: tuple[signal.Signals, float] | None = None
        self._neighbours = 0

    @property
    def noted(self) -> signal.Signals | None:
        """The signal that asks this process to stop."""
        return self._noted[0] if self._noted else None

    def listen(self) -> None:
        """Note signals from now on; call it in the main thread. Child processes keep the signals' usual effect."""
        self._neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))  # vLLM sets this variable for itself later
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            signal.signal(number, lambda *_: None)
        os.register_at_fork(before=_hold_signals, after_in_parent=_release_signals, after_in_child=_unlisten)
        threading.Thread(target=self._watch, args=(reader,), name="signals", daemon=True).start()

    def ignore(self) -> None:
        """Have the signals without effect from now on; call it in the main thread when the run has saved and is to end.

        Python gives its handlers up before a process is gone. A rank that died of a second signal then would look like
        a fault, for which torchrun starts all ranks again.
        """
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _watch(self, reader: int) -> None:
        while True:
            for number in os.read(reader, 64):
                if number in STOP_SIGNALS:
                    self._arrived(signal.Signals(number))

    def _arrived(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self._noted is None and not neighbour_has_ended(self._neighbours):
            self._noted = number, now
        elif self._noted is None or now - self._noted[1] > SECONDS_OF_ONE_WARNING:
            os._exit(128 + number)


def _hold_signals() -> None:
    """Have signals wait until a forked child has its own handlers: its parent's would take them for the parent's
    own."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def _release_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _unlisten() -> None:
    """Let go of the signals in a forked child, which has the pipe of its parent, which must not take the child's
    signals for its own."""
    signal.set_wakeup_fd(-1)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    _release_signals()


def neighbour_has_ended(ranks: int) -> bool:
    """Return whether one of this node's ``ranks`` is gone: torchrun's SIGTERM then means to end, not to save."""
    alive = set()
    for process in psutil.Process(os.getppid()).children():
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                alive.add(process.environ().get("LOCAL_RANK"))
        except psutil.Error:
            continue
    return len(alive - {None}) < ranks


def job_end(environment: Mapping[str, str]) -> float | None:
    """Return the end of the job, in seconds since 1970, or None where nothing says it.

    Raises UserError where RLHF_MEGATRON_DEADLINE or SLURM_JOB_END_TIME is no number.
    """
    name = next((name for name in DEADLINES if environment.get(name)), None)
    if name is None:
        return None
    try:
        end = float(environment[name])
    except ValueError:
        end = math.nan
    if not math.isfinite(end):
        raise UserError(
            f"environment: {name}={shown(repr(environment[name]))} must be seconds since 1970, as of date +%s"
        )
    return end


def wait_unless_stopped(seconds: float) -> None:
    """Wait so long, or until this process is asked to stop."""
    end = time.monotonic() + seconds
    while stop_signals.noted is None and (left := end - time.monotonic()) > 0:
        time.sleep(min(left, 0.2))


def stop_status(environment: Mapping[str, str]) -> int:
    """Return the exit status of a rank that stops to go on later: 85, or 0 where torchrun would start it again for
    that."""
    restarts = int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    return 0 if int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")) < restarts else REQUEUE_STATUS


_forking = threading.local()  # the signal mask of a thread that forks
stop_signals = StopSignals()
