"""Worker processes with a time limit per job: an overdue one is killed and replaced, and only its own job is lost.

Plain subprocesses and not multiprocessing: nothing of the rank is imported again (launch/train.py, torch), and no fork
inherits a CUDA context. A thread of this process waits for each worker, so that jobs go on while the rank does other
things. What a job means is in worker.py; what a lost job is worth is in score.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from rlhf_megatron.rewards import worker as protocol
from rlhf_megatron.rewards.threads import DaemonThreads
from rlhf_megatron.rewards.worker import TIMED_OUT, Job

DIED = "died"

# Time for importing a scorer or a user's file, before the clock of the first sample starts.
LOAD_SECONDS = 300.0
# A job whose worker was killed from outside (by the kernel for memory, say) is tried again, this often.
RETRIES_AFTER_DEATH = 1

# The worker looks for modules where this process does, whatever the folder it starts in.
_BOOTSTRAP = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from rlhf_megatron.rewards import worker; worker.main(int(sys.argv[2]))"
)


@dataclass(frozen=True)
class Outcome:
    """What became of one job: state DONE with a score, FAILED or UNUSABLE with a message, TIMED_OUT or DIED.

    Of a job that answers a turn, `message` has the next messages as JSON when it is DONE.

    `awaited` is the answer to a job that only loads: whether several of its kind can be done together.
    """

    state: str
    score: float = 0.0
    message: str = ""
    awaited: bool = False


Entry = tuple[Job, "Future[Outcome]"]


class Worker:
    """One process, used by one thread."""

    def __init__(self, memory_limit_bytes: int) -> None:
        """Start the process; it imports nothing heavy before its first job."""
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOTSTRAP, json.dumps(sys.path), str(memory_limit_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | threads,
            process_group=0,  # a group of its own, so that what a reward function starts is killed with it
            bufsize=0,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._stdin, self._stdout = self.process.stdin, self.process.stdout
        os.set_blocking(self._stdout.fileno(), False)
        self._received = b""

    def run(self, jobs: Sequence[Job]) -> tuple[dict[int, Outcome], Outcome | None]:
        """Do jobs together; return the outcomes by place in `jobs`, and what became of the others if some are missing.

        With missing ones the worker is dead or overdue, and of no more use.
        """
        done: dict[int, Outcome] = {}
        deadline = time.monotonic() + LOAD_SECONDS
        try:
            packed = memoryview(protocol.pack_jobs(jobs))
            while packed:
                packed = packed[self._stdin.write(packed) :]
            while len(done) < len(jobs):
                messages = self._receive(deadline - time.monotonic())
                if messages is None:
                    return done, Outcome(TIMED_OUT)
                for message in messages:
                    if message["state"] == protocol.STARTED:
                        deadline = time.monotonic() + message["seconds"]
                    else:
                        place = message.pop("job")
                        done[place] = Outcome(**message)
        except (OSError, EOFError):
            status = self.process.wait()
            return done, Outcome(DIED, message=f"the worker process ended with status {status}")
        return done, None

    def _receive(self, seconds: float) -> list[dict[str, Any]] | None:
        """Return the next messages, or None if none came in time; raises EOFError at the end of the process."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdout, selectors.EVENT_READ)
            if not selector.select(max(0.0, seconds)):
                return None
        data = self._stdout.read(65536)
        if data == b"":
            raise EOFError
        *lines, self._received = (self._received + (data or b"")).split(b"\n")
        return [json.loads(line) for line in lines]

    def kill(self) -> None:
        """End the process and everything that it started, and wait for its end."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()

    def release(self) -> None:
        """Close the pipes; called by the thread that reads them."""
        self._stdin.close()
        self._stdout.close()


class _Workers:
    """The living workers of a pool, which end together; a forked child of their owner leaves them alone."""

    def __init__(self, memory_limit_bytes: int) -> None:
        self.living: list[Worker] = []
        self._idle: list[Worker] = []
        self._closed = False
        self._memory_limit_bytes = memory_limit_bytes
        self._owner = os.getpid()
        self._lock = threading.Lock()

    def take(self) -> Worker | None:
        """Return an idle or a new worker, or None after `end`."""
        with self._lock:
            if self._closed:
                return None
            if self._idle:
                return self._idle.pop()
            self.living.append(Worker(self._memory_limit_bytes))
            return self.living[-1]

    def give_back(self, worker: Worker) -> None:
        """Keep a worker for the next job."""
        with self._lock:
            self._idle.append(worker)

    def discard(self, worker: Worker) -> None:
        """Kill one, unless that has been done."""
        with self._lock:
            if worker in self.living:
                self.living.remove(worker)
                worker.kill()
            worker.release()

    def end(self) -> None:
        """Kill all of them; no more can be started. The threads of busy ones find out, and release them."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            self._closed = True
            while self.living:
                self.living.pop().kill()
            while self._idle:
                self._idle.pop().release()


class WorkerPool:
    """A fixed number of workers, started when jobs come and killed by `close` or with this process.

    Attributes:
        jobs_at_a_time: how many waiting jobs one worker is given together.
    """

    def __init__(self, workers: int, timeout_seconds: float, memory_limit_bytes: int = 0) -> None:
        """Remember the limits; nothing is started yet.

        Args:
            workers: processes that score at the same time.
            timeout_seconds: of one job, counted from when its scorer has been imported.
            memory_limit_bytes: address space of a worker; 0: no limit.
        """
        self.jobs_at_a_time = 1
        self._timeout_seconds = timeout_seconds
        self._waiting: deque[Entry] = deque()
        self._threads = DaemonThreads(workers, "reward worker")
        self._workers = _Workers(memory_limit_bytes)
        weakref.finalize(self, self._workers.end)

    def submit(self, job: Job) -> Future[Outcome]:
        """Have a job done, which worker.py describes; return at once."""
        future: Future[Outcome] = Future()
        self._waiting.append(({**job, "timeout_seconds": self._timeout_seconds}, future))
        self._threads.submit(self._do_waiting)
        return future

    def process_ids(self) -> list[int]:
        """Return the ids of the processes that are running."""
        return [worker.process.pid for worker in self._workers.living]

    def close(self) -> None:
        """Kill the workers; jobs that are left become failures."""
        self._workers.end()
        self._threads.close()

    def _do_waiting(self) -> None:
        """Do the next waiting jobs, at most `jobs_at_a_time`; none may be left, if another call did more than one."""
        entries: list[Entry] = []
        with contextlib.suppress(IndexError):
            while len(entries) < self.jobs_at_a_time:
                entry = self._waiting.popleft()
                if entry[1].set_running_or_notify_cancel():
                    entries.append(entry)
        try:
            self._do(entries, RETRIES_AFTER_DEATH)
        except BaseException as error:  # raised where the outcome is asked for
            for _, future in entries:
                if not future.done():
                    future.set_exception(error)

    def _do(self, entries: list[Entry], retries: int) -> None:
        """Do jobs together; those that are lost with their worker are done again, each alone."""
        worker = self._workers.take() if entries else None
        if worker is None:
            for _, future in entries:
                future.set_result(Outcome(DIED, message="the scorer was closed"))
            return
        done, fate = worker.run([job for job, _ in entries])
        for place, outcome in done.items():
            entries[place][1].set_result(outcome)
        if fate is None:
            self._workers.give_back(worker)
            return
        self._workers.discard(worker)
        if len(entries) == 1 and (fate.state == TIMED_OUT or not retries):
            entries[0][1].set_result(fate)
            return
        for place, entry in enumerate(entries):
            if place not in done:
                self._do([entry], retries if len(entries) > 1 else retries - 1)
