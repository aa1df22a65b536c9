"""The process that scores samples one by one, and that can be killed at any moment. The other end is pool.py.

It imports no torch, and answers on the pipe that was its stdout; what a reward function prints goes to stderr. Jobs
come as pickles from the rank that started it (its own data, no file); answers go back as JSON lines.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import struct
import sys
from typing import Any, BinaryIO

HEADER = struct.Struct(">Q")

# Job kinds, and the states of an answer.
MATH, REASONING_GYM, USER_FUNCTION = "math", "reasoning_gym", "user_function"
STARTED, DONE, FAILED, UNUSABLE = "started", "done", "failed", "unusable"


def main(memory_limit_bytes: int) -> None:
    """Answer jobs until the pipe closes, which it does when the rank ends, however it ends.

    Args:
        memory_limit_bytes: address space of this process; 0: no limit.
    """
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # print() in a reward function must not break the protocol
    # A scheduler's warnings reach every process of a job; the rank saves its state then, and still needs its scorers.
    for warning in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(warning, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_limit_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (memory_limit_bytes, memory_limit_bytes))
    while (job := read_job(sys.stdin.buffer)) is not None:
        answer(job, answers)


def read_job(stream: BinaryIO) -> dict[str, Any] | None:
    """Return the next job, or None at the end of the stream."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    job: dict[str, Any] = pickle.loads(stream.read(HEADER.unpack(header)[0]))
    return job


def pack_job(job: dict[str, Any]) -> bytes:
    """Return a job as bytes for `read_job`."""
    payload = pickle.dumps(job)
    return HEADER.pack(len(payload)) + payload


def answer(job: dict[str, Any], answers: BinaryIO) -> None:
    """Do one job: say when its scorer is loaded and the clock may start, then give the score or say what failed."""
    try:
        load(job)
        send(answers, {"state": STARTED})
        # Should the rank die meanwhile, this ends an endless computation: SIGALRM kills even inside a C call.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, 2.0 * job["timeout_seconds"] + 5.0)
        value = 0.0 if job.get("load_only") else compute(job)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        send(answers, {"state": DONE, "score": value})
    except Exception as error:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        lines = str(error).splitlines()
        message = lines[0] if lines else type(error).__name__
        send(answers, {"state": UNUSABLE if is_users(error) else FAILED, "message": message})


def is_users(error: Exception) -> bool:
    """Return whether the user must act (a bad function or row); else the sample's own text is to blame."""
    return type(error).__name__ in ("FunctionFailure", "EntryError")


def load(job: dict[str, Any]) -> None:
    """Import what scores this kind of job; not at the top, because each takes a second that the others need not pay."""
    if job["kind"] == MATH:
        from rlhf_megatron.rewards import math

        math.load()
    elif job["kind"] == REASONING_GYM:
        from rlhf_megatron.rewards import reasoning_gym

        reasoning_gym.load()
    else:
        from rlhf_megatron.rewards import user_function

        user_function.load(job["function"])


def compute(job: dict[str, Any]) -> float:
    """Return the score of one job."""
    if job["kind"] == MATH:
        from rlhf_megatron.rewards import math

        return math.verify(job["solution"], job["ground_truth"])
    sample = (job["data_source"], job["solution"], job["ground_truth"], job["extra_info"])
    if job["kind"] == REASONING_GYM:
        from rlhf_megatron.rewards import reasoning_gym

        return reasoning_gym.score(*sample)
    from rlhf_megatron.rewards import user_function

    return user_function.call(job["function"], *sample)


def send(answers: BinaryIO, message: dict[str, Any]) -> None:
    """Write one answer as a line of JSON."""
    answers.write(json.dumps(message).encode() + b"\n")
