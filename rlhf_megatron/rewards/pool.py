"""Worker processes with a time limit per job: an overdue one is killed and replaced, and only its own job is lost.

Plain subprocesses and not multiprocessing: nothing of the rank is imported again (launch/train.py, torch), and no fork
inherits a CUDA context. A thread of this process waits for each worker, so that jobs go on while the rank does other
things. Between rank and worker stands a supervisor, which ends with them what a function has started. What a job means
is in worker.py, what counts as its answer in answers.py; what a lost job is worth is in score.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from rlhf_megatron.child_python import child_command
from rlhf_megatron.rewards import cgroup, supervisor
from rlhf_megatron.rewards import process_tree as processes
from rlhf_megatron.rewards import worker as protocol
from rlhf_megatron.rewards.answers import BadAnswer, Batch, Outcome
from rlhf_megatron.rewards.threads import DaemonThreads
from rlhf_megatron.rewards.worker import TIMED_OUT, Job

DIED = "died"

# Time for importing a scorer or a user's file, before the clock of the first sample starts.
LOAD_SECONDS = 300.0
# Time to begin with a kind of job that the worker has done before; one that a function has stopped or changed never
# does. That is no fault of the job, which goes to another worker.
SECONDS_TO_BEGIN = 15.0
# A job whose worker was killed from outside (by the kernel for memory, say) is tried again, this often.
RETRIES_AFTER_DEATH = 1
# A supervisor whose worker is dead ends at once, unless a function has stopped it.
SECONDS_TO_END = 1.0
# Waiting for a worker wakes up this often, to see whether its supervisor still lives.
SECONDS_BETWEEN_LOOKS = 1.0

_BOOTSTRAP = "from rlhf_megatron.rewards import supervisor; supervisor.main(*map(int, sys.argv[2:]))"

Entry = tuple[Job, "Future[Outcome]"]


class Worker:
    """One worker behind its supervisor, used by one thread.

    Attributes:
        process: the supervisor.
        process_id: of the worker; None before its first job.
    """

    def __init__(self, address_space_bytes: int, memory_bytes: int, network: bool, budget: int) -> None:
        """Start it; it imports nothing heavy before its first job. The arguments are those of `supervisor.main`."""
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        limits = [str(number) for number in (os.getpid(), address_space_bytes, memory_bytes, int(network), budget)]
        self.process = subprocess.Popen(
            child_command(_BOOTSTRAP, *limits),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | threads,
            start_new_session=True,  # so that a function that kills its parent's group does not kill the rank
            pass_fds=(budget,),
            bufsize=0,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._stdin, self._stdout = self.process.stdin, self.process.stdout
        for pipe in (self._stdin, self._stdout):
            os.set_blocking(pipe.fileno(), False)
        self._received = bytearray()
        self.process_id: int | None = None
        self._group: Path | None = None
        self._loaded: set[str] = set()  # kinds of job; a pool has one function at most

    def run(self, jobs: Sequence[Job]) -> tuple[dict[int, Outcome], Outcome | None]:
        """Do jobs together; return the outcomes by index in `jobs`, and, if the worker is of no more use, why.

        Then the reason is also what became of the jobs without an outcome.
        """
        batch = Batch(jobs)
        try:
            is_late = self._converse(batch)
            if not is_late and self._received:
                raise BadAnswer("more than the answers")
        except BadAnswer as error:
            return batch.outcomes, Outcome(DIED, message=f"the worker process sent what is no answer ({error})")
        except (OSError, EOFError):
            return batch.outcomes, Outcome(DIED, message=_ending(self.process.wait()))
        if is_late and batch.awaited is None and batch.jobs[0]["kind"] in self._loaded:
            return batch.outcomes, Outcome(DIED, message="the worker process does not begin with another sample")
        return batch.outcomes, Outcome(TIMED_OUT) if is_late else None

    def is_quiet(self) -> bool:
        """Return whether an idle worker lives, runs, and has sent nothing that would be among its next answers."""
        return self._stdout.read(1) is None and not (self.process_id and processes.is_stopped(self.process_id))

    def _converse(self, batch: Batch) -> bool:
        """Send jobs and take their answers until all are there; return whether they are late instead.

        Raises:
            BadAnswer: the worker sent something else.
            EOFError, OSError: it has ended.
        """
        unsent = memoryview(protocol.pack_jobs(batch.jobs))
        kind = batch.jobs[0]["kind"]
        deadline = time.monotonic() + (SECONDS_TO_BEGIN if kind in self._loaded else LOAD_SECONDS)
        is_loading = True
        while not batch.is_done:
            # Nothing is sent before the greeting, which no function can have written.
            if unsent and self.process_id is not None:
                unsent = unsent[self._stdin.write(unsent) or 0 :]
            if not self._wait(bool(unsent) and self.process_id is not None, deadline):
                return True
            self._receive()
            while not batch.is_done and (line := self._line(batch.most_bytes)) is not None:
                if self.process_id is None:
                    self._greeted(line)
                else:
                    batch.take(line)
            if is_loading and batch.awaited is not None:
                grace = protocol.SECONDS_TO_CANCEL if batch.awaited or batch.ends_itself else 0.0
                deadline, is_loading = time.monotonic() + batch.jobs[0]["timeout_seconds"] + grace, False
                self._loaded.add(kind)
        return False

    def _wait(self, is_sending: bool, deadline: float) -> bool:
        """Wait until there is something to receive or room to send; return False at the deadline.

        Raises:
            EOFError: the supervisor has ended, and what a function has left behind holds the pipes.
        """
        poll = select.poll()
        poll.register(self._stdout, select.POLLIN)
        if is_sending:
            poll.register(self._stdin, select.POLLOUT)
        while (left := deadline - time.monotonic()) > 0.0:
            if poll.poll(1000.0 * min(left, SECONDS_BETWEEN_LOOKS)):
                return True
            if self.process.poll() is not None:
                raise EOFError
        return False

    def _receive(self) -> None:
        data = self._stdout.read(65536)
        if data == b"":
            raise EOFError
        self._received += data or b""

    def _line(self, most_bytes: int) -> bytes | None:
        """Take the next whole line from what was received."""
        end = self._received.find(b"\n")
        if max(end, 0 if end >= 0 else len(self._received)) > most_bytes:
            raise BadAnswer(f"a line of more than {most_bytes:,} bytes")
        if end < 0:
            return None
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        return line

    def _greeted(self, line: bytes) -> None:
        greeting = json.loads(line)  # of the supervisor, before the worker has run anything
        self.process_id = greeting["worker"]
        self._group = Path(greeting["group"]) if greeting["group"] else None

    def kill(self) -> None:
        """End the process and everything that it started, and wait for its end."""
        processes.end_descendants(self.process.pid)
        if self.process_id is not None:  # then the supervisor has a worker, and ends with it
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(SECONDS_TO_END)
        self.process.kill()
        self.process.wait()
        if self._group:
            cgroup.end(self._group)

    def release(self) -> None:
        """Close the pipes; called by the thread that reads them."""
        self._stdin.close()
        self._stdout.close()


def bytes_of(gigabytes: float) -> int:
    """Return a recipe's memory limit, in GB of 2^30 bytes, as bytes."""
    return max(1, int(min(gigabytes, 2.0**30) * 2**30))


def _ending(status: int) -> str:
    if status == supervisor.OUT_OF_MEMORY:
        return "the worker process and what it started used more memory than memory_limit_gb allows"
    if status == supervisor.TOO_MANY_PROCESSES:
        return f"the worker process had started more than {supervisor.MOST_PROCESSES} others"
    if status == supervisor.NO_NAMESPACE:
        return "this machine allows no network namespaces, which network: false needs; set it to true"
    return f"the worker process ended with status {status}"


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
        """Return an idle or a new worker, or None after `end`."""
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
    """A fixed number of workers, started when jobs come and killed by `close` or with this process.

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
