"""The process between a rank and a worker: what a function starts ends with them, however they end.

It is the worker's parent and runs no code of others. It is the ancestor that orphans come back to, sees that the rank
is gone, watches memory, and passes on what the worker prints, up to a limit. Jobs and answers do not go through it.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

from rlhf_megatron.rewards import cgroup, confinement
from rlhf_megatron.rewards import process_tree as processes
from rlhf_megatron.untrusted import reason_of

# Ends of this process that are none of the worker's own.
OUT_OF_MEMORY, TOO_MANY_PROCESSES, NO_NAMESPACE = 250, 251, 252
MOST_PROCESSES = 512
# After the rank has ended.
SECONDS_TO_CLOSE = 6.0
# Between two looks at rank and memory; on a machine with many processes looking is at most this part of the time, but
# where that would leave a function alone for long.
SECONDS_BETWEEN_LOOKS, MOST_SECONDS_BETWEEN_LOOKS = 0.2, 2.0
_PART_OF_LOOKING = 0.02
# The kernel, where memory runs out, ends processes with high numbers first: this one, and not the rank.
_FIRST_TO_GO = "500"

# What the workers of a pool may print. Each byte of the budget's pipe stands for one piece; the last byte is another.
PIECE_BYTES = 4096
MOST_PRINTED_BYTES = 4 * 2**20
_PIECE, _LAST_PIECE = b".", b"!"


def output_budget() -> int:
    """Return a pipe to read from, for all supervisors of a pool: they may print MOST_PRINTED_BYTES together."""
    source, filled = os.pipe()
    os.write(filled, _PIECE * (MOST_PRINTED_BYTES // PIECE_BYTES - 1) + _LAST_PIECE)
    os.close(filled)
    return source


def main(rank: int, address_space_bytes: int, memory_bytes: int, network: int, budget: int) -> NoReturn:
    """Start the worker, tell the rank its id and control group as a line of JSON, and end with it as it ends.

    Args:
        rank: process id of the rank.
        address_space_bytes: most of the worker; 0: no limit.
        memory_bytes: most that the worker and what it starts may use together; 0: no limit.
        network: 0: the worker gets none.
        budget: see ``output_budget``.
    """
    # A scheduler's warnings and a terminal's reach every process of a job; this one has work to do when the rank ends.
    for warning in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(warning, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    processes.become_subreaper()
    supervisor = os.getpid()
    printed, printing = os.pipe()
    worker = os.fork()
    if worker == 0:
        _be_worker(supervisor, address_space_bytes, network, printing, budget)
    os.close(printing)
    group = cgroup.enclose(worker)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    with contextlib.suppress(BrokenPipeError):
        os.write(1, json.dumps({"worker": worker, "group": str(group) if group else None}).encode() + b"\n")
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    relay = threading.Thread(target=pass_on, args=(printed, budget), daemon=True)
    relay.start()
    try:
        status = watch(worker, rank, memory_bytes)
        processes.end_descendants(supervisor)
    except (OSError, MemoryError) as error:  # its limits are within reach of a function of the same user
        with contextlib.suppress(OSError):
            os.write(2, f"supervisor of reward worker {worker}: {reason_of(error)}\n".encode())
        os._exit(1)  # the rank ends the group
    if group:
        cgroup.end(group)
    relay.join(1.0)
    _end_as(status)


def _be_worker(supervisor: int, address_space_bytes: int, network: int, printing: int, budget: int) -> NoReturn:
    status = 1
    try:
        if not network:
            status = NO_NAMESPACE
            confinement.leave_network()
            status = 1
        processes.die_with_parent(supervisor)
        os.setpgid(0, 0)  # so that a function that kills its group kills itself
        os.dup2(printing, 2)
        os.closerange(3, max(printing, budget) + 1)
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_GO)
        from rlhf_megatron.rewards import worker

        worker.main(address_space_bytes)
    except Exception as error:
        print(f"reward worker {os.getpid()}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(status)


def watch(worker: int, rank: int, memory_bytes: int) -> int:
    """Return how the worker ended (a status of wait), or why it must: as if it had ended with that exit status."""
    while True:
        status = _ended(worker)
        if status is not None:
            return status
        if os.getppid() != rank:
            _wait_for_end(worker)
            return 0
        begun = time.thread_time()  # of this thread alone: a busy machine makes no look longer
        reason = _excess(memory_bytes) if memory_bytes else 0
        if reason:
            return reason << 8
        pause = max(SECONDS_BETWEEN_LOOKS, (time.thread_time() - begun) / _PART_OF_LOOKING)
        signal.sigtimedwait({signal.SIGCHLD}, min(pause, MOST_SECONDS_BETWEEN_LOOKS))


def _wait_for_end(worker: int) -> None:
    """Let a worker that waits for its next job, and sees that there is none, close what it has open."""
    deadline = time.monotonic() + SECONDS_TO_CLOSE
    while _ended(worker) is None and time.monotonic() < deadline:
        signal.sigtimedwait({signal.SIGCHLD}, 0.1)


def _ended(worker: int) -> int | None:
    """Take leave of all children that have ended; return the worker's status if it is among them."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            if child[0] == worker:  # one that has itself traced stops, for ever, where others end
                status = int(signal.SIGKILL) if os.WIFSTOPPED(child[1]) else child[1]
    return status


def _excess(memory_bytes: int) -> int:
    living = processes.own_descendants()
    if len(living) > MOST_PROCESSES:
        return TOO_MANY_PROCESSES
    return OUT_OF_MEMORY if processes.memory_bytes(living, memory_bytes) > memory_bytes else 0


def _end_as(status: int) -> NoReturn:
    """End this process like another that had this status of wait."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        with contextlib.suppress(OSError):  # of SIGKILL, which needs no default
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 1)


def pass_on(printed: int, budget: int) -> None:
    """Write what comes from a pipe to stderr while the budget lasts; read and forget the rest."""
    left, last = 0, False
    while text := os.read(printed, 65536):
        while text:
            if not left:
                piece = b"" if last else os.read(budget, 1)
                left, last = (PIECE_BYTES, piece == _LAST_PIECE) if piece else (0, True)
            if not left:
                break
            written, text = text[:left], text[left:]
            left -= len(written)
            with contextlib.suppress(OSError):  # nobody reads the rank's log any more
                os.write(2, written)
            if last and not left:
                notice = f"reward workers have printed {MOST_PRINTED_BYTES:,} bytes; the rest is dropped"
                with contextlib.suppress(OSError):
                    os.write(2, f"\n{notice}\n".encode())
