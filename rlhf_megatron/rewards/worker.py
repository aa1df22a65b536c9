"""The process that scores samples, and that can be killed at any moment. The other end is pool.py.

It imports no torch, and answers on the pipe that was its stdout; what a reward function prints goes to stderr. Jobs
come as pickles from the rank that started it (its own data, no file), several at a time where they can be awaited
together; answers go back as JSON lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import pickle
import resource
import signal
import struct
from collections.abc import Sequence
from typing import Any, BinaryIO

HEADER = struct.Struct(">Q")

USER_FUNCTION, TURN = "user_function", "turn"  # kinds of job; the others are names of rules
# States of an answer.
STARTED, DONE, FAILED, UNUSABLE, TIMED_OUT = "started", "done", "failed", "unusable", "timed_out"
# Jobs that are awaited end here at their limit, before the pool kills the process.
SECONDS_TO_CANCEL = 2.0

Job = dict[str, Any]
Answer = dict[str, Any]


def main(memory_limit_bytes: int) -> None:
    """Answer jobs until the pipe closes, which it does when the rank ends, however it ends.

    Args:
        memory_limit_bytes: address space of this process; 0: no limit.
    """
    answers, asked = os.fdopen(os.dup(1), "wb", buffering=0), os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)  # print() in a reward function must not break the protocol
    # What a function starts, such as code that a model wrote, must not wait for the next job, or read it.
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    # A scheduler's warnings reach every process of a job; the rank saves its state then, and still needs its scorers.
    for warning in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(warning, signal.SIG_IGN)
    # Of `answer`'s timer. Only here: a reward function may come with a handler of its own, for limits of its own.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_limit_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (memory_limit_bytes, memory_limit_bytes))
    with contextlib.suppress(BrokenPipeError):  # of answers alone: the rank is gone, and has told why itself
        while (jobs := read_jobs(asked)) is not None:
            answer(jobs, answers)


def read_jobs(stream: BinaryIO) -> list[Job] | None:
    """Return the next jobs, or None at the end of the stream."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    jobs: list[Job] = pickle.loads(stream.read(HEADER.unpack(header)[0]))
    return jobs


def pack_jobs(jobs: Sequence[Job]) -> bytes:
    """Return jobs of one kind as bytes for `read_jobs`."""
    payload = pickle.dumps(list(jobs))
    return HEADER.pack(len(payload)) + payload


def answer(jobs: list[Job], answers: BinaryIO) -> None:
    """Do jobs: say when their scorer is loaded and the clock may start, then of each its score or what failed."""
    try:
        awaited = load(jobs[0])
    except Exception as error:
        for index in range(len(jobs)):
            send(answers, {"job": index, **refusal(error)})
        return
    seconds = jobs[0]["timeout_seconds"]
    send(answers, {"state": STARTED, "seconds": seconds + SECONDS_TO_CANCEL if awaited else seconds})
    # Should the rank die meanwhile, this ends an endless computation: SIGALRM kills even inside a C call.
    signal.setitimer(signal.ITIMER_REAL, 2.0 * seconds + 5.0)
    if jobs[0].get("load_only"):
        send(answers, {"job": 0, "state": DONE, "awaited": awaited})
    elif awaited:
        event_loop().run_until_complete(answer_together(jobs, answers))
    else:
        for index, job in enumerate(jobs):
            send(answers, {"job": index, **compute(job)})
    signal.setitimer(signal.ITIMER_REAL, 0.0)


async def answer_together(jobs: list[Job], answers: BinaryIO) -> None:
    """Await a user's async function for all jobs at a time, each within its limit."""
    from rlhf_megatron.rewards import user_function

    async def answer_one(index: int, job: Job) -> None:
        try:
            scoring = user_function.call_async(job["function"], *sample_of(job))
            reply: Answer = {"state": DONE, "score": await asyncio.wait_for(scoring, job["timeout_seconds"])}
        except TimeoutError:  # of the limit: a user's own comes as FunctionFailure
            reply = {"state": TIMED_OUT}
        except Exception as error:
            reply = refusal(error)
        send(answers, {"job": index, **reply})

    await asyncio.gather(*(answer_one(index, job) for index, job in enumerate(jobs)))


@functools.cache
def event_loop() -> asyncio.AbstractEventLoop:
    """The one loop of this process, so that a function may keep its connections from call to call."""
    return asyncio.new_event_loop()


def refusal(error: Exception) -> Answer:
    """Return the answer for an error: UNUSABLE where the user must act (a bad function or row), else FAILED."""
    lines = str(error).splitlines()
    state = UNUSABLE if type(error).__name__ in ("FunctionUnusable", "EntryError") else FAILED
    return {"state": state, "message": lines[0] if lines else type(error).__name__}


def load(job: Job) -> bool:
    """Import what scores this kind of job; not at the top, because each takes a second that the others need not pay.

    Returns whether several jobs of this kind can be awaited together.
    """
    if job["kind"] == USER_FUNCTION:
        from rlhf_megatron.rewards import user_function

        return user_function.is_async(user_function.load(job["function"]))
    if job["kind"] == TURN:
        from rlhf_megatron.rewards import user_function

        user_function.load(job["function"], user_function.TURN)
    elif job["kind"] == "math":
        from rlhf_megatron.rewards import math

        math.load()
    elif job["kind"] == "reasoning_gym":
        from rlhf_megatron.rewards import reasoning_gym

        reasoning_gym.load()
    return False


def compute(job: Job) -> Answer:
    """Return the answer to one job that is not awaited."""
    try:
        if job["kind"] == TURN:
            from rlhf_megatron.rewards import user_function

            conversation = (job["messages"], job["ground_truth"], job["extra_info"])
            said = user_function.call_turn(job["function"], *conversation)
            cut = [message | {"content": message["content"][: job["most"]]} for message in said]
            return {"state": DONE, "message": json.dumps(cut)}
        return {"state": DONE, "score": score(job)}
    except Exception as error:
        return refusal(error)


def score(job: Job) -> float:
    """Return the score of one job."""
    if job["kind"] == "math":
        from rlhf_megatron.rewards import math

        return math.verify(job["solution"], job["ground_truth"])
    if job["kind"] == "format":
        from rlhf_megatron.rewards import form

        return form.format_score(job["solution"], job["pattern"])
    if job["kind"] == "reasoning_gym":
        from rlhf_megatron.rewards import reasoning_gym

        return reasoning_gym.score(*sample_of(job))
    from rlhf_megatron.rewards import user_function

    return user_function.call(job["function"], *sample_of(job))


def sample_of(job: Job) -> tuple[str, str, str, dict[str, Any]]:
    """Return data_source, solution, ground_truth and extra_info of a job."""
    return job["data_source"], job["solution"], job["ground_truth"], job["extra_info"]


def send(answers: BinaryIO, message: Answer) -> None:
    """Write one answer as a line of JSON."""
    answers.write(json.dumps(message).encode() + b"\n")
