"""Tries in the sandbox what must not succeed, and so finds out what this machine's kernel and container let it hold."""

from __future__ import annotations

import functools
import json
import os
import socket
import tempfile
from dataclasses import dataclass
from typing import get_args

from rlhf_megatron.recipe.reward import Isolation
from rlhf_megatron.rewards.sandbox.confined_program import STEPS
from rlhf_megatron.rewards.sandbox.process import Limits, SandboxError, run

# What each level of reward.code.isolation asks for, the strongest first.
NEEDS: dict[Isolation, frozenset[str]] = {
    "full": frozenset({"memory", "network", "processes", "files"}),
    "network": frozenset({"memory", "network"}),
    "limits": frozenset({"memory"}),
}
assert tuple(NEEDS) == get_args(Isolation)

_SECONDS, _MEMORY_BYTES = 10.0, 2**29
# Each attempt succeeds where nothing is confined; those that fail are printed.
_ATTEMPTS = """
import os, socket, json
readable, writable, port = READABLE, WRITABLE, PORT

def child():
    if os.fork() == 0:
        os._exit(0)

attempts = {
    "files": [lambda: open(readable), lambda: os.listdir("/"), lambda: os.open(writable, os.O_CREAT | os.O_WRONLY)],
    "network": [lambda: socket.create_connection(("127.0.0.1", port), 1)],
    "processes": [child, lambda: os.kill(os.getppid(), 0)],
    "memory": [lambda: bytearray(MEMORY)],
}
held = []
for name, tries in attempts.items():
    refused = 0
    for attempt in tries:
        try:
            attempt()
        except (OSError, MemoryError):
            refused += 1
    if refused == len(tries):
        held.append(name)
print(json.dumps(held))
"""


@dataclass(frozen=True)
class Held:
    """Guarantees that the sandbox gives on a machine.

    Attributes:
        isolation: the level that is reached; None where a program cannot even be run within limits.
        names: of what was tried and refused.
        steps: of confined_program.py that took effect.
    """

    isolation: Isolation | None
    names: frozenset[str]
    steps: tuple[str, ...]

    def described(self) -> str:
        """Return it in one line."""
        missing = ", ".join(step for step in STEPS if step not in self.steps)
        held = ", ".join(sorted(self.names)) or "nothing"
        return f"isolation {self.isolation or 'none'} ({held}{f'; this machine refuses: {missing}' if missing else ''})"


@functools.cache
def probe() -> Held:
    """Return what holds here, by trying; once in a process, in about half a second."""
    try:
        steps = tuple(step for step in STEPS if _holds(step))
        names = _refused(steps)
    except (SandboxError, OSError, ValueError):
        return Held(None, frozenset(), ())
    reached = (level for level, needs in NEEDS.items() if needs <= names)
    return Held(next(reached, None), names, steps)


def required_steps(least: Isolation) -> tuple[str, ...]:
    """Return the steps that every process must take here.

    Raises:
        SandboxError: this machine holds less than the level that is asked for.
    """
    held = probe()
    levels = list(NEEDS)
    if held.isolation is None or levels.index(held.isolation) > levels.index(least):
        weaker = f"; reward.code.isolation: {held.isolation} allows that" if held.isolation else ""
        raise SandboxError(
            f"programs of the policy would run with {held.described()}, and reward.code.isolation is {least}: use a "
            f"kernel with Landlock and seccomp (Linux 5.13), and a container that does not block them{weaker}"
        )
    return held.steps


def _holds(step: str) -> bool:
    try:
        return run("print(1)", "", Limits(_SECONDS, _MEMORY_BYTES, [step])) is not None
    except SandboxError:
        return False


def _refused(steps: tuple[str, ...]) -> frozenset[str]:
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        readable = os.path.join(folder, "readable")
        with open(readable, "w") as file:
            file.write("readable")
        text = _ATTEMPTS.replace("READABLE", repr(readable)).replace("WRITABLE", repr(os.path.join(folder, "new")))
        text = text.replace("PORT", str(server.getsockname()[1])).replace("MEMORY", str(_MEMORY_BYTES))
        printed = run(text, "", Limits(_SECONDS, _MEMORY_BYTES, steps))
    return frozenset(json.loads(printed) if printed else ())
