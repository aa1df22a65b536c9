"""Threads that wait for something else (a worker process, a service) while the rank goes on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

Call = tuple[Callable[..., None], tuple[Any, ...]]


class DaemonThreads:
    """Threads that make calls, in at most ``size`` threads, in the order of ``submit``; the calls must not raise.

    Not a ThreadPoolExecutor: where the process ends by an error, that would first make all calls that are left.
    """

    def __init__(self, size: int, name: str) -> None:
        """Start nothing yet; the name shows in stack traces."""
        self._size, self._name = size, name
        self._waiting: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, function: Callable[..., None], *arguments: Any) -> None:
        """Have a call made; return at once."""
        self._waiting.put((function, arguments))
        if len(self._threads) < self._size:
            self._threads.append(threading.Thread(target=self._run, name=self._name, daemon=True))
            self._threads[-1].start()

    def close(self) -> None:
        """End the threads when the calls that were submitted have been made; wait for nothing."""
        for _ in self._threads:
            self._waiting.put(None)

    def _run(self) -> None:
        while (call := self._waiting.get()) is not None:
            function, arguments = call
            function(*arguments)
