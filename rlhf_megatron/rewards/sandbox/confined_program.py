"""The confined process: it takes rights from itself, then runs a model's program; started by process.py.

Nothing here is worth forging: what a right answer would be is not known in this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import sys
import types
from collections.abc import Callable
from typing import Any

from rlhf_megatron.rewards.confinement import leave_network
from rlhf_megatron.rewards.process_tree import die_with_parent
from rlhf_megatron.rewards.sandbox.landlock import restrict_files
from rlhf_megatron.rewards.sandbox.system_calls import drop_capabilities, no_new_privileges, refuse_system_calls

# Exit status where a step that must hold does not: nothing was run.
NOT_CONFINED = 97
MOST_OPEN_FILES = 64
# verl's prime_code puts these before a program: names that it may use without an import, and a deep recursion.
_STARRED = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools",
    "functools", "operator", "io", "sys", "json", "builtins", "typing",
)  # fmt: skip
_BARE = tuple(name for name in _STARRED if name not in ("heapq", "bisect", "builtins", "typing"))
_RECURSION_LIMIT = 6 * 10**5


def main(asked: dict[str, Any]) -> None:
    """Confine this process, run a program in it, and end with its end: status 0 unless it raised.

    Args:
        asked: of process.py: ``parent``, process id; ``program``, descriptor of a file with its text; ``readable``,
            paths; ``required``, names of steps; ``seconds`` of processor time; ``memory_bytes``; ``function``, the name
            of what is called with the arguments that stdin holds as JSON, its result being written as JSON, or None.
    """
    die_with_parent(asked["parent"])
    with open(asked["program"], encoding="utf-8") as file:
        text = file.read()
    failed = confine(asked["readable"], asked["seconds"], asked["memory_bytes"])
    if failed & {"limits", *asked["required"]}:
        os._exit(NOT_CONFINED)
    if asked["function"] is None:
        _run(text)
    else:
        _call(text, asked["function"])


def confine(readable: list[str], seconds: int, memory_bytes: int) -> set[str]:
    """Take from this process what a program does not need; return the names of the steps that the machine refused."""
    # Loaded by ctypes or by threads on first use, when nothing can be opened any more.
    ctypes.CDLL(None)
    steps: dict[str, Callable[[], None]] = {
        "limits": lambda: _limit(seconds, memory_bytes),
        "network namespace": leave_network,
        "capabilities": drop_capabilities,
        "no new privileges": no_new_privileges,
        "Landlock": lambda: restrict_files(readable),
        "seccomp": refuse_system_calls,
    }
    failed = set()
    for name, step in steps.items():
        try:
            step()
        except (OSError, ValueError, AttributeError):  # of setrlimit, and of a C library without capset
            failed.add(name)
    return failed


# The steps of ``confine`` that a machine may lack; without limits nothing is run.
STEPS = ("network namespace", "capabilities", "no new privileges", "Landlock", "seccomp")


def _limit(seconds: int, memory_bytes: int) -> None:
    limits = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: MOST_OPEN_FILES,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, limit))


def _run(text: str) -> types.ModuleType:
    """Run a program as __main__, and return its module; sys.exit() with any status is a good end, as in prime_code."""
    sys.setrecursionlimit(_RECURSION_LIMIT)
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    prelude = [f"from {name} import *" for name in _STARRED] + [f"import {name}" for name in _BARE]
    exec("\n".join(prelude), module.__dict__)
    with contextlib.suppress(SystemExit):
        exec(compile(text, "program.py", "exec"), module.__dict__)
    return module


def _call(text: str, name: str) -> None:
    """Call a program's function, of its class Solution if it has one, and write the result; its prints are dropped."""
    arguments = json.load(sys.stdin)
    results = os.dup(1)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    module = _run(text)
    owner = module.Solution() if hasattr(module, "Solution") else module
    with open(results, "w", encoding="utf-8") as file:
        json.dump(getattr(owner, name)(*arguments), file)
