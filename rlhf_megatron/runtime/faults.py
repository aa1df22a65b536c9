"""Faults on purpose, for tests of the recovery: RLHF_MEGATRON_FAULT=kill@update:3 ends every rank in step 3's update.

    KIND@PHASE:STEP[-LAST_STEP][:RANK]

KIND is what happens as PHASE begins in these steps (0: before the first), on one rank or on all. Phases are the names
under time/ in the metrics, and engine, resume, step, evaluate, save, write (a checkpoint's files are being written),
publish (it has its name, ``latest`` has not moved) and export. Of several, separated by commas, each attempt of
torchrun has the one in its place, and later ones have none: a restart can succeed.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import psutil
import torch

from rlhf_megatron.errors import UserError

VARIABLE = "RLHF_MEGATRON_FAULT"
KINDS = ("kill", "stop", "exception", "out_of_memory", "nan", "overflow", "disk_full", "clock", "store", "network")
# disk_full: no file of this process grows beyond it. Metrics and logs of a test are smaller, a model's files larger.
LARGEST_FILE_BYTES = 1 << 18
CLOCK_SECONDS = 3600.0
_FORM = re.compile(r"(?P<kind>\w+)@(?P<phase>\w+):(?P<first>\d+)(?:-(?P<last>\d+))?(?::(?P<rank>\d+))?")


@dataclass(frozen=True)
class Fault:
    """One fault of this process."""

    kind: str
    phase: str
    first: int
    last: int

    def is_due(self, phase: str, step: int) -> bool:
        """Return whether it happens as ``phase`` of ``step`` begins."""
        return phase == self.phase and self.first <= step <= self.last


def fault_of(environment: Mapping[str, str]) -> Fault | None:
    """Return the fault that the environment asks of this rank in this attempt; raises UserError where it cannot be
    read."""
    wanted = environment.get(VARIABLE, "").split(",")
    attempt = int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if attempt >= len(wanted) or not wanted[attempt]:
        return None
    match = _FORM.fullmatch(wanted[attempt])
    if match is None or match["kind"] not in KINDS:
        raise UserError(
            f"environment: {VARIABLE}={wanted[attempt]!r} must be KIND@PHASE:STEP[-LAST_STEP][:RANK]; kinds are "
            + ", ".join(KINDS)
        )
    if match["rank"] is not None and match["rank"] != environment.get("RANK", "0"):
        return None
    first = int(match["first"])
    return Fault(match["kind"], match["phase"], first, int(match["last"] or first))


class _Armed:
    """The fault of this process, read when a phase first begins, and what it still changes."""

    def __init__(self) -> None:
        self.fault: Fault | None = None
        self.is_read, self.corrupts_gradients, self.corrupts_weights = False, False, False
        self.undo: Callable[[], None] | None = None


_armed = _Armed()


def at(phase: str, step: int) -> None:
    """Have happen what is to happen as ``phase`` of ``step`` begins. Only for the main thread."""
    if not _armed.is_read:
        _armed.fault, _armed.is_read = fault_of(os.environ), True
    fault = _armed.fault
    _armed.corrupts_gradients = _armed.corrupts_weights = False
    if fault is None:
        return
    if _armed.undo and step > fault.last:
        _armed.undo()
        _armed.undo = None
    if fault.is_due(phase, step):
        words = f"{VARIABLE}: {fault.kind} in {phase} of step {step}"
        print(words, file=sys.stderr, flush=True)
        _happen(fault.kind, words)


def _happen(kind: str, words: str) -> None:
    match kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "exception":
            raise RuntimeError(words)
        case "out_of_memory":
            raise torch.OutOfMemoryError(words)
        case "nan":
            _armed.corrupts_gradients = True
        case "overflow":
            _armed.corrupts_weights = True
        case "disk_full" if _armed.undo is None:
            _armed.undo = _limit_files(LARGEST_FILE_BYTES)
        case "clock":  # what a correction of the system's clock looks like; time.monotonic() goes on
            right_time = time.time
            time.time = lambda: right_time() + CLOCK_SECONDS
        case "store":
            _disconnect(lambda port: port == int(os.environ["MASTER_PORT"]))
        case "network":
            _disconnect(lambda port: port != int(os.environ["MASTER_PORT"]))


def _limit_files(size: int) -> Callable[[], None]:
    """Make writes beyond ``size`` bytes of a file fail, as on a full disk; return what takes that back."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _disconnect(is_meant: Callable[[int], bool]) -> None:
    """End the TCP connections of this process whose other end has such a port."""
    for connection in psutil.Process().net_connections("tcp"):
        if connection.raddr and is_meant(connection.raddr.port):
            with socket.socket(fileno=os.dup(connection.fd)) as end:
                end.shutdown(socket.SHUT_RDWR)


def corrupt_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Make an element of Megatron's gradient buffers nan before the backward pass, where that is due in this phase."""
    if _armed.corrupts_gradients:
        gradient: torch.Tensor = getattr(next(iter(parameters)), "main_grad")  # noqa: B009  (Megatron's own attribute)
        gradient.view(-1)[0] = float("nan")


def corrupt_weights(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Make an element of the weights infinite after the optimizer's step, where that is due in this phase."""
    if _armed.corrupts_weights:
        next(iter(parameters)).data.view(-1)[0] = float("inf")
