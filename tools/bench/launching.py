"""Starting the ranks that a benchmark measures, under a time limit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def run_on_ranks(ranks: int, script: Path, arguments: Sequence[str], seconds: float, folder: Path | None = None) -> str:
    """Runs ``script`` under torchrun; why it failed, or nothing. One that takes longer than ``seconds`` is ended."""
    command = [
        sys.executable, "-P", "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={ranks}",
        "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", str(script), *arguments,
    ]  # fmt: skip
    process = subprocess.Popen(command, cwd=folder, env={**os.environ, "PYTHONWARNINGS": "ignore"})
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun passes it on to the ranks
        process.wait()
        return f"not done after {seconds:g} s"
    return f"the ranks ended with status {status}" if status else ""
