"""The page beside rank 0: a process of its own, so that a reader of the page takes no time of a training step.

It ends with the rank, however that ends: the rank holds the other end of its standard input.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Protocol

from rlhf_megatron.child_python import child_command
from rlhf_megatron.monitor.access import TOKEN_VARIABLE, is_loopback
from rlhf_megatron.monitor.page_server import (
    Pages,
    PageServer,
    listening_socket,
    page_token,
    url_of,
)

SECONDS_TO_END = 5.0
_BOOTSTRAP = "from rlhf_megatron.monitor.page_process import main; main()"


class PageSettings(Protocol):
    """The fields that are read of the recipe's monitor.page section."""

    @property
    def address(self) -> str:
        """To listen on."""

    @property
    def port(self) -> int | None:
        """None: no page; 0: any that is free."""


class PageProcess:
    """Process that serves the page of a run until it is closed."""

    def __init__(self, folder: Path, settings: PageSettings) -> None:
        """Raise MonitorError where the port cannot be had, or the token of the environment is too short."""
        assert settings.port is not None
        token = page_token()
        listening = listening_socket(settings.address, settings.port, "monitor.page")
        self.url = url_of(settings.address, listening.getsockname()[1], token)
        with listening:
            self._process = subprocess.Popen(
                child_command(_BOOTSTRAP, str(listening.fileno()), str(folder)),
                stdin=subprocess.PIPE,
                env=os.environ | {TOKEN_VARIABLE: token},
                pass_fds=(listening.fileno(),),
                start_new_session=True,  # an interrupt is for the rank, which then closes this
            )
        self.warning = "" if is_loopback(settings.address) else "; not encrypted: the network can read its token"

    def close(self) -> None:
        """End the process. May be called twice."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main() -> None:
    """Serve on the socket of the second argument the run folder of the third, until standard input ends."""
    listening, folder = socket.socket(fileno=int(sys.argv[2])), Path(sys.argv[3])
    with PageServer(Pages({folder.name: folder}), page_token(), listening) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        os.read(sys.stdin.fileno(), 1)
        server.shutdown()
