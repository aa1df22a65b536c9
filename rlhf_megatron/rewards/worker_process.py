"""One worker process, from the side of the rank: jobs go to it, answers come back, and an overdue one is killed.

A plain subprocess and not multiprocessing: nothing of the rank is imported again (launch/train.py, torch), and no fork
inherits a CUDA context. Between rank and worker stands a supervisor, which ends with them what a function has started.
What a job means is in worker.py, what counts as its answer in answers.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from rlhf_megatron.child_python import child_command
from rlhf_megatron.rewards import cgroup, supervisor
from rlhf_megatron.rewards import process_tree as processes
from rlhf_megatron.rewards import worker as protocol
from rlhf_megatron.rewards.answers import BadAnswer, Batch, Outcome
from rlhf_megatron.rewards.worker import TIMED_OUT, Job

DIED = "died"

# Time for importing a scorer or a user's file, before the clock of the first sample starts.
LOAD_SECONDS = 300.0
# Time to begin with a kind of job that the worker has done before; one that a function has stopped or changed never
# does. That is no fault of the job, which goes to another worker.
SECONDS_TO_BEGIN = 15.0
# A supervisor whose worker is dead ends at once, unless a function has stopped it.
SECONDS_TO_END = 1.0
# Waiting for a worker wakes up this often, to see whether its supervisor still lives.
SECONDS_BETWEEN_LOOKS = 1.0

_BOOTSTRAP = "from rlhf_megatron.rewards import supervisor; supervisor.main(*map(int, sys.argv[2:]))"


class Worker:
    """One worker behind its supervisor, used by one thread.

    Attributes:
        process: the supervisor.
        process_id: of the worker; None before its first job.
    """

    def __init__(self, address_space_bytes: int, memory_bytes: int, network: bool, budget: int) -> None:
        """Start it; it imports nothing heavy before its first job. The arguments are those of ``supervisor.main``."""
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
        """Do jobs together; return the outcomes by index in ``jobs``, and, if the worker is of no more use, why.

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


def _ending(status: int) -> str:
    if status == supervisor.OUT_OF_MEMORY:
        return "the worker process and what it started used more memory than memory_limit_gb allows"
    if status == supervisor.TOO_MANY_PROCESSES:
        return f"the worker process had started more than {supervisor.MOST_PROCESSES} others"
    if status == supervisor.NO_NAMESPACE:
        return "this machine allows no network namespaces, which network: false needs; set it to true"
    return f"the worker process ended with status {status}"
