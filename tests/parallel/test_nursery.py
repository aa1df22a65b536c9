"""Processes of the nursery: to others, what any started process is."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import psutil

from nursery import nursery

SCRIPT = "import os, signal, sys; print(os.environ['NAME'], os.getcwd(), sys.argv[1:], flush=True); signal.pause()"


def test_a_fork_shows_its_own_environment_folder_files_and_end(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    # Longer than what a process has by itself, with bytes that are no text.
    environment = {"NAME": "n", "LONG": "x" * 30_000, "BYTES": os.fsdecode(b"\xff=\xfe")}
    with (tmp_path / "out").open("wb") as out, open(os.devnull, "rb") as none:
        files = [none.fileno(), out.fileno(), out.fileno()]
        process = nursery().start([sys.executable, "-P", "script.py", "a", "b"], tmp_path, environment, files)
    try:
        shown = psutil.Process(process.pid)
        while not (printed := (tmp_path / "out").read_text(encoding="utf-8")):
            assert process.poll() is None
        assert printed == f"n {tmp_path} ['a', 'b']\n"
        assert shown.environ() == environment
        assert (shown.cwd(), process.poll()) == (str(tmp_path), None)
    finally:
        shown.send_signal(signal.SIGTERM)
        status = process.wait(30)
    assert status == -signal.SIGTERM
