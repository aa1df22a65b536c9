"""Starting the processes that a benchmark measures, under a time limit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

# The last line of a traceback, behind torch's mark of the rank; not torchrun's own, which says only that a rank failed.
_ERROR = re.compile(r"^(?:\[rank\d+\]: )?((?:\w+\.)*(?!ChildFailed)\w*(?:Error|Exception): .*)")
_SECONDS_TO_READ_ON = 5.0


def run_on_ranks(
    ranks: int, script: Path, arguments: Sequence[str], seconds: float | None = None, folder: Path | None = None
) -> str:
    """Run a script's ``run`` under torchrun."""
    torchrun = ["-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={ranks}"]
    meeting = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    return run("the ranks", ["-P", *torchrun, *meeting, str(script), *arguments], seconds, folder)


def measured_on_ranks(
    ranks: int, script: Path, settings: Mapping[str, Any], seconds: float | None = None
) -> tuple[str, Any]:
    """Measure under torchrun, with ``settings``, by a script that ends in ``main_or_rank``; return why that failed, or
    nothing, and what rank 0 found."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        reason = run_on_ranks(ranks, script.resolve(), [json.dumps(settings), str(output)], seconds)
        return reason, None if reason else json.loads(output.read_text(encoding="utf-8"))


def main_or_rank(main: Callable[[], int], measure: Callable[..., Any]) -> int:
    """Do ``main``; in a process that ``measured_on_ranks`` started, a rank's part of it. Return the exit status."""
    if "RANK" not in os.environ:
        return main()
    from rlhf_megatron.rollout.vllm.process_environment import prepare_environment

    prepare_environment()
    from rlhf_megatron.topology.world import join_world

    join_world()
    result = measure(**json.loads(sys.argv[1]))
    if os.environ["RANK"] == "0":
        Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")
    return 0


def run(
    name: str,
    arguments: Sequence[str],
    seconds: float | None = None,
    folder: Path | None = None,
    environment: Mapping[str, str] = os.environ,
    python: Sequence[str] = (sys.executable,),
) -> str:
    """Run ``python`` with ``arguments``; return why that failed, or nothing. What takes longer than ``seconds`` is
    ended."""
    command = [*python, *arguments]
    environment = {**environment, "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    assert process.stderr is not None
    errors: list[str] = []
    reader = threading.Thread(target=_pass_on, args=(process.stderr, errors), daemon=True)
    reader.start()
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun passes it on to the ranks
        process.wait()
        return f"not done after {seconds:g} s"
    reader.join(_SECONDS_TO_READ_ON)  # a grandchild that lives on may hold the pipe open
    return f"{name} ended with status {status}" + "".join(f": {error}" for error in errors[-1:]) if status else ""


def last_error(lines: Sequence[str]) -> str:
    """Return the last of the lines that name an error, without torch's mark of the rank; empty where none does."""
    return next((match[1] for line in reversed(lines) if (match := _ERROR.match(line))), "")


def _pass_on(stream: IO[str], errors: list[str]) -> None:
    """Copy ``stream`` to stderr as it comes, and the lines that name an error to ``errors``."""
    for line in stream:
        sys.stderr.write(line)
        sys.stderr.flush()
        if match := _ERROR.match(line):
            errors.append(match[1])
