"""Starting the processes that a benchmark measures, under a time limit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def run_on_ranks(
    ranks: int, script: Path, arguments: Sequence[str], seconds: float | None = None, folder: Path | None = None
) -> str:
    """``run`` of a script under torchrun."""
    torchrun = ["-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={ranks}"]
    meeting = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    return run("the ranks", ["-P", *torchrun, *meeting, str(script), *arguments], seconds, folder)


def run(name: str, arguments: Sequence[str], seconds: float | None = None, folder: Path | None = None) -> str:
    """Runs this Python with ``arguments``; why that failed, or nothing. What takes longer than ``seconds`` is ended."""
    command = [sys.executable, *arguments]
    process = subprocess.Popen(command, cwd=folder, env={**os.environ, "PYTHONWARNINGS": "ignore"})
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun passes it on to the ranks
        process.wait()
        return f"not done after {seconds:g} s"
    return f"{name} ended with status {status}" if status else ""
