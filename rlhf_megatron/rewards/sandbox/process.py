"""Starts a confined process for a program, gives it its input, takes its output within limits, and ends it.

The program and its input are in memory files, so that nothing lies on a disk. Not here: what the process takes from
itself (confined_program.py), and what an output is worth (rewards/code.py).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlhf_megatron.child_python import child_command
from rlhf_megatron.rewards.sandbox.confined_program import NOT_CONFINED

# Of a program; sort -n of all lines of a large test is far below.
MOST_OUTPUT_BYTES = 16 * 2**20
# Processes cannot be started; threads share the memory limit, and are counted as often as this.
MOST_THREADS = 64
_SECONDS_BETWEEN_LOOKS = 0.05
_SECONDS_TO_END = 0.002

_BOOTSTRAP = "from rlhf_megatron.rewards.sandbox.confined_program import main; main(json.loads(sys.argv[2]))"
# The same order of sets in each run, one thread of numpy's, and nothing of this process's environment.
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin", "HOME": "/", "LANG": "C.UTF-8", "PYTHONUTF8": "1", "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
}  # fmt: skip
# Beside Python's own folders.
_SYSTEM_FILES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/dev/urandom")


class SandboxError(Exception):
    """The sandbox cannot be set up on this machine; the text is for the user."""


@dataclass(frozen=True)
class Limits:
    """Limits of one run.

    Attributes:
        seconds: of wall time, and of processor time rounded up.
        memory_bytes: of address space, Python included.
        required: steps of confined_program.py without which nothing is run.
    """

    seconds: float
    memory_bytes: int
    required: Sequence[str] = ()


def run(program: str, given: str, limits: Limits, function: str | None = None) -> bytes | None:
    """Return what a confined Python program printed, or None if it raised, was killed, or exceeded a limit.

    Args:
        program: Python source.
        given: its stdin; with ``function`` the arguments as a JSON list.
        limits: of this run.
        function: name of a function of the program, or of its class Solution; what is returned then is its result as
            JSON.

    Raises:
        SandboxError: the process cannot be started, or a required step does not hold.
    """
    with memory_file(program) as text, memory_file(given) as standard_input:
        asked = {
            "parent": os.getpid(),
            "program": text,
            "readable": readable_paths(),
            "required": list(limits.required),
            "seconds": math.ceil(limits.seconds),
            "memory_bytes": limits.memory_bytes,
            "function": function,
        }
        python, *arguments = child_command(_BOOTSTRAP, json.dumps(asked))
        libraries = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        deadline = time.monotonic() + limits.seconds
        try:
            process = subprocess.Popen(
                [python, "-s", "-S", *arguments],
                stdin=standard_input,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=_ENVIRONMENT | libraries,
                cwd="/",
                pass_fds=(text,),
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            raise SandboxError(f"a process for a program cannot be started: {error}") from error
        try:
            output = _read(process, deadline)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
            if process.stdout is not None:
                process.stdout.close()
    if status == NOT_CONFINED:
        raise SandboxError("a process could not be confined as it was at the start")
    return output if status == 0 else None


def readable_paths() -> list[str]:
    """Return the files and folders that a program may read: those of this Python, its packages and the C library."""
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return list(dict.fromkeys([*paths, os.path.join(sys.base_prefix, "lib"), *_SYSTEM_FILES]))


@contextlib.contextmanager
def memory_file(text: str) -> Iterator[int]:
    """Give the descriptor of a file in memory with this text, at its beginning; halves of characters become '?'."""
    descriptor = os.memfd_create("rlhf_megatron")
    try:
        left = memoryview(text.encode("utf-8", "replace"))
        while left:
            left = left[os.write(descriptor, left) :]
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


def _read(process: subprocess.Popen[bytes], deadline: float) -> bytes | None:
    """Return all output of a process that ended by itself; None at the deadline, or where it had too much."""
    assert process.stdout is not None
    poll, output = select.poll(), bytearray()
    poll.register(process.stdout, select.POLLIN)
    while (left := deadline - time.monotonic()) > 0.0:
        if poll.poll(1000.0 * min(left, _SECONDS_BETWEEN_LOOKS)):
            data = process.stdout.read(2**16)
            if not data:
                return bytes(output) if _ended(process.pid, deadline) else None
            output += data
        if len(output) > MOST_OUTPUT_BYTES or _threads(process.pid) > MOST_THREADS:
            return None
    return None


def _ended(process_id: int, deadline: float) -> bool:
    """Wait for the end of a process, which stays a zombie: its group cannot become another's before it is killed."""
    while os.waitid(os.P_PID, process_id, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if time.monotonic() >= deadline:
            return False
        time.sleep(_SECONDS_TO_END)
    return True


def _threads(process_id: int) -> int:
    try:
        return len(os.listdir(f"/proc/{process_id}/task"))
    except OSError:
        return 0
