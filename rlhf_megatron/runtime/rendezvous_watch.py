"""The end of torchrun on a node that has lost the node of the rendezvous.

torchrun's store waits for an answer as long as the kernel takes a silent connection for alive, some 15 minutes,
whatever its timeouts say. By then its ranks have long ended, each by its watchdog.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time

import psutil

LOST_SECONDS = 180.0
_TRIES = 6  # within that time
_GRACE_SECONDS = 10.0  # for ranks, from SIGTERM to SIGKILL


def watch_rendezvous(host: str, port: int, lost_seconds: float) -> None:
    """End this process and all that it has started once ``host`` has answered, and then not for ``lost_seconds``.

    Says so in one line on stderr; the exit status is 1. Returns at once: a daemon thread watches.
    """
    threading.Thread(target=_watch, args=(host, port, lost_seconds), name="rendezvous watch", daemon=True).start()


def _watch(host: str, port: int, lost_seconds: float) -> None:
    interval = lost_seconds / _TRIES
    answered: float | None = None
    while True:
        if _answers(host, port, interval):
            answered = time.monotonic()
        elif answered is not None and time.monotonic() - answered >= lost_seconds:
            break
        time.sleep(interval)
    print(
        f"torchrun: the rendezvous at {host}:{port} has not answered for {lost_seconds:g} s; this node ends with it "
        "(--rdzv-conf lost_seconds=...)",
        file=sys.stderr,
        flush=True,
    )
    _end_descendants()
    os._exit(1)  # the main thread is inside torch's store, where no exception reaches it


def _answers(host: str, port: int, timeout: float) -> bool:
    try:
        with socket.create_connection((host, port), timeout):
            return True
    except OSError:
        return False


def _end_descendants() -> None:
    ranks = psutil.Process().children(recursive=True)
    for rank in ranks:
        rank.terminate()
    for rank in psutil.wait_procs(ranks, _GRACE_SECONDS)[1]:
        rank.kill()
