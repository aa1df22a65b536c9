"""The process that scores samples, and that can be killed at any moment. The other end is pool.py.

It imports no torch, and answers on the pipe that was its stdout; what a reward function prints goes to stderr. Jobs
come as pickles from the rank that started it (its own data, no file), several at a time where they can be awaited
together; answers go back as JSON lines, each with the nonce of its job (answers.py).

What answers must be out of the function's way: a child that it forks must not answer in its place, a file that it opens
must not get the answers, and a module that it changes must not change them. Where that fails, the process ends.
"""

from __future__ import annotations

import asyncio
import base64
import builtins
import contextlib
import fcntl
import functools
import json
import os
import pickle
import resource
import signal
import struct
import sys
import threading
from collections.abc import Sequence
from typing import Any, BinaryIO, NoReturn

from rlhf_megatron.rewards import user_agent, user_environment, user_function, user_tools

HEADER = struct.Struct(">Q")

# Kinds of job; the others, as CODE is, are names of rules.
USER_FUNCTION, TURN, ENVIRONMENT, AGENT, TOOLS = "user_function", "turn", "environment", "agent", "tools"
CODE = "code"
# States of an answer.
STARTED, DONE, FAILED, UNUSABLE, TIMED_OUT = "started", "done", "failed", "unusable", "timed_out"
# Jobs that are awaited, and those of an environment, end here at their limit, before the pool kills the process.
SECONDS_TO_CANCEL = 2.0
# An environment that is open as its rank ends has so long for its close.
SECONDS_TO_CLOSE = 5.0

# Of the pipes to the rank: beyond what a function closes, counts up or gets for its own files.
LOWEST_DESCRIPTOR = 200
# As they are before a function runs, which may put others in their places.
_exit, _fstat, _process_id, _write = os._exit, os.fstat, os.getpid, os.write
_to_json = json.JSONEncoder(allow_nan=False).encode
_unpickle = pickle.loads

Job = dict[str, Any]
Answer = dict[str, Any]


class Pipe:
    """One end of a pipe to the rank, for the process that opened it alone."""

    def __init__(self, descriptor: int) -> None:
        """Take the pipe away from a standard descriptor; programs that are started do not get it."""
        try:
            self.descriptor = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, LOWEST_DESCRIPTOR)
        except OSError:  # so many may not be open
            self.descriptor = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
        self._owner, self._identity = _process_id(), self._file()

    def _file(self) -> tuple[int, int]:
        status = _fstat(self.descriptor)
        return status.st_dev, status.st_ino

    def check(self) -> None:
        """End this process if it is a child of the owner, or if a function has put another file in the pipe's place."""
        if _process_id() != self._owner:
            _exit(0)
        if self._file() != self._identity:
            raise OSError("a function has replaced the pipe to the rank")

    def send(self, message: Answer) -> None:
        """Write one answer as a line of JSON."""
        self.check()
        line = memoryview(_to_json(message).encode() + b"\n")
        while line:
            line = line[_write(self.descriptor, line) :]


class Surroundings:
    """Names of Python and of what answers, and the loaded modules, which one call may take from those after it."""

    def __init__(self) -> None:
        """Remember them as they are when a function has been loaded."""
        owners = (builtins, user_function, user_environment, user_agent, user_tools, sys.modules[__name__])
        self._names = [(vars(owner).update, dict(vars(owner))) for owner in owners]
        self._modules = dict(sys.modules)

    def restore(self) -> None:
        """Put back what was taken away or replaced; what was added stays."""
        for update, names in self._names:
            update(names)
        for name in self._modules.keys() - sys.modules.keys():
            sys.modules[name] = self._modules[name]


@functools.cache
def surroundings() -> Surroundings:
    """Return those of this process."""
    return Surroundings()


def main(address_space_bytes: int) -> NoReturn:
    """Answer jobs until the pipe closes, which it does when the rank ends, however it ends.

    Args:
        address_space_bytes: most of this process; 0: no limit.
    """
    answers, asked = Pipe(1), Pipe(0)
    os.dup2(2, 1)  # print() in a reward function must not break the protocol
    # What a function starts, such as code that a model wrote, must not wait for the next job, or read it.
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # Errors that reach nobody, of threads and of __del__: a line instead of a traceback.
    threading.excepthook = sys.unraisablehook = report_lost
    # A scheduler's warnings reach every process of a job; the rank saves its state then, and still needs its scorers.
    for warning in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(warning, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if address_space_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (address_space_bytes, address_space_bytes))
    status = 1
    try:
        stream = os.fdopen(asked.descriptor, "rb", closefd=False)
        while (jobs := read_jobs(stream)) is not None:
            answer(jobs, answers)
            asked.check()
        user_environment.close_left(SECONDS_TO_CLOSE)
        status = 0
    except BrokenPipeError:  # of answers alone: the rank is gone, and has told why itself
        status = 0
    except BaseException as error:
        with contextlib.suppress(BaseException):
            answers.check()
            report(error)
    finally:  # without what a function has registered for the end
        _exit(status)


def report(error: BaseException | None) -> None:
    """Write one line about an error to the rank's log."""
    if error is not None and not isinstance(error, SystemExit):
        _write(2, f"reward worker {_process_id()}: {user_function.describe(error)}\n".encode())


def report_lost(lost: Any) -> None:
    """Take the place of ``threading.excepthook`` and ``sys.unraisablehook``."""
    report(lost.exc_value)


