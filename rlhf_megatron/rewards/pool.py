"""Worker processes with a time limit per job: an overdue one is killed and replaced, and only its own job is lost.

A thread of this process waits for each worker, so that jobs go on while the rank does other things. What a lost job is
worth is in score.py.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import deque
from concurrent.futures import Future

from rlhf_megatron.rewards import supervisor
from rlhf_megatron.rewards.answers import Outcome
from rlhf_megatron.rewards.threads import DaemonThreads
from rlhf_megatron.rewards.worker import TIMED_OUT, Job
from rlhf_megatron.rewards.worker_process import DIED, Worker

# A job whose worker was killed from outside (by the kernel for memory, say) is tried again, this often.
RETRIES_AFTER_DEATH = 1

Entry = tuple[Job, "Future[Outcome]"]


def bytes_of(gigabytes: float) -> int:
    """Return a recipe's memory limit, in GB of 2^30 bytes, as bytes."""
    return max(1, int(min(gigabytes, 2.0**30) * 2**30))


class _Workers:
    """The living workers of a pool, which end together; a forked child of their owner leaves them alone."""

    def __init__(self, address_space_bytes: int, memory_bytes: int, network: bool) -> None:
        self.living: list[Worker] = []
        self._idle: list[Worker] = []
        self._closed = False
        self._limits = address_space_bytes, memory_bytes, network, supervisor.output_budget()
        self._owner = os.getpid()
        self._lock = threading.Lock()

    def take(self) -> Worker | None:
        """Return an idle or a new worker, or None after ``end``."""
        with self._lock:
            if self._closed:
                return None
            while self._idle:
                worker = self._idle.pop()
                if worker.is_quiet():
                    return worker
                self._end(worker)
                worker.release()
            self.living.append(Worker(*self._limits))
            return self.living[-1]

    def give_back(self, worker: Worker) -> None:
        """Keep a worker for the next job."""
        with self._lock:
            self._idle.append(worker)

    def discard(self, worker: Worker) -> None:
        """Kill one, unless that has been done."""
        with self._lock:
            self._end(worker)
            worker.release()

    def _end(self, worker: Worker) -> None:
        if worker in self.living:
            self.living.remove(worker)
            worker.kill()

    def end(self) -> None:
        """Kill all of them; no more can be started. The threads of busy ones find out, and release them."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            if not self._closed:
                os.close(self._limits[-1])
            self._closed = True
            while self.living:
                self.living.pop().kill()
            while self._idle:
                self._idle.pop().release()


class Session:
    """Jobs in one worker, which keeps a state between them, one after another; what ends the worker ends it."""

    def __init__(self, workers: _Workers, timeout_seconds: float) -> None:
        """Take no worker before the first job."""
        self._workers, self._timeout_seconds = workers, timeout_seconds
        self._thread = DaemonThreads(1, "session")
        self._worker: Worker | None = None
        self._fate: Outcome | None = None

    def submit(self, job: Job) -> Future[Outcome]:
        """Have a job done; return at once."""
        future: Future[Outcome] = Future()
        self._thread.submit(self._settle, {**job, "timeout_seconds": self._timeout_seconds}, future)
        return future

    @property
    def has_ended(self) -> bool:
        """True if its worker was killed or died, and every further job has the same outcome."""
        return self._fate is not None

    def end(self, job: Job) -> Future[None]:
        """Do a last job, unless the worker has ended, and give the worker back; return at once."""
        future: Future[None] = Future()
        self._thread.submit(self._finish, {**job, "timeout_seconds": self._timeout_seconds}, future)
        self._thread.close()
        return future

    def _settle(self, job: Job, future: Future[Outcome]) -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(self._do(job))
            except BaseException as error:  # raised where the outcome is asked for
                future.set_exception(error)

    def _do(self, job: Job) -> Outcome:
        if self._fate:
            return self._fate
        self._worker = self._worker or self._workers.take()
        if self._worker is None:
            return Outcome(DIED, message="the pool was closed")
        done, self._fate = self._worker.run([job])
        if self._fate:
            self._workers.discard(self._worker)
            self._worker = None
        return done[0] if 0 in done else self._fate or Outcome(DIED)

    def _finish(self, job: Job, future: Future[None]) -> None:
        try:
            if self._worker is not None:
                self._do(job)
            if self._worker is not None:
                self._workers.give_back(self._worker)
        finally:
            future.set_result(None)


class WorkerPool:
    """A fixed number of workers, started when jobs come and killed by ``close`` or with this process.

    Attributes:
        jobs_at_a_time: how many waiting jobs one worker is given together.
    """

    def __init__(
        self,
        workers: int,
        timeout_seconds: float,
        address_space_bytes: int = 0,
        memory_bytes: int = 0,
        network: bool = True,
    ) -> None:
        """Remember the limits; nothing is started yet.

        Args:
            workers: processes that score at the same time.
            timeout_seconds: of one job, counted from when its scorer has been imported.
            address_space_bytes: most of a worker; 0: no limit.
            memory_bytes: most that a worker and what it starts may use together; 0: no limit.
            network: whether they have one.
        """
        self.jobs_at_a_time = 1
        self._timeout_seconds = timeout_seconds
        self._waiting: deque[Entry] = deque()
        self._threads = DaemonThreads(workers, "reward worker")
        self._workers = _Workers(address_space_bytes, memory_bytes, network)
        weakref.finalize(self, self._workers.end)

    def submit(self, job: Job) -> Future[Outcome]:
        """Have a job done, which worker.py describes; return at once."""
        future: Future[Outcome] = Future()
        self._waiting.append(({**job, "timeout_seconds": self._timeout_seconds}, future))
        self._threads.submit(self._do_waiting)
        return future

    def session(self) -> Session:
        """Return a worker of one trajectory's own, beyond the fixed number; nothing is started yet."""
        return Session(self._workers, self._timeout_seconds)

    def process_ids(self) -> list[int]:
        """Return the ids of the processes that are running."""
        return [worker.process_id for worker in self._workers.living if worker.process_id is not None]

    def close(self) -> None:
        """Kill the workers; jobs that are left become failures."""
        self._workers.end()
        self._threads.close()

    def _do_waiting(self) -> None:
        """Do the next waiting jobs, at most ``jobs_at_a_time``; none may be left, if another call did more than one."""
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
        for index, outcome in done.items():
            entries[index][1].set_result(outcome)
        if fate is None:
            self._workers.give_back(worker)
            return
        self._workers.discard(worker)
        lost = [entry for index, entry in enumerate(entries) if index not in done]
        if lost and len(entries) == 1 and (fate.state == TIMED_OUT or not retries):
            entries[0][1].set_result(fate)
            return
        for entry in lost:
            self._do([entry], retries if len(entries) > 1 else retries - 1)
