"""Faults on purpose, for tests of the recovery: RLHF_MEGATRON_FAULT=kill@update:3 ends every rank in step 3's update.

    KIND@PHASE:STEP[-LAST_STEP][:RANK]

KIND is what happens as PHASE (a name under time/ in the metrics, or engine, step, evaluate, save) begins in these steps
(0: before the first), on one rank or on all. Of several, separated by commas, each attempt of torchrun has the one in
its place, and later ones have none: a restart can succeed.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from rlhf_megatron.recipe.errors import UserError

VARIABLE = "RLHF_MEGATRON_FAULT"
KINDS = ("kill", "stop", "exception", "out_of_memory", "nan")
_FORM = re.compile(r"(?P<kind>\w+)@(?P<phase>\w+):(?P<first>\d+)(?:-(?P<last>\d+))?(?::(?P<rank>\d+))?")


@dataclass(frozen=True)
class Fault:
    """One fault of this process."""

    kind: str
    phase: str
    first: int
    last: int

    def is_due(self, phase: str, step: int) -> bool:
        """Whether it happens as ``phase`` of ``step`` begins."""
        return phase == self.phase and self.first <= step <= self.last


def fault_of(environment: Mapping[str, str]) -> Fault | None:
    """What the environment asks of this rank in this attempt; raises UserError where it cannot be read."""
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
    """The fault of this process, read when a phase first begins, and whether gradients are to be spoilt now."""

    def __init__(self) -> None:
        self.fault: Fault | None = None
        self.is_read, self.spoils_gradients = False, False


_armed = _Armed()


def at(phase: str, step: int) -> None:
    """Has happen what is to happen as ``phase`` of ``step`` begins."""
    if not _armed.is_read:
        _armed.fault, _armed.is_read = fault_of(os.environ), True
    fault = _armed.fault
    is_due = fault is not None and fault.is_due(phase, step)
    _armed.spoils_gradients = False
    if fault is None or not is_due:
        return
    match fault.kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "exception":
            raise RuntimeError(f"{VARIABLE} raises this in {phase} of step {step}")
        case "out_of_memory":
            raise torch.OutOfMemoryError(f"{VARIABLE} raises this in {phase} of step {step}")
        case "nan":
            _armed.spoils_gradients = True


def spoil(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Makes an element of Megatron's gradient buffers nan before the backward pass, where that is due in this phase."""
    if _armed.spoils_gradients:
        gradient: torch.Tensor = getattr(next(iter(parameters)), "main_grad")  # noqa: B009  (Megatron's own attribute)
        gradient.view(-1)[0] = float("nan")
