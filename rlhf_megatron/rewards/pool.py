"""Worker processes with a time limit per job: an overdue one is killed and replaced, and only its own job is lost.

Plain subprocesses and not multiprocessing: nothing of the rank is imported again (launch/train.py, torch), and no fork
inherits a CUDA context. What a job means is in worker.py; what a lost job is worth is in score.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_megatron.rewards import worker as protocol

TIMED_OUT, DIED = "timed_out", "died"

# Time for importing a scorer or a user's file, before the clock of the first sample starts.
LOAD_SECONDS = 300.0
# A worker that was killed from outside (by the kernel for memory, say) is replaced and the job tried again, this often.
RETRIES_AFTER_DEATH = 1

# The worker looks for modules where this process does, whatever the folder it starts in.
_BOOTSTRAP = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from rlhf_megatron.rewards import worker; worker.main(int(sys.argv[2]))"
)


@dataclass(frozen=True)
class Outcome:
    """What became of one job: state DONE with a score, FAILED or UNUSABLE with a message, TIMED_OUT or DIED."""

    state: str
    score: float = 0.0
    message: str = ""


class Worker:
    """One process and the job it is busy with."""

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
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        os.set_blocking(self.stdout.fileno(), False)
        self.job: int | None = None
        self.deadline = 0.0
        self._received = b""

    def send(self, index: int, job: dict[str, Any]) -> None:
        """Give the worker a job.

        Raises:
            OSError: the process is dead.
        """
        self.job = index
        self.deadline = time.monotonic() + LOAD_SECONDS
        packed = memoryview(protocol.pack_job(job))
        while packed:
            packed = packed[self.stdin.write(packed) :]

    def receive(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the messages that have arrived, and whether the process still lives."""
        alive = True
        while True:
            data = self.stdout.read(65536)
            if data is None:
                break
            if data == b"":
                alive = False
                break
            self._received += data
        *lines, self._received = self._received.split(b"\n")
        return [json.loads(line) for line in lines], alive

    def kill(self) -> None:
        """End the process and everything that it started, and wait for its end."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self.stdin.close()
        self.stdout.close()


class WorkerPool:
    """A fixed number of workers, started when the first job comes and killed with the pool or with this process."""

    def __init__(self, workers: int, timeout_seconds: float, memory_limit_bytes: int = 0) -> None:
        """Remember the limits; nothing is started yet.

        Args:
            workers: processes that score at the same time.
            timeout_seconds: of one job, counted from when its scorer has been imported.
            memory_limit_bytes: address space of a worker; 0: no limit.
        """
        self._size = workers
        self._timeout_seconds = timeout_seconds
        self._memory_limit_bytes = memory_limit_bytes
        self._workers: list[Worker] = []
        self._finalizer = weakref.finalize(self, _kill_all, self._workers, os.getpid())

    def run(
        self, jobs: Sequence[dict[str, Any]], on_outcome: Callable[[int, Outcome], None] | None = None
    ) -> list[Outcome]:
        """Do the jobs and return their outcomes in the same order.

        Args:
            jobs: for worker.py: kind, data_source, solution, ground_truth, extra_info, and function or load_only.
            on_outcome: called with each outcome as it comes, in any order; if it raises, the other jobs are given up.
        """
        outcomes: list[Outcome | None] = [None] * len(jobs)
        deaths = [0] * len(jobs)
        waiting = deque(range(len(jobs)))
        try:
            while waiting or any(worker.job is not None for worker in self._workers):
                self._hand_out(waiting, jobs)
                for index, outcome in self._collect():
                    if outcome.state == DIED and deaths[index] < RETRIES_AFTER_DEATH:
                        deaths[index] += 1
                        waiting.appendleft(index)
                        continue
                    outcomes[index] = outcome
                    if on_outcome is not None:
                        on_outcome(index, outcome)
        finally:
            for worker in [worker for worker in self._workers if worker.job is not None]:
                self._discard(worker)
        return [outcome for outcome in outcomes if outcome is not None]

    def process_ids(self) -> list[int]:
        """Return the ids of the processes that are running."""
        return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        """Kill the workers. The pool may be used again and then starts new ones."""
        _kill_all(self._workers, os.getpid())

    def _hand_out(self, waiting: deque[int], jobs: Sequence[dict[str, Any]]) -> None:
        """Give waiting jobs to idle workers, starting as many as are needed and allowed."""
        idle = [worker for worker in self._workers if worker.job is None]
        while waiting and (idle or len(self._workers) < self._size):
            if not idle:
                self._workers.append(Worker(self._memory_limit_bytes))
                idle.append(self._workers[-1])
            worker = idle.pop()
            index = waiting.popleft()
            try:
                worker.send(index, {**jobs[index], "timeout_seconds": self._timeout_seconds})
            except OSError:  # it died while idle: the job was never started, so it does not count against it
                waiting.appendleft(index)
                self._discard(worker)

    def _collect(self) -> list[tuple[int, Outcome]]:
        """Wait until something happens, and return the jobs that ended."""
        busy = [worker for worker in self._workers if worker.job is not None]
        if not busy:
            return []
        with selectors.DefaultSelector() as selector:
            for worker in busy:
                selector.register(worker.stdout, selectors.EVENT_READ, worker)
            remaining = min(worker.deadline for worker in busy) - time.monotonic()
            ready = {id(key.data) for key, _ in selector.select(max(0.0, remaining))}
        ended = []
        for worker in busy:
            index = worker.job
            outcome = self._read(worker) if id(worker) in ready else None
            if outcome is None and worker.deadline <= time.monotonic():
                outcome = Outcome(TIMED_OUT)
                self._discard(worker)
            if outcome is not None and index is not None:
                ended.append((index, outcome))
        return ended

    def _read(self, worker: Worker) -> Outcome | None:
        """Return the outcome of a worker's job if it has ended."""
        messages, alive = worker.receive()
        for message in messages:
            if message["state"] == protocol.STARTED:
                worker.deadline = time.monotonic() + self._timeout_seconds
            else:
                worker.job = None
                return Outcome(message["state"], message.get("score", 0.0), message.get("message", ""))
        if alive:
            return None
        self._discard(worker)
        return Outcome(DIED, message=f"the worker process ended with status {worker.process.returncode}")

    def _discard(self, worker: Worker) -> None:
        self._workers.remove(worker)
        worker.kill()


def _kill_all(workers: list[Worker], owner: int) -> None:
    """Kill the workers of a pool; a forked child of the owner leaves them alone."""
    if os.getpid() != owner:
        return
    while workers:
        workers.pop().kill()
