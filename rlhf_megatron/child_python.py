"""Processes of this Python beside the one that starts them, such as reward workers."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
_SAME_PATH = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "


def child_command(code: str, *arguments: str) -> list[str]:
    """Return the command that runs ``code`` in a child, with ``arguments`` from ``sys.argv[2]`` on.

    The child looks for modules where this process does, whatever the folder that it starts in; for this package also
    where an editable install has it, which a child without ``site`` would not find.
    """
    folders = list(dict.fromkeys([*sys.path, str(Path(__file__).resolve().parents[1])]))
    return [sys.executable, "-P", "-c", _SAME_PATH + code, json.dumps(folders), *arguments]


def end_with_parent() -> None:
    """Have the system kill this process when the one that started it ends, however that ends (Linux).

    Ranks that outlive a killed torchrun would train on, and write into a run that is started again meanwhile.
    """
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before the system knew
        os.kill(os.getpid(), signal.SIGKILL)