def read_jobs(stream: BinaryIO) -> list[Job] | None:
    """Return the next jobs, or None at the end of the stream."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    jobs: list[Job] = _unpickle(stream.read(HEADER.unpack(header)[0]))
    return jobs


def pack_jobs(jobs: Sequence[Job]) -> bytes:
    """Return jobs of one kind, each with its nonce, as bytes for ``read_jobs``."""
    payload = pickle.dumps(list(jobs))
    return HEADER.pack(len(payload)) + payload


def answer(jobs: list[Job], answers: Pipe) -> None:
    """Do jobs: say when their scorer is loaded and the clock may start, then of each its score or what failed."""
    try:
        awaited = load(jobs[0])
    except BaseException as error:
        for job in jobs:
            answers.send({"nonce": job["nonce"], **refusal(error)})
        return
    before = surroundings()
    answers.send({"nonce": jobs[0]["nonce"], "state": STARTED, "awaited": awaited})
    if jobs[0].get("load_only"):
        answers.send({"nonce": jobs[0]["nonce"], "state": DONE, "awaited": awaited})
    elif awaited:
        event_loop().run_until_complete(answer_together(jobs, answers))
        before.restore()
    else:
        for job in jobs:
            reply = compute(job)
            before.restore()
            answers.send({"nonce": job["nonce"], **reply})


async def answer_together(jobs: list[Job], answers: Pipe) -> None:
    """Await a user's async function for all jobs at a time, each within its limit.

    Raises:
        RuntimeError: a job was cancelled by another. The pool has it done again, alone.
    """
    cancelled = []

    async def answer_one(job: Job) -> None:
        task = asyncio.ensure_future(user_function.call_async(job["function"], *sample_of(job)))
        await asyncio.wait({task}, timeout=job["timeout_seconds"])
        if not task.done():
            task.cancel()
            await asyncio.wait({task})  # for ever, if it will not be cancelled: then the pool ends this process
            reply: Answer = {"state": TIMED_OUT}
        elif task.cancelled():
            cancelled.append(job)
            reply = refusal(user_function.FunctionFailure(f"{job['function']}: its call was cancelled"))
            if len(jobs) > 1:
                return
        else:
            error = task.exception()
            reply = {"state": DONE, "score": task.result()} if error is None else refusal(error)
        answers.send({"nonce": job["nonce"], **reply})

    await asyncio.gather(*map(answer_one, jobs))
    if cancelled and len(jobs) > 1:
        raise RuntimeError(f"{len(cancelled)} of {len(jobs)} calls that were awaited together were cancelled")


@functools.cache
def event_loop() -> asyncio.AbstractEventLoop:
    """Return the one loop of this process, so that a function may keep its connections from call to call."""
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda _, context: report(context.get("exception")))
    return loop


def refusal(error: BaseException) -> Answer:
    """Return the answer for an error: UNUSABLE where the user must act (a bad function or row), else FAILED."""
    state = UNUSABLE if type(error).__name__ in ("FunctionUnusable", "EntryError", "SandboxError") else FAILED
    return {"state": state, "message": user_function.text_of(error) or type(error).__name__}


def load(job: Job) -> bool:
    """Import what scores this kind of job; not at the top, because each takes a second that the others need not pay.

    Returns whether several jobs of this kind can be awaited together.
    """
    if job["kind"] == USER_FUNCTION:
        return user_function.is_async(user_function.load(job["function"]))
    if job["kind"] == TURN:
        user_function.load(job["function"], _interface(job))
    elif job["kind"] == ENVIRONMENT:
        user_environment.load(job["environment"])
    elif job["kind"] == AGENT:
        user_function.load(job["function"], user_agent.INTERFACE)
    elif job["kind"] == TOOLS:
        user_tools.load(job)
    elif job["kind"] == "math":
        from rlhf_megatron.rewards import math

        math.load()
    elif job["kind"] == "reasoning_gym":
        from rlhf_megatron.rewards import reasoning_gym

        reasoning_gym.load()
    elif job["kind"] == CODE:
        from rlhf_megatron.rewards import code

        code.load(job["code"])
    return False


def compute(job: Job) -> Answer:
    """Return the answer to one job that is not awaited."""
    try:
        if job["kind"] == TURN:
            conversation = (job["messages"], job["ground_truth"], job["extra_info"])
            said = user_function.call_turn(job["function"], *conversation, interface=_interface(job))
            return reply_of(user_environment.Reply(said, done=not said), job["most"])
        if job["kind"] == ENVIRONMENT:
            return reply_of(user_environment.call(job), job["most"])
        if job["kind"] == AGENT:
            return reply_of(user_agent.call(job), 0)
        if job["kind"] == TOOLS:
            return reply_of(user_tools.call(job), job["most"])
        return {"state": DONE, "score": score(job)}
    except user_environment.TimedOut:
        return {"state": TIMED_OUT}
    except BaseException as error:
        return refusal(error)


def _interface(job: Job) -> user_function.Interface:
    return user_function.CONTEXT if job.get("context") else user_function.TURN


def reply_of(reply: user_environment.Reply, most: int) -> Answer:
    """Return the answer for a turn, with at most so many characters of each message."""
    cut = [message | {"content": message["content"][:most]} for message in reply.messages]
    saved = {} if reply.state is None else {"saved": base64.b64encode(bytes(reply.state)).decode()}
    return {"state": DONE, "messages": cut, "reward": reply.reward, "done": reply.done, **saved}


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
    if job["kind"] == CODE:
        from rlhf_megatron.rewards import code

        return code.score(job["solution"], job["ground_truth"], job["code"], job["timeout_seconds"])
    return user_function.call(job["function"], *sample_of(job))


def sample_of(job: Job) -> tuple[str, str, str, dict[str, Any]]:
    """Return data_source, solution, ground_truth and extra_info of a job."""
    return job["data_source"], job["solution"], job["ground_truth"], job["extra_info"]
